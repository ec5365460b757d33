// Shared by the CPU and CUDA versions of the residual adds: argument checks, and the op's functions.
#pragma once

#include "arguments.h"

namespace {

// hidden + scale * (residual + bias + attention_bias) + attention_scale * attention. Null pointers are absent.
struct Sum {
  const void* hidden;
  const void* residual;
  const void* attention;
  const void* bias;  // one element per column, like attention_bias
  const void* attention_bias;
  void* out;
  int64_t rows;
  int64_t columns;
  float scale;
  float attention_scale;
  opkiln::ElementType type;
};

// residual * coef[0] + mlp * coef[1], where coef[i] is one number per row or per column.
struct Mix {
  const void* residual;
  const void* coef;
  const void* mlp;
  void* out;
  int64_t rows;
  int64_t columns;
  bool by_row;  // coef has two numbers per row; otherwise it is two rows
  opkiln::ElementType type;
};

#if !defined(__CUDACC_RTC__)
OPK_PLAIN_BEGIN

// Defined by each device's source. Called only if there is at least one element.
void add(const Sum& sum);
void mix(const Mix& mix);

Tensor residual_add(const Tensor& hidden, const Tensor& residual, const MaybeTensor& attention,
                    const MaybeTensor& bias, const MaybeTensor& attention_bias, double scale,
                    double attention_scale) {
  opk::device_of(hidden);
  OPK_CHECK(hidden.dim() > 0, "hidden has no dimensions, expected at least 1");
  const opkiln::ElementType type = opk::element_of(hidden);
  const Contiguous x(hidden);
  const OptionalInput kept(hidden, residual, OptionalInput::kSame), attended(hidden, attention, OptionalInput::kSame),
      shift(hidden, bias, OptionalInput::kRow), more(hidden, attention_bias, OptionalInput::kRow);
  Tensor out = opk::empty_like(*x);
  const int64_t numel = hidden.numel();
  if (numel > 0) {
    const int64_t columns = hidden.size(-1);
    add({x.data(), kept.data(), attended.data(), shift.data(), more.data(), out.data(), numel / columns,
         columns, static_cast<float>(scale), static_cast<float>(attention_scale), type});
  }
  return out;
}

Tensor moe_res_matmul(const Tensor& residual, const Tensor& coef, const Tensor& mlp) {
  opk::device_of(mlp);
  OPK_CHECK(mlp.dim() > 0, "mlp has no dimensions, expected at least 1");
  const opkiln::ElementType type = opk::element_of(mlp);
  opk::check_same_dtype(mlp, coef);
  opk::check_same_device(mlp, coef);
  const Contiguous x(mlp), factors(coef);
  const OptionalInput kept(mlp, residual, OptionalInput::kSame);
  const int64_t numel = mlp.numel(), columns = mlp.size(-1);
  bool by_row = coef.dim() == mlp.dim() && coef.size(-1) == 2;
  for (int64_t i = 0; by_row && i + 1 < mlp.dim(); ++i) by_row = coef.size(i) == mlp.size(i);
  if (!by_row) opk::check_shape(coef, {2, columns});
  Tensor out = opk::empty_like(*x);
  if (numel > 0) {
    mix({kept.data(), factors.data(), x.data(), out.data(), numel / columns, columns, by_row, type});
  }
  return out;
}

OPK_PLAIN_END
#endif

}  // namespace
