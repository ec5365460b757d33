// Norms of rows on host memory. Memory is read once: a row stays in the cache between its steps. The first
// step of a row runs together with the last step of the previous row, so that reads and writes overlap.

#include <opkiln/floats.h>
#include <opkiln/op.h>

#include "norms.h"
#include "rows.h"

namespace {

using opkiln::Vec;

// The sum of squared distances of a row from its mean.
template <class T>
float squares_of_row(const T* row, int64_t columns, float mean) {
  const auto take = [&]<class V>(V& sum, int64_t at) {
    const V x = V::load(row + at) - V::all(mean);
    sum = multiply_add(x, x, sum);
  };
  Wide sums = Wide::all(0);
  int64_t at = 0;
  for (; at < whole_registers(columns); at += Wide::kLanes) take(sums, at);
  Vec rest = sums.sum();
  for (; at + Vec::kLanes <= columns; at += Vec::kLanes) take(rest, at);
  float sum = opkiln::sum_of_lanes(rest);
  for (; at < columns; ++at) {
    const float x = opkiln::as_float(row[at]) - mean;
    sum += x * x;
  }
  return sum;
}

template <class T, bool kAround>
inline void put(const Wide& value, T* to, int64_t count) {
  if constexpr (kAround) {
    if (count >= Wide::kLanes) return value.store_around(to);
  }
  store_some(value, to, count);
}

// The inputs and outputs of a row's first step. It computes x + residual +
// shift, rounded to the stored type, and sums up that or its squares.
template <class T>
struct First {
  const T* x;
  const T* residual;  // null: absent, like the next three members
  const T* shift;
  T* sum;   // null: not requested
  T* kept;  // a copy for the later steps, which stays in the cache
  float total;
};

template <class T>
struct Last {
  const T* row;
  const T* weight;
  const T* bias;
  T* out;
  float mean, scale;
};

// The first step of one row together with the last step of another. Either may be null.
template <class T, bool kCentred, bool kAround>
void step(First<T>* given, const Last<T>* last_given, int64_t columns) {
  const First<T> first = given ? *given : First<T>{};
  const Last<T> last = last_given ? *last_given : Last<T>{};
  Wide total = Wide::all(0);
  const Wide mean = Wide::all(last.mean), scale = Wide::all(last.scale);
  const auto at_once = [&](int64_t at, int64_t some) {
    if (first.x) {
      prefetch_wide(first.x + at);
      Wide x = load_some(first.x + at, some);
      if (first.residual) {
        prefetch_wide(first.residual + at);
        if (first.shift) x = x + load_some(first.shift + at, some);
        x = x + load_some(first.residual + at, some);
        if (first.sum) put<T, kAround>(x, first.sum + at, some);
        store_some(x, first.kept + at, some);
        x = load_some(first.kept + at, some);
      }
      total = kCentred ? total + x : multiply_add(x, x, total);
    }
    if (last.row) {
      Wide out = load_some(last.row + at, some);
      if constexpr (kCentred) out = out - mean;
      out = out * scale;
      if (last.weight) out = out * load_some(last.weight + at, some);
      if (last.bias) out = out + load_some(last.bias + at, some);
      put<T, kAround>(out, last.out + at, some);
    }
  };
  const int64_t whole = whole_registers(columns);
  for (int64_t at = 0; at < whole; at += Wide::kLanes) at_once(at, Wide::kLanes);
  if (whole < columns) at_once(whole, columns - whole);
  if (given) given->total = opkiln::sum_of_lanes(total.sum());
}

template <class T, bool kCentred, bool kAround>
void normalize_rows(const Norm& n, int64_t first, int64_t last, T* kept) {
  const auto row_of = [&](const void* tensor, int64_t row) {
    return tensor ? static_cast<T*>(const_cast<void*>(tensor)) + row * n.columns : nullptr;
  };
  // Rows of sums alternate between two buffers, because two steps overlap.
  const int64_t stride = (n.columns + Wide::kLanes - 1) / Wide::kLanes * Wide::kLanes;
  const auto beginning = [&](int64_t row) {
    return First<T>{row_of(n.x, row),    row_of(n.residual, row),   row_of(n.input_bias, 0),
                    row_of(n.sum, row), kept + row % 2 * stride, 0};
  };
  First<T> now = beginning(first);
  step<T, kCentred, kAround>(&now, nullptr, n.columns);
  for (int64_t row = first; row < last; ++row) {
    const T* const from = n.residual ? now.kept : now.x;
    const float count = static_cast<float>(n.columns), mean = kCentred ? now.total / count : 0;
    const float square = (kCentred ? squares_of_row(from, n.columns, mean) : now.total) / count;
    const Last<T> ending{from, row_of(n.weight, 0), row_of(n.bias, 0), row_of(n.out, row), mean,
                         1.0f / __builtin_sqrtf(square + n.eps)};
    const bool more = row + 1 < last;
    if (more) now = beginning(row + 1);
    step<T, kCentred, kAround>(more ? &now : nullptr, &ending, n.columns);
  }
  opkiln::settle_stores();
}

template <class T>
void normalize_rows(const Norm& n, int64_t first, int64_t last) {
  constexpr int64_t kOnStack = 16384;  // elements
  const int64_t wanted = n.residual ? 2 * (n.columns + Wide::kLanes) : 0;
  alignas(64) T few[kOnStack];
  T* const kept = wanted <= kOnStack ? few : static_cast<T*>(__builtin_malloc(wanted * sizeof(T)));
  OPK_CHECK(kept, "no memory for ", wanted, " elements");
  const bool around = n.rows * n.columns * static_cast<int64_t>(sizeof(T)) >= opkiln::kAroundBytes &&
                      n.columns * sizeof(T) % Wide::kAroundAlignment == 0 &&
                      may_go_around(static_cast<T*>(n.out)) && may_go_around(static_cast<T*>(n.sum));
  if (n.centred) {
    (around ? normalize_rows<T, true, true> : normalize_rows<T, true, false>)(n, first, last, kept);
  } else {
    (around ? normalize_rows<T, false, true> : normalize_rows<T, false, false>)(n, first, last, kept);
  }
  if (kept != few) __builtin_free(kept);
}

void normalize(const Norm& norm) {
  const int64_t bytes = norm.columns * opkiln::size_of(norm.type) * 2;
  const int64_t grain = opk::kGrainBytes / bytes > 0 ? opk::kGrainBytes / bytes : 1;
  opk::parallel_for(0, norm.rows, grain, [&](int64_t first, int64_t last) {
    OPK_ELEMENT(norm.type, T, (float, opkiln::BFloat16, opkiln::Float16), normalize_rows<T>(norm, first, last));
  });
}

}  // namespace

OPKILN_OP(rms_norm, cpu);
OPKILN_OP(layer_norm, cpu);
OPKILN_OP(pre_rms_norm, cpu);
OPKILN_OP(pre_layer_norm, cpu);
OPKILN_OP(post_rms_norm, cpu);
OPKILN_OP(post_layer_norm, cpu);
