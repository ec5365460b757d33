// Shared by the CPU and CUDA versions of int8 linear layers: argument checks, and the op's functions.
#pragma once

#include "arguments.h"

namespace {
namespace int8_linear {

// A matrix of rows [outputs, inputs], with a scale per `group` consecutive elements in memory.
struct Weights {
  const int8_t* data;
  const float* scales;
  int64_t rows, columns, group;
  int shift;  // group is 2^shift; -1: not a power of two
};

OPK_HOST_DEVICE inline int64_t group_of(const Weights& weights, int64_t element) {
  return weights.shift >= 0 ? element >> weights.shift : element / weights.group;
}

// A product with few rows.
struct Few {
  Weights weights;
  const void *x, *bias;  // x is contiguous; bias may be null
  void* out;
  int rows;  // rows of x
  opkiln::ElementType type;
};

constexpr int kMostRows = 32;  // rows of x in Few

#if !defined(__CUDACC_RTC__)
OPK_PLAIN_BEGIN

// Defined by each device's source. Called only if there is at least one element.
void dequantize(const Weights& weights, void* out, opkiln::ElementType type);
// Returns false, and does nothing, if this product needs dequantized weights.
bool multiply(const Few& few);

inline Weights weights_of(const Tensor& weight, const Tensor& scales) {
  opk::check_dtype(weight, opk::DType::int8);
  opk::check_dtype(scales, opk::DType::float32);
  opk::check_same_device(weight, scales);
  opk::check_contiguous(weight, scales);
  const int64_t numel = weight.numel(), groups = scales.numel();
  OPK_CHECK(groups > 0 && numel % groups == 0, scales, " has ", groups, " elements, which do not divide ", weight,
            " with ", numel);
  const int64_t group = numel / groups;
  int shift = 0;
  while ((int64_t{1} << shift) < group) ++shift;
  const int64_t columns = weight.dim() > 0 ? weight.size(-1) : 1;
  return {weight.data<const int8_t>(), scales.data<const float>(), columns ? numel / columns : 0, columns, group,
          (int64_t{1} << shift) == group ? shift : -1};
}

inline Tensor dequantize_int8(const Tensor& weight, const Tensor& scales, opk::DType dtype) {
  const Weights weights = weights_of(weight, scales);
  const opkiln::ElementType type = opk::element_of(dtype);
  Tensor out = opk::empty(weight.sizes(), dtype, weight.device());
  if (weight.numel() > 0) dequantize(weights, out.data(), type);
  return out;
}

inline Tensor int8_linear(const Tensor& x, const Tensor& weight, const Tensor& scales, const MaybeTensor& bias) {
  opk::check_same_device(x, weight);
  opk::check_dim(weight, 2);
  const opkiln::ElementType type = opk::element_of(x);
  OPK_CHECK(x.dim() > 0 && x.size(-1) == weight.size(1), x, " has shape ", x.sizes(), ", ", weight, " has ",
            weight.sizes());
  if (bias) {
    opk::check_same_dtype(x, *bias);
    opk::check_same_device(x, *bias);
    opk::check_shape(*bias, {weight.size(0)});
  }
  const Weights weights = weights_of(weight, scales);
  const int64_t rows = weights.columns ? x.numel() / weights.columns : 0;
  if (rows > 0 && rows <= kMostRows && weights.rows > 0 && (!bias || bias->is_contiguous())) {
    const Contiguous given(x);
    int64_t sizes[64];
    for (int64_t i = 0; i < x.dim(); ++i) sizes[i] = i + 1 == x.dim() ? weights.rows : x.size(i);
    Tensor out = opk::empty({sizes, x.dim()}, x);
    if (multiply({weights, given.data(), bias ? bias->data() : nullptr, out.data(), static_cast<int>(rows), type})) {
      return out;
    }
  }
  return opk::call("aten::linear", "", x, dequantize_int8(weight, scales, x.dtype()), bias);
}

OPK_PLAIN_END
#endif

}  // namespace int8_linear
}  // namespace
