// Shared by the CPU and CUDA versions of rotary position embedding:
// argument checks, and the op's four functions.
#pragma once

#include <opkiln/arguments.h>
#include <opkiln/turns.h>

namespace {
namespace rotary {

using Element = opkiln::ElementType;

struct Side {  // one tensor [batch, seq, heads, dim] and its result; strides are in elements
  const void* x;
  void* out;
  int64_t batch, seq, head, step;
  int64_t out_batch, out_seq, out_head, out_step;
  int heads;
};

struct Work {
  Side q, k;  // k has no heads if there is only one tensor
  const void* positions;  // null: 0, 1, 2 … in each sequence
  int64_t position_batch, position_seq;
  bool wide_positions;  // int64 instead of int32
  const void *cos, *sin;  // null: the frequencies are used
  int64_t table_rows, cos_row, sin_row;
  Element table;
  Element element;
  int tokens, seq;
  int pairs;
  int rest;  // elements after the rotated ones, to copy; 0 if in place
  bool interleaved, inverse;
  opkiln::Frequencies frequencies;
};

OPK_HOST_DEVICE inline int64_t position_of(const Work& work, int64_t batch, int64_t seq) {
  if (!work.positions) return seq;
  const int64_t at = batch * work.position_batch + seq * work.position_seq;
  return work.wide_positions ? static_cast<const int64_t*>(work.positions)[at]
                             : static_cast<const int32_t*>(work.positions)[at];
}

OPK_HOST_DEVICE inline float table_value(const void* table, int64_t at, Element element) {
  if (element == Element::kFloat) return static_cast<const float*>(table)[at];
  const uint16_t bits = static_cast<const uint16_t*>(table)[at];
  return element == Element::kFloat16 ? opk::bits::half_to_float(bits)
                                   : opk::bits::to_float(uint32_t{bits} << 16);
}

// The cosine and sine of a pair at a position. The position must be in the tables.
OPK_HOST_DEVICE inline void cos_sin_of(const Work& work, int64_t position, int pair, float* c, float* s) {
  if (!work.cos) {
    opkiln::cos_sin(static_cast<uint64_t>(position) * work.frequencies.turns[pair], c, s);
  } else {
    *c = table_value(work.cos, position * work.cos_row + pair, work.table);
    *s = table_value(work.sin, position * work.sin_row + pair, work.table);
  }
  if (work.inverse) *s = -*s;
}

#if !defined(__CUDACC_RTC__)
OPK_PLAIN_BEGIN

using opk::Tensor;

void run(const Work& work);  // defined by each device's source; called only if there is at least one element

inline Side side_of(const Tensor& x, void* out, opk::Ints out_strides) {
  const opk::Ints in = x.strides();
  const bool batched = x.dim() == 4;
  const int64_t o = batched ? 1 : 0;
  return {x.data(), out,
          batched ? in[0] : 0, in[o], in[o + 1], in[o + 2],
          batched ? out_strides[0] : 0, out_strides[o], out_strides[o + 1], out_strides[o + 2],
          static_cast<int>(x.size(-2))};
}

inline void set_table(Work& work, const Tensor& table, const Tensor& x, const void** data, int64_t* row) {
  opk::check_same_device(x, table);
  opk::check_dim(table, 2);
  opk::check_shape(table, {table.size(0), int64_t{work.pairs}});
  OPK_SERVED(table.stride(1) == 1 || work.pairs <= 1, table, " has strides ", table.strides(),
             ", expected 1 as the last");
  *data = table.data();
  *row = table.stride(0);
}

// Sets everything except the results' pointers.
inline Work work_of(const Tensor& x, const Tensor* k, const opk::optional<Tensor>& positions,
                    const opk::optional<Tensor>& cos, const opk::optional<Tensor>& sin, int64_t dim,
                    double theta, bool interleaved, bool inverse) {
  Work work;
  work.element = opk::element_of(x);
  OPK_CHECK(x.dim() == 3 || x.dim() == 4, x, " has shape ", x.sizes(),
            ", expected [batch, seq, heads, dim] or [seq, heads, dim]");
  const int64_t head = x.size(-1), rotated = dim ? dim : head;
  OPK_CHECK(rotated > 0 && rotated <= head && rotated % 2 == 0, "dim is ", rotated,
            ", expected an even number from 2 to the size of a head, which is ", head);
  const int64_t tokens = (x.dim() == 4 ? x.size(0) : 1) * x.size(-3);
  OPK_SERVED(tokens < 0x7fffffff && head < 0x7fffffff, x, " has shape ", x.sizes(), ": too many tokens");
  work.tokens = static_cast<int>(tokens), work.seq = static_cast<int>(x.size(-3));
  if (k) {
    opk::check_same_dtype(x, *k);
    opk::check_same_device(x, *k);
    bool fits = k->dim() == x.dim();
    for (int64_t i = 0; fits && i < x.dim(); ++i) fits = i == x.dim() - 2 || k->size(i) == x.size(i);
    OPK_CHECK(fits, *k, " has shape ", k->sizes(), ", ", x, " has ", x.sizes(), ": only heads may differ");
  }
  work.pairs = static_cast<int>(rotated / 2);
  work.rest = static_cast<int>(head - rotated);
  work.interleaved = interleaved, work.inverse = inverse;
  work.positions = nullptr, work.position_batch = work.position_seq = 0, work.wide_positions = false;
  if (positions) {
    const Tensor& at = *positions;
    opk::check_same_device(x, at);
    work.wide_positions = at.dtype() == opk::DType::int64;
    OPK_CHECK(work.wide_positions || at.dtype() == opk::DType::int32, at, " has dtype ", at.dtype(),
              ", expected int32 or int64");
    const bool rows = at.dim() == 2 && x.dim() == 4;
    OPK_CHECK((rows || at.dim() == 1) && at.size(-1) == work.seq && (!rows || at.size(0) == x.size(0)), at,
              " has shape ", at.sizes(), ", ", x, " has ", x.sizes(), ": expected [batch, seq] or [seq]");
    work.position_batch = rows ? at.stride(0) : 0;
    work.position_seq = at.stride(-1);
    work.positions = at.data();
  }
  work.cos = work.sin = nullptr, work.table_rows = work.cos_row = work.sin_row = 0, work.table = Element::kFloat;
  OPK_CHECK(cos.has_value() == sin.has_value(), "cos and sin are given together, or neither");
  if (cos) {
    work.table = opk::element_of(*cos);
    opk::check_same_dtype(*cos, *sin);
    opk::check_same_shape(*cos, *sin);
    set_table(work, *cos, x, &work.cos, &work.cos_row);
    set_table(work, *sin, x, &work.sin, &work.sin_row);
    work.table_rows = cos->size(0);
    OPK_CHECK(work.positions || work.table_rows >= work.seq, *cos, " has ", work.table_rows,
              " positions, ", x, " has ", work.seq);
  } else {
    OPK_SERVED(work.pairs <= opkiln::kMostPairs, "dim is ", rotated, ", and at most ", 2 * opkiln::kMostPairs,
               " without tables cos and sin");
    OPK_CHECK(theta > 0, "theta is ", theta, ", expected a positive number");
    opkiln::set_frequencies(work.frequencies, theta, work.pairs);
  }
  return work;
}

inline void apply(Work& work, const Tensor& x, const Tensor* k, Tensor& out, Tensor* k_out) {
  work.q = side_of(x, out.data(), out.strides());
  work.k = work.q;
  work.k.heads = 0;
  if (k) work.k = side_of(*k, k_out->data(), k_out->strides());
  if (work.tokens > 0 && work.q.heads + work.k.heads > 0) run(work);
}

#define ROTARY_OPTIONS                                                                             \
  const opk::optional<Tensor>&positions, const opk::optional<Tensor>&cos, const opk::optional<Tensor>&sin, \
      int64_t dim, double theta, bool interleaved, bool inverse

inline Tensor rotary(const Tensor& x, ROTARY_OPTIONS) {
  Work work = work_of(x, nullptr, positions, cos, sin, dim, theta, interleaved, inverse);
  Tensor out = opk::empty_like(x);
  apply(work, x, nullptr, out, nullptr);
  return out;
}

inline void rotary_(Tensor& x, ROTARY_OPTIONS) {
  Work work = work_of(x, nullptr, positions, cos, sin, dim, theta, interleaved, inverse);
  work.rest = 0;
  apply(work, x, nullptr, x, nullptr);
}

inline opk::tuple<Tensor, Tensor> rotary_qk(const Tensor& q, const Tensor& k, ROTARY_OPTIONS) {
  Work work = work_of(q, &k, positions, cos, sin, dim, theta, interleaved, inverse);
  Tensor q_out = opk::empty_like(q), k_out = opk::empty_like(k);
  apply(work, q, &k, q_out, &k_out);
  return {static_cast<Tensor&&>(q_out), static_cast<Tensor&&>(k_out)};
}

inline void rotary_qk_(Tensor& q, Tensor& k, ROTARY_OPTIONS) {
  Work work = work_of(q, &k, positions, cos, sin, dim, theta, interleaved, inverse);
  work.rest = 0;
  apply(work, q, &k, q, &k);
}

#undef ROTARY_OPTIONS

OPK_PLAIN_END
#endif

}  // namespace rotary
}  // namespace
