// Argument checks and types that the CPU and GPU versions share.
#pragma once

#include <opkiln/op.h>

namespace evoformer {

// Distances, in elements, from one batch, row, place or head to the next.
struct Strides {
  int64_t batch, row, place, head;
};

struct Sizes {
  int64_t batch, rows, length, heads, head;
};

using opk::Tensor;
using MaybeTensor = opk::optional<Tensor>;

#if !defined(__CUDACC_RTC__)

constexpr double kLog2E = 1.4426950408889634;

inline Sizes check_inputs(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& mask_bias,
                     const MaybeTensor& pair_bias) {
  opk::check_dim(q, 5);
  opk::check_same_shape(q, k, v);
  opk::check_same_dtype(q, k, v);
  opk::check_same_device(q, k, v);
  const Sizes s = {q.size(0), q.size(1), q.size(2), q.size(3), q.size(4)};
  if (mask_bias.has_value()) opk::check_shape(*mask_bias, {s.batch, s.rows, 1, 1, s.length});
  if (pair_bias.has_value()) opk::check_shape(*pair_bias, {s.batch, 1, s.heads, s.length, s.length});
  for (const MaybeTensor* bias : {&mask_bias, &pair_bias}) {
    if (!bias->has_value()) continue;
    opk::check_same_dtype(q, **bias);
    opk::check_same_device(q, **bias);
  }
  return s;
}

// A tensor whose head elements are contiguous: x itself, or a copy.
inline Tensor make_heads_contiguous(const Tensor& x) {
  return x.stride(-1) == 1 || x.size(-1) == 1 ? x : opk::contiguous(x);
}

inline Strides strides_of(const Tensor& x) { return {x.stride(0), x.stride(1), x.stride(2), x.stride(3)}; }

// A contiguous bias, or an undefined tensor if there is none.
inline Tensor make_contiguous(const MaybeTensor& bias) { return bias.has_value() ? opk::contiguous(*bias) : Tensor(); }

inline Tensor empty_moments(const Sizes& s, const Tensor& like) {
  return opk::empty({2, s.batch, s.rows, s.heads, s.length}, opk::DType::float32, like.device());
}

// Checks the results of the forward pass that the backward pass receives.
inline void check_results(const Sizes& s, const Tensor& q, const Tensor& grad, const Tensor& output,
                          const Tensor& moments) {
  opk::check_same_shape(q, grad, output);
  opk::check_same_dtype(q, grad, output);
  opk::check_same_device(q, grad, output, moments);
  opk::check_dtype(moments, opk::DType::float32);
  opk::check_shape(moments, {2, s.batch, s.rows, s.heads, s.length});
}

struct Gradients {
  Tensor q, k, v, mask, pair;

  Gradients(const Sizes& s, const Tensor& like, bool of_mask, bool of_pair) {
    for (Tensor* each : {&q, &k, &v}) *each = opk::empty({s.batch, s.rows, s.length, s.heads, s.head}, like);
    mask = of_mask ? opk::empty({s.batch, s.rows, 1, 1, s.length}, like) : opk::empty({0}, like);
    const int64_t of_pairs[] = {s.batch, 1, s.heads, s.length, s.length};
    // Without rows, the pair bias' gradient is an empty sum.
    if (of_pair) pair = like.numel() == 0 ? opk::zeros({of_pairs, 5}, like) : opk::empty({of_pairs, 5}, like);
    if (!of_pair) pair = opk::empty({0}, like);
  }
};

#endif

}  // namespace evoformer
