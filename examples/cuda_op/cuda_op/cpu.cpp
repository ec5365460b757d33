// The CPU version: kernel and binding in one.

#include <cmath>

#include "checks.h"

namespace {

Tensor bias_gelu(const Tensor& x, const Tensor& bias) {
  check(x, bias);
  Tensor out = torch::stable::empty_like(x);
  if (x.numel() == 0) return out;
  const int64_t columns = bias.numel();
  const float* a = x.const_data_ptr<float>();
  const float* b = bias.const_data_ptr<float>();
  float* o = out.mutable_data_ptr<float>();
  torch::stable::parallel_for(0, x.numel() / columns, 1, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t i = 0; i < columns; ++i) {
        const float v = a[row * columns + i] + b[i];
        o[row * columns + i] = 0.5f * v * (1.0f + std::erf(v * 0.70710678f));
      }
    }
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cuda_op, CPU, m) {
  m.impl("bias_gelu", TORCH_BOX(&bias_gelu));
}
