// The op on a GPU: the device, the stream, the registration. Torch calls ROCm's devices CUDA, too,
// so this serves both, and it needs neither's headers.

#include <opkiln/cuda_stream.h>
#include <torch/csrc/stable/accelerator.h>

#include "bindings.h"

namespace {

using namespace opkiln;

struct GPU {
  static int32_t device_of(const char* name, const Tensor& tensor) {
    if (!tensor.is_cuda()) {
      refuse(std::string(name) + " is not on a GPU");
    }
    return tensor.get_device_index();
  }

  static void quantize(const quantizer::Work& work, const quantizer::Parts& parts, int32_t device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    launched(quantizer::enqueue_quantize(work, parts, current_stream(device)), device);
  }

  static void dequantize(const quantizer::Work& work, int32_t device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    launched(quantizer::enqueue_dequantize(work, current_stream(device)), device);
  }

 private:
  static void launched(const char* error, int32_t device) {
    if (error != nullptr) {
      refuse("quantizer was not launched on " + name_of(device) + ": " + error);
    }
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(opkiln, CUDA, m) {
  quantizing::Functions<GPU>::implement(m);
}
