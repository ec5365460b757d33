// The CPU version: kernel and binding in one. The compiler vectorises the loop for the CPU that it
// builds for.

#include "checks.h"

namespace {

Tensor scaled_add(const Tensor& x, const Tensor& y, double scale) {
  check(x, y);
  Tensor out = torch::stable::empty_like(x);
  const float s = static_cast<float>(scale);
  const float* a = x.const_data_ptr<float>();
  const float* b = y.const_data_ptr<float>();
  float* o = out.mutable_data_ptr<float>();
  torch::stable::parallel_for(0, x.numel(), 1 << 15, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) o[i] = a[i] + s * b[i];
  });
  return out;
}

}  // namespace

// The schema is Python's (op.py); a library only implements it.
STABLE_TORCH_LIBRARY_IMPL(demo_ops, CPU, m) {
  m.impl("scaled_add", TORCH_BOX(&scaled_add));
}
