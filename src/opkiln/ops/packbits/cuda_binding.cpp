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

  static void pack(const packbits::Signs& signs, int32_t device) {
    enqueue(packbits::enqueue_pack, signs, device);
  }

  static void unpack(const packbits::Signs& signs, int32_t device) {
    enqueue(packbits::enqueue_unpack, signs, device);
  }

 private:
  static void enqueue(const char* (*kernel)(const packbits::Signs&, void*),
                      const packbits::Signs& signs, int32_t device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    const char* const error = kernel(signs, current_stream(device));
    if (error != nullptr) {
      refuse("packbits was not launched on " + name_of(device) + ": " + error);
    }
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(opkiln, CUDA, m) {
  packing::Functions<GPU>::implement(m);
}
