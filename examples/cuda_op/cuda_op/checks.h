// What both bindings ask of their arguments, on torch's stable ABI.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

using torch::stable::Tensor;

inline void check(const Tensor& x, const Tensor& bias) {
  STD_TORCH_CHECK(x.scalar_type() == torch::headeronly::ScalarType::Float, "x must be float32");
  STD_TORCH_CHECK(bias.scalar_type() == x.scalar_type(), "bias must be float32");
  STD_TORCH_CHECK(bias.device() == x.device(), "x and bias must be on one device");
  STD_TORCH_CHECK(x.is_contiguous() && bias.is_contiguous(), "x and bias must be contiguous");
  STD_TORCH_CHECK(x.dim() > 0 && bias.dim() == 1 && x.size(-1) == bias.numel(),
                  "bias must have as many elements as x has columns");
}
