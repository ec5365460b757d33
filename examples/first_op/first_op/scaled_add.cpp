#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

using torch::stable::Tensor;

Tensor scaled_add(const Tensor& x, const Tensor& y, double scale) {
  STD_TORCH_CHECK(x.scalar_type() == torch::headeronly::ScalarType::Float, "x must be float32");
  STD_TORCH_CHECK(y.scalar_type() == x.scalar_type(), "y must be float32");
  STD_TORCH_CHECK(x.numel() == y.numel(), "x and y must have as many elements");
  STD_TORCH_CHECK(x.is_contiguous() && y.is_contiguous(), "x and y must be contiguous");
  Tensor out = torch::stable::empty_like(x);
  const float* a = x.const_data_ptr<float>();
  const float* b = y.const_data_ptr<float>();
  float* o = out.mutable_data_ptr<float>();
  torch::stable::parallel_for(0, x.numel(), 1 << 15, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) o[i] = a[i] + static_cast<float>(scale) * b[i];
  });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(first_op, CPU, m) {
  m.impl("scaled_add", TORCH_BOX(&scaled_add));
}
