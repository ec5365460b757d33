// Shared by the CPU and CUDA versions of the norms: argument checks, and the op's functions.
#pragma once

#include "arguments.h"

namespace {

// The rows to normalize. Null pointers are absent.
struct Norm {
  const void* x;
  const void* residual;    // added to x before the norm; input_bias requires it
  const void* input_bias;  // also added to x, one element per column
  const void* weight;
  const void* bias;
  void* out;
  void* sum;  // null, or receives x + residual + input_bias
  int64_t rows;
  int64_t columns;
  float eps;
  opkiln::ElementType type;
  bool centred;  // layer norm: the mean is subtracted
};

#if !defined(__CUDACC_RTC__)
OPK_PLAIN_BEGIN

// Defined by each device's source. Called only if there is at least one element.
void normalize(const Norm& norm);

struct Options {
  bool centred;
  double eps;
  bool keeps_sum;
};

[[gnu::noinline]] opk::tuple<Tensor, Tensor> run_norm(
    const Tensor& given, const MaybeTensor& residual, const MaybeTensor& input_bias,
    const MaybeTensor& weight, const MaybeTensor& bias, const Options& options) {
  opk::device_of(given);
  OPK_CHECK(given.dim() > 0, "x has no dimensions, expected at least 1");
  const opkiln::ElementType type = opk::element_of(given);
  const Contiguous x(given);
  const OptionalInput added(given, residual, OptionalInput::kSame), shift(given, input_bias, OptionalInput::kRow),
      scale(given, weight, OptionalInput::kRow), offset(given, bias, OptionalInput::kRow);
  Tensor out = opk::empty_like(*x), sum;
  if (options.keeps_sum) sum = opk::empty_like(*x);
  const int64_t numel = given.numel();
  if (numel > 0) {
    const int64_t columns = given.size(-1);
    normalize({x.data(), added.data(), shift.data(), scale.data(), offset.data(), out.data(),
               options.keeps_sum ? sum.data() : nullptr, numel / columns, columns,
               static_cast<float>(options.eps), type, options.centred});
  }
  return {static_cast<Tensor&&>(out), static_cast<Tensor&&>(sum)};
}

Tensor rms_norm(const Tensor& x, const MaybeTensor& weight, double eps) {
  return run_norm(x, opk::none, opk::none, weight, opk::none, {false, eps, false}).first;
}

Tensor layer_norm(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, double eps) {
  return run_norm(x, opk::none, opk::none, weight, bias, {true, eps, false}).first;
}

opk::tuple<Tensor, Tensor> pre_rms_norm(const Tensor& x, const Tensor& residual, const MaybeTensor& weight,
                                        const MaybeTensor& input_bias, double eps) {
  return run_norm(x, residual, input_bias, weight, opk::none, {false, eps, true});
}

opk::tuple<Tensor, Tensor> pre_layer_norm(const Tensor& x, const Tensor& residual,
                                          const MaybeTensor& weight, const MaybeTensor& bias,
                                          const MaybeTensor& input_bias, double eps) {
  return run_norm(x, residual, input_bias, weight, bias, {true, eps, true});
}

Tensor post_rms_norm(const Tensor& x, const Tensor& residual, const MaybeTensor& weight,
                     const MaybeTensor& input_bias, double eps) {
  return run_norm(x, residual, input_bias, weight, opk::none, {false, eps, false}).first;
}

Tensor post_layer_norm(const Tensor& x, const Tensor& residual, const MaybeTensor& weight,
                       const MaybeTensor& bias, const MaybeTensor& input_bias, double eps) {
  return run_norm(x, residual, input_bias, weight, bias, {true, eps, false}).first;
}

OPK_PLAIN_END
#endif

}  // namespace
