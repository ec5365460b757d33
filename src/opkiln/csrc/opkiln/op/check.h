// Checks of arguments. The message names the op and the arguments: "scaled_add: y has shape [3], x has
// [4]".
#pragma once

#include "tensor.h"

OPK_NAMESPACE_BEGIN

using Tensors = std::initializer_list<const Tensor*>;

inline void check_shapes(const Tensor& first, Tensors others) {
  for (const Tensor* each : others) {
    if (__builtin_expect(each->sizes() != first.sizes(), 0)) {
      raise(*each, " has shape ", each->sizes(), ", ", first, " has ", first.sizes());
    }
  }
}
inline void check_dtypes(const Tensor& first, Tensors others) {
  for (const Tensor* each : others) {
    if (__builtin_expect(each->dtype() != first.dtype(), 0)) {
      raise(*each, " has dtype ", each->dtype(), ", ", first, " has ", first.dtype());
    }
  }
}
inline void check_devices(const Tensor& first, Tensors others) {
  for (const Tensor* each : others) {
    if (__builtin_expect(each->device() != first.device(), 0)) {
      raise(*each, " is on ", each->device(), ", ", first, " is on ", first.device());
    }
  }
}
inline void check_layouts(Tensors tensors) {
  for (const Tensor* each : tensors) {
    if (__builtin_expect(!each->is_contiguous(), 0)) {
      raise(*each, " is not contiguous: its shape is ", each->sizes(), ", its strides are ",
            each->strides());
    }
  }
}

// Each takes any number of tensors and compares them with the first.
template <class... More>
void check_same_shape(const Tensor& first, const More&... others) {
  check_shapes(first, {&others...});
}
template <class... More>
void check_same_dtype(const Tensor& first, const More&... others) {
  check_dtypes(first, {&others...});
}
template <class... More>
void check_same_device(const Tensor& first, const More&... others) {
  check_devices(first, {&others...});
}
template <class... More>
void check_contiguous(const Tensor& first, const More&... others) {
  check_layouts({&first, &others...});
}
inline void check_dim(const Tensor& tensor, int64_t dim) {
  if (__builtin_expect(tensor.dim() != dim, 0)) {
    raise(tensor, " has shape ", tensor.sizes(), ", expected ", dim,
          dim == 1 ? " dimension" : " dimensions");
  }
}
inline void check_shape(const Tensor& tensor, Ints shape) {
  if (__builtin_expect(tensor.sizes() != shape, 0)) {
    raise(tensor, " has shape ", tensor.sizes(), ", expected ", shape);
  }
}
inline void check_dtype(const Tensor& tensor, DType dtype) {
  if (__builtin_expect(tensor.dtype() != dtype, 0)) {
    raise(tensor, " has dtype ", tensor.dtype(), ", expected ", dtype);
  }
}

OPK_NAMESPACE_END
