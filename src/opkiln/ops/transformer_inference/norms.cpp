// Norms of rows on host memory. Memory is read once: a row stays in the cache between its steps. The steps of
// successive rows run together, so that reads, arithmetic and writes overlap.

#include <opkiln/floats.h>
#include <opkiln/op.h>

#include "norms.h"
#include "rows.h"

namespace {

using opkiln::Vec;

// What one pass does. First it computes x + residual + shift of one row, rounded to the stored type, and sums
// up that or its squares. Then come the squared distances of an earlier row from its mean, and then the result
// of a row before that. Null pointers are absent.
template <class T>
struct Pass {
  const T* x;
  const T* residual;
  const T* shift;
  T* sum;
  T* kept;  // a copy for the later steps, which stays in the cache
  float total;
  const T* centred;
  float centre;
  float squares;
  const T* row;
  const T* weight;
  const T* bias;
  T* out;
  float mean, scale;
};

using Four = opkiln::Registers<4>;

template <class T, bool kCentred>
[[gnu::flatten]] void run_pass(Pass<T>& given, int64_t columns, bool around) {
  const Pass<T> p = given;  // a local, so that stores cannot alias it
  T ones[Four::kLanes];
  Four::all(1).store(ones);
  Four total = Four::all(0), squares = Four::all(0);
  const auto at_once = [&](int64_t at, int64_t some) {
    const auto load = [&](const T* from) { return load_some<Four>(from + at, some); };
    const auto put = [&](const Four& value, T* to) {
      if (around) {
        value.store_around(to + at);
      } else {
        store_some(value, to + at, some);
      }
    };
    if (p.x) {
      prefetch_registers<Four>(p.x + at);
      Four x = load(p.x);
      if (p.residual) {
        prefetch_registers<Four>(p.residual + at);
        if (p.shift) x = x + load(p.shift);
        x = x + load(p.residual);
        if (p.sum) put(x, p.sum);
        store_some(x, p.kept + at, some);
        x = load(p.kept);
      }
      total = kCentred ? total + x : multiply_add(x, x, total);
    }
    if (kCentred && p.centred) {
      Four x = load(p.centred) - Four::all(p.centre);
      if (some < Four::kLanes) x = x * load_some<Four>(ones, some);
      squares = multiply_add(x, x, squares);
    }
    if (p.row) {
      Four out = load(p.row);
      if constexpr (kCentred) out = out - Four::all(p.mean);
      out = out * Four::all(p.scale);
      if (p.weight) out = out * load(p.weight);
      if (p.bias) out = out + load(p.bias);
      put(out, p.out);
    }
  };
  const int64_t whole = whole_registers<Four>(columns);
  for (int64_t at = 0; at < whole; at += Four::kLanes) at_once(at, Four::kLanes);
  if (whole < columns) at_once(whole, columns - whole);
  given.total = opkiln::sum_of_lanes(total.sum());
  if constexpr (kCentred) given.squares = opkiln::sum_of_lanes(squares.sum());
}

// The rows in work at a time. Rows of sums take turns with as many buffers.
template <bool kCentred>
constexpr int64_t kRowsInWork = kCentred ? 3 : 2;

int64_t stride_of_kept(const Norm& n) { return (n.columns + Four::kLanes - 1) / Four::kLanes * Four::kLanes; }

template <class T, bool kCentred>
void normalize_rows(const Norm& n, int64_t first, int64_t last, bool around, T* kept) {
  constexpr int64_t kRows = kRowsInWork<kCentred>, kLag = kRows - 1;  // a row's last step comes kLag rows after its first
  const auto row_of = [&](const void* tensor, int64_t row) {
    return tensor ? static_cast<T*>(const_cast<void*>(tensor)) + row * n.columns : nullptr;
  };
  const auto kept_of = [&](int64_t row) {
    return n.residual ? kept + row % kRows * stride_of_kept(n) : row_of(n.x, row);
  };
  const float count = static_cast<float>(n.columns);
  float means[kRows] = {}, scales[kRows];
  for (int64_t row = first; row < last + kLag; ++row) {
    const int64_t centred = row - 1, done = row - kLag;
    Pass<T> pass{};
    if (row < last) {
      pass.x = row_of(n.x, row);
      pass.residual = row_of(n.residual, row);
      pass.shift = row_of(n.input_bias, 0);
      pass.sum = row_of(n.sum, row);
      pass.kept = kept_of(row);
    }
    if (kCentred && first <= centred && centred < last) {
      pass.centred = kept_of(centred);
      pass.centre = means[centred % kRows];
    }
    if (first <= done) {
      pass.row = kept_of(done);
      pass.weight = row_of(n.weight, 0);
      pass.bias = row_of(n.bias, 0);
      pass.out = row_of(n.out, done);
      pass.mean = means[done % kRows];
      pass.scale = scales[done % kRows];
    }
    run_pass<T, kCentred>(pass, n.columns, around);
    if (kCentred) means[row % kRows] = pass.total / count;
    const int64_t measured = kCentred ? centred : row;
    const float square = (kCentred ? pass.squares : pass.total) / count;
    if (first <= measured) scales[measured % kRows] = 1.0f / __builtin_sqrtf(square + n.eps);
  }
  opkiln::settle_stores();
}

template <class T>
void normalize_rows(const Norm& n, int64_t first, int64_t last) {
  constexpr int64_t kOnStack = 16384;  // elements
  const int64_t wanted = n.residual ? (n.centred ? kRowsInWork<true> : kRowsInWork<false>) * stride_of_kept(n) : 0;
  alignas(64) T few[kOnStack];
  T* const kept = wanted <= kOnStack ? few : static_cast<T*>(__builtin_malloc(wanted * sizeof(T)));
  OPK_CHECK(kept, "no memory for ", wanted, " elements");
  const bool around = n.rows * n.columns * static_cast<int64_t>(sizeof(T)) >= opkiln::kAroundBytes &&
                      n.columns % Four::kLanes == 0 && may_go_around(static_cast<T*>(n.out)) &&
                      may_go_around(static_cast<T*>(n.sum));
  (n.centred ? normalize_rows<T, true> : normalize_rows<T, false>)(n, first, last, around, kept);
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
