// Argument checks. Messages name the op and the arguments: "scaled_add: y has shape [3], x has [4]".
#pragma once

#include "tensor.h"

OPK_PLAIN_BEGIN
OPK_NAMESPACE_BEGIN

using Tensors = std::initializer_list<const Tensor*>;

[[gnu::noinline]] inline void check_shapes(const Tensor& first, Tensors others) {
  for (const Tensor* each : others) {
    if (__builtin_expect(each->sizes() != first.sizes(), 0)) {
      raise_form("%s has shape %s, %s has %s", NameOf(*each).text, ListOf(each->sizes()).text,
                 NameOf(first).text, ListOf(first.sizes()).text);
    }
  }
}
[[gnu::noinline]] inline void check_dtypes(const Tensor& first, Tensors others) {
  for (const Tensor* each : others) {
    if (__builtin_expect(each->dtype() != first.dtype(), 0)) {
      raise_form("%s has dtype %s, %s has %s", NameOf(*each).text, name_of(each->dtype()),
                 NameOf(first).text, name_of(first.dtype()));
    }
  }
}
[[gnu::noinline]] inline void check_devices(const Tensor& first, Tensors others) {
  for (const Tensor* each : others) {
    if (__builtin_expect(each->device() != first.device(), 0)) {
      raise_form("%s is on %s, %s is on %s", NameOf(*each).text, DeviceOf(each->device()).text,
                 NameOf(first).text, DeviceOf(first.device()).text);
    }
  }
}
[[gnu::noinline]] inline void check_layouts(Tensors tensors) {
  for (const Tensor* each : tensors) {
    if (__builtin_expect(!each->is_contiguous(), 0)) {
      raise_form("%s is not contiguous: its shape is %s, its strides are %s", NameOf(*each).text,
                 ListOf(each->sizes()).text, ListOf(each->strides()).text);
    }
  }
}

// Each compares any number of tensors with the first.
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
[[gnu::noinline]] inline void check_dim(const Tensor& tensor, int64_t dim) {
  if (__builtin_expect(tensor.dim() != dim, 0)) {
    raise_form("%s has shape %s, expected %lld dimension%s", NameOf(tensor).text,
               ListOf(tensor.sizes()).text, static_cast<long long>(dim), dim == 1 ? "" : "s");
  }
}
[[gnu::noinline]] inline void check_shape(const Tensor& tensor, Ints shape) {
  if (__builtin_expect(tensor.sizes() != shape, 0)) {
    raise_form("%s has shape %s, expected %s", NameOf(tensor).text, ListOf(tensor.sizes()).text,
               ListOf(shape).text);
  }
}
[[gnu::noinline]] inline void check_dtype(const Tensor& tensor, DType dtype) {
  if (__builtin_expect(tensor.dtype() != dtype, 0)) {
    raise_form("%s has dtype %s, expected %s", NameOf(tensor).text, name_of(tensor.dtype()),
               name_of(dtype));
  }
}

OPK_NAMESPACE_END
OPK_PLAIN_END
