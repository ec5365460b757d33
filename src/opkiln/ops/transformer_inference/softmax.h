// Shared by the CPU and CUDA versions of softmax: argument checks, and the op's functions.
#pragma once

#include "arguments.h"

namespace {
namespace softmax {

// Strides are in elements, for batches, heads, queries (and keys).
struct Work {
  const void* x;
  void* out;
  int64_t x_strides[3], out_strides[3];
  const void* mask;  // null if absent
  int64_t mask_strides[4];  // 0 where it is broadcast
  bool wide_mask;  // the mask is fp32, for any dtype of x
  const float* slopes;  // one per head; null if absent
  int rows, heads, queries;
  int columns;
  float scale;
  bool causal;
  int64_t offset, window;  // a window of 0 is no window
  opkiln::ElementType type;
};

// A row: its position in memory, and the keys that it sees.
struct Row {
  int64_t x, out, mask;  // offsets in elements
  int first, last;       // the visible keys, `last` exclusive
  float slope;
  int64_t position;  // position of its query among the keys
};

OPK_HOST_DEVICE inline int clamp(int64_t value, int most) {
  return value < 0 ? 0 : value > most ? most : static_cast<int>(value);
}

OPK_HOST_DEVICE inline Row row_of(const Work& work, int row) {
  const int64_t q = row % work.queries, rest = row / work.queries;
  const int64_t h = rest % work.heads, b = rest / work.heads;
  Row out;
  out.x = b * work.x_strides[0] + h * work.x_strides[1] + q * work.x_strides[2];
  out.out = b * work.out_strides[0] + h * work.out_strides[1] + q * work.out_strides[2];
  out.mask = b * work.mask_strides[0] + h * work.mask_strides[1] + q * work.mask_strides[2];
  out.position = q + work.offset;
  out.slope = work.slopes ? work.slopes[h] : 0.0f;
  out.first = work.window ? clamp(out.position - work.window + 1, work.columns) : 0;
  out.last = work.columns;
  if (work.causal) {
    out.last = clamp(out.position + 1, work.columns);
  } else if (work.window) {
    out.last = clamp(out.position + work.window, work.columns);
  }
  return out;
}

#if !defined(__CUDACC_RTC__)
OPK_PLAIN_BEGIN

void run(const Work& work);  // defined by each device's source; called only if there is at least one element

// Extends sizes or strides to four dimensions. Missing ones are added at the front.
inline void set_four(const opk::Ints& values, int64_t missing, int64_t* four) {
  for (int i = 0; i < 4; ++i) {
    const int64_t from = i - 4 + values.size();
    four[i] = from < 0 ? missing : values[from];
  }
}

inline void set_mask(Work& work, const Tensor& x, const Tensor& mask) {
  opk::check_same_device(x, mask);
  work.wide_mask = mask.dtype() == opk::DType::float32;
  if (!work.wide_mask) opk::check_same_dtype(x, mask);
  bool fits = mask.dim() <= x.dim();
  for (int64_t i = 1; fits && i <= mask.dim(); ++i) fits = mask.size(-i) == x.size(-i) || mask.size(-i) == 1;
  OPK_CHECK(fits, mask, " has shape ", mask.sizes(), ", which cannot be broadcast to ", x.sizes());
  int64_t sizes[4];
  set_four(mask.sizes(), 1, sizes);
  set_four(mask.strides(), 0, work.mask_strides);
  for (int i = 0; i < 4; ++i) {
    if (sizes[i] == 1) work.mask_strides[i] = 0;
  }
  work.mask = mask.data();
}

// Computes the rows of `x`, whose last stride must be 1, into `out`. Both have the same shape.
inline void apply(const Tensor& x, void* out, opk::Ints out_strides, const MaybeTensor& mask,
                  const MaybeTensor& slopes, double scale, bool causal, int64_t offset, int64_t window) {
  Work work;
  work.type = opk::element_of(x);
  OPK_CHECK(x.dim() >= 1 && x.dim() <= 4, x, " has shape ", x.sizes(),
            ", expected at most [batch, heads, queries, keys]");
  OPK_CHECK(window >= 0, "window is ", window, ", expected at least 0");
  int64_t sizes[4], strides[4];
  set_four(x.sizes(), 1, sizes);
  const int64_t rows = sizes[0] * sizes[1] * sizes[2];
  OPK_SERVED(rows < 0x7fffffff && sizes[3] < 0x7fffffff, x, " has shape ", x.sizes(), ": too many rows");
  work.rows = static_cast<int>(rows), work.heads = static_cast<int>(sizes[1]);
  work.queries = static_cast<int>(sizes[2]), work.columns = static_cast<int>(sizes[3]);
  set_four(x.strides(), 0, strides);
  __builtin_memcpy(work.x_strides, strides, sizeof work.x_strides);
  set_four(out_strides, 0, strides);
  __builtin_memcpy(work.out_strides, strides, sizeof work.out_strides);
  work.mask = nullptr, work.wide_mask = false;
  for (int64_t& each : work.mask_strides) each = 0;
  if (mask) set_mask(work, x, *mask);
  work.slopes = nullptr;
  if (slopes) {
    opk::check_same_device(x, *slopes);
    opk::check_shape(*slopes, {sizes[1]});
    opk::check_contiguous(*slopes);
    work.slopes = slopes->data<const float>();
  }
  work.scale = static_cast<float>(scale);
  work.causal = causal, work.offset = offset, work.window = window;
  work.x = x.data(), work.out = out;
  if (rows > 0 && work.columns > 0) run(work);
}

inline Tensor softmax(const Tensor& given, const MaybeTensor& mask, const MaybeTensor& slopes, double scale,
                      bool causal, int64_t offset, int64_t window) {
  const bool plain = given.dim() == 0 || given.stride(-1) == 1 || given.size(-1) <= 1;
  const Tensor x = plain ? given : opk::contiguous(given);
  Tensor out = opk::empty(x.sizes(), x);
  apply(x, out.data(), out.strides(), mask, slopes, scale, causal, offset, window);
  return out;
}

inline void softmax_(Tensor& x, const MaybeTensor& mask, const MaybeTensor& slopes, double scale, bool causal,
                     int64_t offset, int64_t window) {
  OPK_SERVED(x.dim() == 0 || x.stride(-1) == 1 || x.size(-1) <= 1, x, " has strides ", x.strides(),
             ", expected 1 as the last");
  apply(x, x.data(), x.strides(), mask, slopes, scale, causal, offset, window);
}

OPK_PLAIN_END
#endif

}  // namespace softmax
}  // namespace
