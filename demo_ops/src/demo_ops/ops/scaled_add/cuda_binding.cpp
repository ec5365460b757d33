// From torch's tensors to the kernel. The host compiler builds this beside nvcc.

#include <opkiln/cuda_stream.h>
#include <torch/csrc/stable/accelerator.h>

#include "checks.h"
#include "scaled_add.h"

namespace {

Tensor scaled_add(const Tensor& x, const Tensor& y, double scale) {
  check(x, y);
  Tensor out = torch::stable::empty_like(x);
  if (x.numel() == 0) return out;  // a launch of no blocks is an error
  const int32_t device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);  // a launch is on the current device
  const char* const error = kernels::scaled_add(
      x.const_data_ptr<float>(), y.const_data_ptr<float>(), static_cast<float>(scale),
      out.mutable_data_ptr<float>(), x.numel(), opkiln::current_stream(device));
  STD_TORCH_CHECK(error == nullptr, "scaled_add was not launched: ", error);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(demo_ops, CUDA, m) {
  m.impl("scaled_add", TORCH_BOX(&scaled_add));
}
