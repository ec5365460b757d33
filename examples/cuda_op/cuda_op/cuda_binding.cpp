// From torch's tensors to the kernel. g++ compiles this beside the kernel, on the stable ABI.

#include <opkiln/cuda_stream.h>
#include <torch/csrc/stable/accelerator.h>

#include "bias_gelu.h"
#include "checks.h"

namespace {

Tensor bias_gelu(const Tensor& x, const Tensor& bias) {
  check(x, bias);
  Tensor out = torch::stable::empty_like(x);
  if (x.numel() == 0) return out;
  const int32_t device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);  // a launch is on the current device
  const char* const error = cuda_op::bias_gelu(
      x.const_data_ptr<float>(), bias.const_data_ptr<float>(), out.mutable_data_ptr<float>(),
      x.numel(), bias.numel(), opkiln::current_stream(device));
  STD_TORCH_CHECK(error == nullptr, "bias_gelu was not launched: ", error);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cuda_op, CUDA, m) {
  m.impl("bias_gelu", TORCH_BOX(&bias_gelu));
}
