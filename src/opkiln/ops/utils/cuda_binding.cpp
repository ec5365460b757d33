// From torch's tensors to the kernel: the stream, the registration. Torch calls ROCm's devices CUDA,
// too, so this serves both, and it needs neither's headers.

#include <opkiln/cuda_stream.h>
#include <torch/csrc/stable/accelerator.h>

#include "parts.h"

namespace {

using namespace opkiln;

void copy_all(const std::vector<Part>& parts, int32_t device) {
  const torch::stable::accelerator::DeviceGuard guard(device);
  const char* const error = enqueue_copies(parts.data(), parts.size(), current_stream(device));
  if (error != nullptr) {
    refuse("utils was not launched on " + name_of(device) + ": " + error);
  }
}

int32_t gpu_of(const TensorList& tensors) {
  const int32_t device = device_of(tensors);
  if (device == kCPU) {
    refuse("tensors[0] is not on a GPU");
  }
  return device;
}

Tensor flatten_list(TensorList tensors) {
  const int32_t device = gpu_of(tensors);
  const Flattened made = Flattened::of(tensors, device);
  copy_all(made.parts, device);
  return made.flat;
}

void unflatten_list(TensorList tensors, Tensor flat) {
  const int32_t device = gpu_of(tensors);
  copy_all(Flattened::back(tensors, flat, device).parts, device);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(opkiln, CUDA, m) {
  m.impl("flatten_list", TORCH_BOX(&flatten_list));
  m.impl("unflatten_list_", TORCH_BOX(&unflatten_list));
}
