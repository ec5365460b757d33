// The op on a GPU: the device, the stream, the registration. Torch calls ROCm's devices CUDA, too,
// so this serves both, and it needs neither's headers.

#include <opkiln/cuda_stream.h>
#include <torch/csrc/stable/accelerator.h>

#include "bindings.h"

namespace {

using namespace opkiln;
using deepspeed_quantizer::Work;

struct GPU {
  static int32_t device_of(const char* name, const Tensor& tensor) {
    if (!tensor.is_cuda()) {
      refuse(std::string(name) + " is not on a GPU");
    }
    return tensor.get_device_index();
  }

  static void quantize(const Work& work, int32_t device) {
    enqueue(deepspeed_quantizer::enqueue_quantize, work, device);
  }

  static void dequantize(const Work& work, int32_t device) {
    enqueue(deepspeed_quantizer::enqueue_dequantize, work, device);
  }

 private:
  static void enqueue(const char* (*kernel)(const Work&, void*), const Work& work, int32_t device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    const char* const error = kernel(work, current_stream(device));
    if (error != nullptr) {
      refuse("deepspeed_quantizer was not launched on " + name_of(device) + ": " + error);
    }
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(opkiln, CUDA, m) {
  quantizing::Functions<GPU>::implement(m);
}
