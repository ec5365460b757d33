// The gradients of sparse_attn. The weights are recomputed from the scores and their logarithms, so nothing
// of the size tokens x tokens is stored. One kernel has 64 queries per block and streams keys, for the
// gradient of the queries. The other has 64 keys per block and streams queries, for the gradients of keys and
// values. So no two blocks add to one sum, and the order of all additions is fixed. tile.h has the parts.
#include <opkiln/op.h>

#include "tile.h"

using namespace sparse;

namespace {

constexpr int kRows = 64, kThreads = 128;  // per block; a warp has 16 rows
// streamed rows that are computed at once; the scores of all 64 would need too many registers
constexpr int kHalf = 32;

template <class Element>
struct Work {
  const Element *grad, *q, *k, *v, *out;
  Element *q_grad, *k_grad, *v_grad;
  const float* lse;
  float* inner;  // for each query, the inner product of its gradient and its output
  Strides grad_strides, q_strides, k_strides, v_strides, out_strides, q_grad_strides, k_grad_strides, v_grad_strides;
  Sizes sizes;
  Rules rules;
  List by_query, by_key;
  int32_t times;
  float *parts, *v_parts;  // [slots, times, kRows, head]: for queries or keys, and for values
};

// Eight lanes share a row.
template <class Element>
__global__ void __launch_bounds__(kThreads) inner_kernel(const OPK_GRID_CONSTANT Work<Element> work) {
  const int64_t number = int64_t{blockIdx.x} * (kThreads / 8) + threadIdx.x / 8;
  const int64_t all = int64_t{work.sizes.batch} * work.sizes.heads * work.sizes.tokens;
  const int64_t row = number < all ? number : all - 1, line = row / work.sizes.tokens, token = row % work.sizes.tokens;
  const int64_t batch = line / work.sizes.heads, head = line % work.sizes.heads;
  const auto at = [&](const Element* x, const Strides& strides) {
    return x + batch * strides.batch + head * strides.head + token * strides.token;
  };
  const Element *const grad = at(work.grad, work.grad_strides), *const out = at(work.out, work.out_strides);
  struct alignas(16) Eight {
    Element at[8];
  };
  float sum = 0;
  for (int column = threadIdx.x % 8 * 8; column < work.sizes.columns; column += 64) {
    const Eight a = *reinterpret_cast<const Eight*>(grad + column), b = *reinterpret_cast<const Eight*>(out + column);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += float(a.at[i]) * float(b.at[i]);
  }
#pragma unroll
  for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(kAll, sum, step);
  if (threadIdx.x % 8 == 0 && number < all) work.inner[row] = sum;
}

// Computes two products of a warp's 16 rows with 32 streamed rows: first * others^T and second * more^T.
template <class Element, int kHead, bool kFirst, bool kSecond>
__device__ inline void products(float (&one)[kHalf / 8][4], float (&two)[kHalf / 8][4],
                                const Kept<kHead, kFirst>& first, const Kept<kHead, kSecond>& second,
                                const uint4* others, const uint4* more, int row) {
#pragma unroll
  for (int step = 0; step < kHead / 16; ++step) {
    uint32_t left[2][4];
    first.get(left[0], step);
    second.get(left[1], step);
#pragma unroll
    for (int piece = 0; piece < kHalf / 16; ++piece) {
      uint32_t right[4];
      load_columns<kHead>(right, others, row + piece * 16, step);
      multiply_both<Element>(one[2 * piece], one[2 * piece + 1], left[0], right);
      load_columns<kHead>(right, more, row + piece * 16, step);
      multiply_both<Element>(two[2 * piece], two[2 * piece + 1], left[1], right);
    }
  }
}

// sums += values, 16 x 32 in registers, * 32 streamed rows.
template <int kHead, class Element>
__device__ inline void add_product(float (&sums)[kHead / 8][4], const float (&values)[kHalf / 8][4], const uint4* tile,
                                   int row) {
#pragma unroll
  for (int piece = 0; piece < kHalf / 16; ++piece) {
    uint32_t left[4];
    pack<Element>(left, values[2 * piece], values[2 * piece + 1]);
#pragma unroll
    for (int step = 0; step < kHead / 16; ++step) {
      uint32_t right[4];
      load_rows<kHead>(right, tile, row + piece * 16, step);
      multiply_both<Element>(sums[2 * step], sums[2 * step + 1], left, right);
    }
  }
}

// Adds the biases to scores of 16 x 32, and hides invisible ones. `pieces` has a bit per 16 columns.
template <bool kKeysDown, class Element>
__device__ inline void finish(float (&scores)[kHalf / 8][4], const Seen<Element>& seen, unsigned pieces, int down,
                              int across) {
  if (seen.rules.biased) seen.template add<kKeysDown>(scores, down, across);
  const bool whole = kKeysDown ? seen.sees_all(across, kHalf, down, 16) : seen.sees_all(down, 16, across, kHalf);
  if (!whole) seen.template hide<kKeysDown>(scores, down, across);
  if (pieces == 3u) return;
#pragma unroll
  for (int n = 0; n < kHalf / 8; ++n) {
    const bool used = (pieces >> n / 2 & 1) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[n][i] = used ? scores[n][i] : -INFINITY;
  }
}

template <class Element, int kHead>
__global__ void __launch_bounds__(kThreads, kHead <= 64 ? 3 : 2) queries_kernel(const OPK_GRID_CONSTANT Work<Element> work) {
  constexpr int kTile = kStreamed * kHead / 8;
  extern __shared__ uint4 shared[];  // queries, their gradients, and the stream
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp * 16;
  const Place place(work.by_query, work.sizes, work.by_query.shares, work.times);
  const int first_row = place.tile * kRows;
  using Read = Rows<const Element>;
  start<kHead, kRows, kThreads>(shared, Read(work.q, work.q_strides, place, work.sizes), first_row);
  start<kHead, kRows, kThreads>(shared + kTile, Read(work.grad, work.grad_strides, place, work.sizes), first_row);
  Stream<kHead, kThreads, Element> stream(shared + 2 * kTile, Read(work.k, work.k_strides, place, work.sizes),
                                          Read(work.v, work.v_strides, place, work.sizes), work.by_query, place);
  end_batch();
  float lse[2], inner[2], sums[kHead / 8][4] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = first_row + row + lane / 4 + 8 * i;
    const bool there = token < work.sizes.tokens;
    lse[i] = there ? work.lse[line_of(place, work.sizes) + token] * kLog2E : INFINITY;
    inner[i] = there ? work.inner[line_of(place, work.sizes) + token] : 0.f;
  }
  wait_for_batches<0>();
  __syncthreads();
  Kept<kHead> queries;
  Kept<kHead, kHead <= 64> grads;
  queries.load(shared, row);
  grads.load(shared + kTile, row);
  const Seen<Element> seen(work.rules, place, work.sizes);
  for (int i = stream.begin; i <= stream.last; ++i) {
    stream.go_to(i);
    end_batch();
    const uint4 *const keys = stream.tile(i), *const values = keys + kTile;
#pragma unroll 1
    for (int half = 0; half < kStreamed / kHalf; ++half) {
      const unsigned pieces = stream.pieces >> (warp * 4 + half * 2) & 3u;
      if (pieces == 0) continue;
      float weights[kHalf / 8][4] = {}, of_scores[kHalf / 8][4] = {};
      products<Element>(weights, of_scores, queries, grads, keys, values, half * kHalf);
      finish<false>(weights, seen, pieces, first_row + row, stream.now * kStreamed + half * kHalf);
#pragma unroll
      for (int n = 0; n < kHalf / 8; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float weight = fast_exp2(fmaf(weights[n][j], seen.factor, -lse[j / 2]));
          of_scores[n][j] = weight * (of_scores[n][j] - inner[j / 2]);
        }
      }
      add_product<kHead, Element>(sums, of_scores, keys, half * kHalf);
    }
    wait_for_batches<0>();
    __syncthreads();
  }
  if (place.slot >= 0) {
    const int64_t part = int64_t{place.slot} * work.times + place.which;
    store_part<kHead>(work.parts + part * kRows * kHead, row, sums);
  } else {
    const Rows<Element> out(work.q_grad, work.q_grad_strides, place, work.sizes);
    store<kHead>(out, shared, row, first_row + row, sums, work.rules.scale, work.rules.scale);
  }
}

template <class Element, int kHead>
__global__ void __launch_bounds__(kThreads, 2) keys_kernel(const OPK_GRID_CONSTANT Work<Element> work) {
  constexpr int kTile = kStreamed * kHead / 8;
  // keys, values, the stream, and the logarithms and inner products of its queries
  extern __shared__ uint4 shared[];
  float* const stats = reinterpret_cast<float*>(shared + 6 * kTile);  // [2][2][kStreamed]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp * 16;
  const Place place(work.by_key, work.sizes, work.by_key.shares, work.times);
  const int first_row = place.tile * kRows;
  using Read = Rows<const Element>;
  start<kHead, kRows, kThreads>(shared, Read(work.k, work.k_strides, place, work.sizes), first_row);
  start<kHead, kRows, kThreads>(shared + kTile, Read(work.v, work.v_strides, place, work.sizes), first_row);
  Stream<kHead, kThreads, Element> stream(shared + 2 * kTile, Read(work.q, work.q_strides, place, work.sizes),
                                          Read(work.grad, work.grad_strides, place, work.sizes), work.by_key, place);
  end_batch();
  // Each thread loads one number of a tile: the first 64 threads a logarithm, the others an inner product.
  const auto stat = [&](int tile) {
    const int token = tile * kStreamed + threadIdx.x % kStreamed;
    const bool logarithm = threadIdx.x < kStreamed;
    if (token >= work.sizes.tokens) return logarithm ? INFINITY : 0.f;
    const int64_t at = line_of(place, work.sizes) + token;
    return logarithm ? work.lse[at] * kLog2E : work.inner[at];
  };
  stats[threadIdx.x] = stat(stream.now);
  wait_for_batches<0>();
  __syncthreads();
  Kept<kHead, kHead <= 64> keys, values;
  keys.load(shared, row);
  values.load(shared + kTile, row);
  const Seen<Element> seen(work.rules, place, work.sizes);
  float k_sums[kHead / 8][4] = {}, v_sums[kHead / 8][4] = {};
  for (int i = stream.begin; i <= stream.last; ++i) {
    stream.go_to(i);
    end_batch();
    const float next_stat = stat(stream.next);
    const uint4 *const queries = stream.tile(i), *const grads = queries + kTile;
    const float* const logarithms = stats + (i - stream.begin) % 2 * 2 * kStreamed;
#pragma unroll 1
    for (int half = 0; half < kStreamed / kHalf; ++half) {
      const unsigned pieces = stream.pieces >> (warp * 4 + half * 2) & 3u;
      if (pieces == 0) continue;
      float weights[kHalf / 8][4] = {}, of_scores[kHalf / 8][4] = {};
      products<Element>(weights, of_scores, keys, values, queries, grads, half * kHalf);
      finish<true>(weights, seen, pieces, first_row + row, stream.now * kStreamed + half * kHalf);
#pragma unroll
      for (int n = 0; n < kHalf / 8; ++n) {
        const float* const at = logarithms + half * kHalf + n * 8 + lane % 4 * 2;
        const float2 lse = *reinterpret_cast<const float2*>(at);
        const float2 inner = *reinterpret_cast<const float2*>(at + kStreamed);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          weights[n][j] = fast_exp2(fmaf(weights[n][j], seen.factor, -(j % 2 == 0 ? lse.x : lse.y)));
          of_scores[n][j] = weights[n][j] * (of_scores[n][j] - (j % 2 == 0 ? inner.x : inner.y));
        }
      }
      add_product<kHead, Element>(v_sums, weights, grads, half * kHalf);
      add_product<kHead, Element>(k_sums, of_scores, queries, half * kHalf);
    }
    // Safe to overwrite: the other stage's numbers were read before the last barrier.
    stats[(i - stream.begin + 1) % 2 * 2 * kStreamed + threadIdx.x] = next_stat;
    wait_for_batches<0>();
    __syncthreads();
  }
  if (place.slot >= 0) {
    const int64_t part = int64_t{place.slot} * work.times + place.which;
    store_part<kHead>(work.parts + part * kRows * kHead, row, k_sums);
    store_part<kHead>(work.v_parts + part * kRows * kHead, row, v_sums);
  } else {
    const Rows<Element> k_out(work.k_grad, work.k_grad_strides, place, work.sizes);
    const Rows<Element> v_out(work.v_grad, work.v_grad_strides, place, work.sizes);
    store<kHead>(k_out, shared, row, first_row + row, k_sums, work.rules.scale, work.rules.scale);
    store<kHead>(v_out, shared + kTile, row, first_row + row, v_sums, 1, 1);
  }
}

// Adds the parts of lines that were cut. A warp handles one row at a time.
template <class Element, int kHead>
__global__ void __launch_bounds__(kThreads)
    join_kernel(const OPK_GRID_CONSTANT Work<Element> work, const OPK_GRID_CONSTANT List list, const float* parts,
                Element* to, const OPK_GRID_CONSTANT Strides strides, float factor) {
  const Place place(list, work.sizes, list.joined, work.times, true);
  const Rows<Element> out(to, strides, place, work.sizes);
  const int lane = threadIdx.x % 32;
  for (int down = threadIdx.x / 32; down < kRows; down += kThreads / 32) {
    const int row = place.tile * kRows + down;
    if (row >= work.sizes.tokens) return;
    for (int column = lane; column < out.sizes.columns; column += 32) {
      float sum = 0;
      for (int slot = place.begin; slot < place.end; ++slot) {
        sum += parts[((int64_t{slot} * work.times + place.which) * kRows + down) * kHead + column];
      }
      out.data[row * out.stride + column] = Element(sum * factor);
    }
  }
}

template <class Element, int kHead>
void run(Work<Element>& work, const Tensor& like) {
  constexpr int kTileBytes = kStreamed * kHead * 2;
  const int64_t times = work.times;
  const int64_t part = times * kRows * kHead;
  Tensor q_parts = opk::empty({work.by_query.slots * part}, opk::DType::float32, like.device());
  Tensor kv_parts = opk::empty({2 * work.by_key.slots * part}, opk::DType::float32, like.device());
  float* const of_queries = q_parts.data<float>();
  float* const of_keys = kv_parts.data<float>();
  work.v_parts = of_keys + work.by_key.slots * part;
  const int64_t rows = int64_t{work.sizes.batch} * work.sizes.heads * work.sizes.tokens;
  opk::launch(inner_kernel<Element>, (rows + kThreads / 8 - 1) / (kThreads / 8), kThreads, 0, work);
  work.parts = of_queries;
  opk::launch(queries_kernel<Element, kHead>, work.by_query.share_count * times, kThreads, 6 * kTileBytes, work);
  work.parts = of_keys;
  opk::launch(keys_kernel<Element, kHead>, work.by_key.share_count * times, kThreads,
              6 * kTileBytes + 4 * kStreamed * static_cast<int>(sizeof(float)), work);
  const auto join = [&](const List& list, const float* parts, Element* to, const Strides& strides, float factor) {
    opk::launch(join_kernel<Element, kHead>, list.joined_count * times, kThreads, 0, work, list, parts, to, strides,
                factor);
  };
  join(work.by_query, of_queries, work.q_grad, work.q_grad_strides, work.rules.scale);
  join(work.by_key, of_keys, work.k_grad, work.k_grad_strides, work.rules.scale);
  join(work.by_key, work.v_parts, work.v_grad, work.v_grad_strides, 1);
}

}  // namespace

opk::tuple<Tensor, Tensor, Tensor> sparse_attn_backward(const Tensor& grad, const Tensor& q, const Tensor& k,
                                                        const Tensor& v, const Tensor& out, const Tensor& lse,
                                                        const Tensor& layout, const opk::TensorList& lists,
                                                        const MaybeTensor& key_bias, const MaybeTensor& mask,
                                                        int64_t block, double scale, bool causal, int64_t window,
                                                        bool multiply) {
  const Sizes sizes = sizes_of(q, layout, block);
  const Rules rules = rules_of(q, key_bias, mask, scale, causal, window, multiply);
  check_head(sizes);
  const Tensor* const read[] = {&grad, &q, &k, &v, &out};
  for (const Tensor* each : read) check_rows(*each, q);
  opk::check_shape(lse, {q.size(0), q.size(1), q.size(2)});
  opk::check_contiguous(lse);
  opk::check_same_device(q, lse);
  const List by_query = list_of(lists, 3, sizes, kRows), by_key = list_of(lists, 6, sizes, kRows);
  Tensor q_grad = opk::empty_like(q), k_grad = opk::empty_like(k), v_grad = opk::empty_like(v);
  Tensor inner = opk::empty({q.size(0), q.size(1), q.size(2)}, opk::DType::float32, q.device());
  OPK_DISPATCH(q, Element, (opk::half, opk::bfloat16), {
    Work<Element> work = {};
    work.grad = grad.data<const Element>();
    work.q = q.data<const Element>();
    work.k = k.data<const Element>();
    work.v = v.data<const Element>();
    work.out = out.data<const Element>();
    work.q_grad = q_grad.data<Element>();
    work.k_grad = k_grad.data<Element>();
    work.v_grad = v_grad.data<Element>();
    work.lse = lse.data<const float>();
    work.inner = inner.data<float>();
    work.grad_strides = strides_of(grad);
    work.q_strides = strides_of(q);
    work.k_strides = strides_of(k);
    work.v_strides = strides_of(v);
    work.out_strides = strides_of(out);
    work.q_grad_strides = strides_of(q_grad);
    work.k_grad_strides = strides_of(k_grad);
    work.v_grad_strides = strides_of(v_grad);
    work.sizes = sizes;
    work.rules = rules;
    work.by_query = by_query;
    work.by_key = by_key;
    work.times = static_cast<int32_t>(times(sizes));
    if (sizes.columns <= 64) {
      run<Element, 64>(work, q);
    } else {
      run<Element, 128>(work, q);
    }
  });
  return {static_cast<Tensor&&>(q_grad), static_cast<Tensor&&>(k_grad), static_cast<Tensor&&>(v_grad)};
}

OPKILN_OP(sparse_attn_backward, cuda);
