// Shared by the CPU and CUDA versions: argument checks, and the op's function.
#pragma once

#include <opkiln/arguments.h>

namespace {

// The elements in the order of memory. Element i has channel i / inner % channels; inner is 1
// if the channels come last. `other` and `other_bias` may be null.
struct Work {
  const void* x;
  const void* bias;
  const void* other;
  const void* other_bias;
  void* out;
  int64_t numel;
  int64_t channels;
  int64_t inner;
};

#if !defined(__CUDACC_RTC__)
OPK_PLAIN_BEGIN

using opk::Tensor;

// Defined by each device's source. Called only if there is at least one element.
void add(const Work& work, opk::DType dtype);

// Whether the elements are dense, with the channels last and the other dimensions in order.
bool channels_last(const Tensor& x, int64_t dim) {
  const opk::Ints sizes = x.sizes(), strides = x.strides();
  int64_t step = 1;
  const auto fits = [&](int64_t d) {
    const bool right = sizes[d] == 1 || strides[d] == step;
    step *= sizes[d];
    return right;
  };
  if (!fits(dim)) return false;
  for (int64_t d = x.dim(); d-- > 0;) {
    if (d != dim && !fits(d)) return false;
  }
  return true;
}

// The tensor itself, or a copy with these strides.
Tensor copy_with_strides(const Tensor& tensor, opk::Ints strides) {
  const opk::Ints sizes = tensor.sizes(), mine = tensor.strides();
  bool same = true;
  for (int64_t d = 0; d < sizes.size(); ++d) same = same && (sizes[d] == 1 || mine[d] == strides[d]);
  if (same) return tensor;
  return opk::call("aten::copy_", "", opk::empty_strided(sizes, strides, tensor.dtype(), tensor.device()),
                   tensor, false);
}

void check_against(const Tensor& x, const Tensor& each, opk::Ints shape) {
  opk::check_shape(each, shape);
  opk::check_same_dtype(x, each);
  opk::check_same_device(x, each);
}

Tensor spatial_bias_add(const Tensor& x, const Tensor& bias, const opk::optional<Tensor>& other,
                        const opk::optional<Tensor>& other_bias, opk::optional<int64_t> channel_dim) {
  opk::device_of(x);
  const opk::DType dtype = x.dtype();
  OPK_SERVED(dtype == opk::DType::float32 || dtype == opk::DType::bfloat16 ||
                 dtype == opk::DType::float16 || dtype == opk::DType::float64,
             x, " has dtype ", dtype, ", expected float32, bfloat16, float16 or float64");
  const int64_t dims = x.dim();
  int64_t dim = channel_dim.value_or(dims == 4 ? 1 : -1);
  const int64_t channels = x.size(dim);
  if (dim < 0) dim += dims;
  OPK_CHECK(other || !other_bias, "other_bias is given without other");
  check_against(x, bias, {channels});
  if (other) check_against(x, *other, x.sizes());
  if (other_bias) check_against(x, *other_bias, {channels});

  const bool last = channels_last(x, dim);
  const Tensor images = last ? x : opk::contiguous(x);
  int64_t inner = 1;
  for (int64_t d = dim + 1; !last && d < dims; ++d) inner *= x.size(d);
  Tensor out = opk::empty_strided(images.sizes(), images.strides(), dtype, x.device());
  const Tensor biases = opk::contiguous(bias);
  const Tensor residual = other ? copy_with_strides(*other, images.strides()) : Tensor();
  const Tensor residual_biases = other_bias ? opk::contiguous(*other_bias) : Tensor();
  const Work work{images.data(),
                  biases.data(),
                  other ? residual.data() : nullptr,
                  other_bias ? residual_biases.data() : nullptr,
                  out.data(),
                  x.numel(),
                  channels,
                  inner};
  if (work.numel > 0) add(work, dtype);
  return out;
}

OPK_PLAIN_END
#endif

}  // namespace
