// What both bindings ask of their arguments, on torch's stable ABI.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

using torch::stable::Tensor;

inline void check(const Tensor& x, const Tensor& y) {
  STD_TORCH_CHECK(x.scalar_type() == torch::headeronly::ScalarType::Float, "x must be float32");
  STD_TORCH_CHECK(y.scalar_type() == x.scalar_type(), "y must be float32");
  STD_TORCH_CHECK(y.device() == x.device(), "x and y must be on one device");
  STD_TORCH_CHECK(x.is_contiguous() && y.is_contiguous(), "x and y must be contiguous");
  bool same = x.dim() == y.dim();
  for (int64_t i = 0; same && i < x.dim(); ++i) same = x.size(i) == y.size(i);
  STD_TORCH_CHECK(same, "x and y must have one shape");
}
