// From torch's tensors to CUDA's runtime; the registration. Torch calls ROCm's devices CUDA, too, so
// this serves both, and it needs neither's headers.

#include <torch/csrc/stable/accelerator.h>

#include "memory.h"
#include "register_pages.h"

namespace {

using namespace opkiln;

void lock_pages(Tensor memory, Tensor device) {
  check_memory(memory);
  if (memory.numel() == 0) {
    return;
  }
  const torch::stable::accelerator::DeviceGuard guard(device.get_device_index());
  check_done("lock", memory,
             register_pages(memory.mutable_data_ptr(), static_cast<std::size_t>(memory.numel())));
}

void unlock_pages(Tensor memory, Tensor device) {
  check_memory(memory);
  if (memory.numel() == 0) {
    return;
  }
  const torch::stable::accelerator::DeviceGuard guard(device.get_device_index());
  check_done("unlock", memory, unregister_pages(memory.mutable_data_ptr()));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(opkiln, CUDA, m) {
  m.impl("lock_pages_", TORCH_BOX(&lock_pages));
  m.impl("unlock_pages_", TORCH_BOX(&unlock_pages));
}
