// The kernel of sparse_attn: an online softmax over the listed tiles, times the values. tile.h has the parts.
#include <opkiln/op.h>

#include "tile.h"

using namespace sparse;

namespace {

constexpr int kRows = 128;  // queries per block

constexpr int kWarps = kRows / 16, kThreads = 32 * kWarps;
constexpr int kJoinThreads = 128;

template <class Element>
struct Work {
  const Element *q, *k, *v;
  Element* out;
  float* lse;
  Strides q_strides, k_strides, v_strides, out_strides;
  Sizes sizes;
  Rules rules;
  List list;
  int32_t times;
  float* parts;  // [slots, times, kRows, head]
  float* sums;  // [slots, times, kRows, 2]: the greatest exponent, and the sum
};

// A warp's running results for 16 rows: the output, the greatest scores, and each lane's sums of weights.
template <int kHead>
struct Running {
  float out[kHead / 8][4] = {}, most[2] = {-INFINITY, -INFINITY}, sum[2] = {};
};

constexpr unsigned kEvery = (1u << kStreamed / 16) - 1;  // all pieces of a tile

// Adds one tile to a warp's rows. `pieces` is a bit mask of visible pieces. kWhole: the whole tile is visible
// and has no biases. That is the case for most tiles, and without branches their products and powers overlap.
template <bool kWhole, int kHead, class Element>
__device__ inline void attend(Running<kHead>& running, const Kept<kHead>& queries, const uint4* keys,
                              const uint4* values, unsigned pieces, int query, int key, const Seen<Element>& seen) {
  float scores[kStreamed / 8][4] = {};
#pragma unroll
  for (int piece = 0; piece < kStreamed / 16; ++piece) {
    if (!kWhole && (pieces >> piece & 1) == 0) continue;
#pragma unroll
    for (int step = 0; step < kHead / 16; ++step) {
      uint32_t left[4], right[4];
      queries.get(left, step);
      load_columns<kHead>(right, keys, piece * 16, step);
      multiply_both<Element>(scores[2 * piece], scores[2 * piece + 1], left, right);
    }
  }
  if constexpr (!kWhole) {
    if (seen.rules.biased) seen.template add<false>(scores, query, key);
    if (!seen.sees_all(query, 16, key, kStreamed)) seen.template hide<false>(scores, query, key);
    if (pieces != kEvery) {
#pragma unroll
      for (int n = 0; n < kStreamed / 8; ++n) {
        const bool used = (pieces >> n / 2 & 1) != 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[n][i] = used ? scores[n][i] : -INFINITY;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {  // rows lane / 4 and lane / 4 + 8
    float most = running.most[i];
#pragma unroll
    for (int n = 0; n < kStreamed / 8; ++n) most = fmaxf(most, fmaxf(scores[n][2 * i], scores[n][2 * i + 1]));
    most = fmaxf(most, __shfl_xor_sync(kAll, most, 1));
    most = fmaxf(most, __shfl_xor_sync(kAll, most, 2));
    const float base = most == -INFINITY ? 0.f : most * seen.factor;  // no key is visible yet
    const float shrink = fast_exp2(running.most[i] * seen.factor - base);
    running.most[i] = most;
    float sum = running.sum[i] * shrink;
#pragma unroll
    for (int n = 0; n < kStreamed / 8; ++n) {
#pragma unroll
      for (int j = 2 * i; j < 2 * i + 2; ++j) {
        scores[n][j] = fast_exp2(fmaf(scores[n][j], seen.factor, -base));
        sum += scores[n][j];
      }
    }
    running.sum[i] = sum;
#pragma unroll
    for (int n = 0; n < kHead / 8; ++n) {
      running.out[n][2 * i] *= shrink;
      running.out[n][2 * i + 1] *= shrink;
    }
  }
#pragma unroll
  for (int piece = 0; piece < kStreamed / 16; ++piece) {
    if (!kWhole && (pieces >> piece & 1) == 0) continue;
    uint32_t weights[4];
    pack<Element>(weights, scores[2 * piece], scores[2 * piece + 1]);
#pragma unroll
    for (int step = 0; step < kHead / 16; ++step) {
      uint32_t right[4];
      load_rows<kHead>(right, values, piece * 16, step);
      multiply_both<Element>(running.out[2 * step], running.out[2 * step + 1], weights, right);
    }
  }
}

template <class Element, int kHead>
__global__ void __launch_bounds__(kThreads, kHead == 64 ? 2 : 1)
    forward_kernel(const OPK_GRID_CONSTANT Work<Element> work) {
  constexpr int kTile = kStreamed * kHead / 8;
  extern __shared__ uint4 shared[];  // queries, and the stream
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp * 16;
  const Place place(work.list, work.sizes, work.list.shares, work.times);
  const int first_row = place.tile * kRows;
  using Read = Rows<const Element>;
  start<kHead, kRows, kThreads>(shared, Read(work.q, work.q_strides, place, work.sizes), first_row);
  Stream<kHead, kThreads, Element> stream(shared + kRows * kHead / 8, Read(work.k, work.k_strides, place, work.sizes),
                                          Read(work.v, work.v_strides, place, work.sizes), work.list, place);
  end_batch();
  wait_for_batches<0>();
  __syncthreads();
  Kept<kHead> queries;
  Running<kHead> running;
  queries.load(shared, row);
  const Seen<Element> seen(work.rules, place, work.sizes);
  for (int i = stream.begin; i <= stream.last; ++i) {
    stream.go_to(i);
    end_batch();
    const uint4 *const keys = stream.tile(i), *const values = keys + kTile;
    const unsigned pieces = stream.pieces >> (warp * 4) & kEvery;
    const int query = first_row + row, key = stream.now * kStreamed;
    if (pieces == kEvery && !seen.rules.biased && seen.sees_all(query, 16, key, kStreamed)) {
      attend<true>(running, queries, keys, values, pieces, query, key, seen);
    } else if (pieces != 0) {
      attend<false>(running, queries, keys, values, pieces, query, key, seen);
    }
    wait_for_batches<0>();
    __syncthreads();
  }
  float factor[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float sum = running.sum[i];
    sum += __shfl_xor_sync(kAll, sum, 1);
    sum += __shfl_xor_sync(kAll, sum, 2);
    const float most = running.most[i] * seen.factor;
    factor[i] = sum == 0 ? 0.f : 1 / sum;
    const int down = row + lane / 4 + 8 * i;
    if (lane % 4 != 0) continue;
    if (place.slot >= 0) {
      const int64_t part = (int64_t{place.slot} * work.times + place.which) * kRows + down;
      reinterpret_cast<float2*>(work.sums)[part] = {most, sum};
    } else if (first_row + down < work.sizes.tokens) {
      work.lse[line_of(place, work.sizes) + first_row + down] = sum == 0 ? INFINITY : (most + log2f(sum)) * kLn2;
    }
  }
  if (place.slot >= 0) {
    const int64_t part = int64_t{place.slot} * work.times + place.which;
    store_part<kHead>(work.parts + part * kRows * kHead, row, running.out);
  } else {
    const Rows<Element> out(work.out, work.out_strides, place, work.sizes);
    store<kHead>(out, shared, row, first_row + row, running.out, factor[0], factor[1]);
  }
}

// Joins the parts of lines that were cut. A warp handles one row at a time.
template <class Element, int kHead>
__global__ void __launch_bounds__(kJoinThreads) join_kernel(const OPK_GRID_CONSTANT Work<Element> work) {
  const Place place(work.list, work.sizes, work.list.joined, work.times, true);
  const Rows<Element> out(work.out, work.out_strides, place, work.sizes);
  const int lane = threadIdx.x % 32;
  for (int down = threadIdx.x / 32; down < kRows; down += kJoinThreads / 32) {
    const int row = place.tile * kRows + down;
    if (row >= work.sizes.tokens) return;
    const auto at = [&](int slot) { return (int64_t{slot} * work.times + place.which) * kRows + down; };
    const float2* const sums = reinterpret_cast<const float2*>(work.sums);
    float most = -INFINITY, total = 0;
    for (int slot = place.begin; slot < place.end; ++slot) most = fmaxf(most, sums[at(slot)].x);
    const float base = most == -INFINITY ? 0.f : most;
    float values[kHead / 32] = {};
    for (int slot = place.begin; slot < place.end; ++slot) {
      const float2 found = sums[at(slot)];
      const float weight = fast_exp2(found.x - base);
      total += weight * found.y;
#pragma unroll
      for (int i = 0; i < kHead / 32; ++i) values[i] += weight * work.parts[at(slot) * kHead + i * 32 + lane];
    }
#pragma unroll
    for (int i = 0; i < kHead / 32; ++i) {
      if (i * 32 + lane >= out.sizes.columns) continue;
      out.data[row * out.stride + i * 32 + lane] = Element(total == 0 ? 0.f : values[i] / total);
    }
    if (lane == 0) {
      work.lse[line_of(place, work.sizes) + row] = total == 0 ? INFINITY : (base + log2f(total)) * kLn2;
    }
  }
}

template <class Element, int kHead>
void run(Work<Element>& work, const Tensor& like) {
  const int64_t rows = int64_t{work.list.slots} * work.times * kRows;
  Tensor parts = opk::empty({rows * (kHead + 2)}, opk::DType::float32, like.device());
  work.parts = parts.data<float>();
  work.sums = work.parts + rows * kHead;
  constexpr int kShared = (kRows + 4 * kStreamed) * kHead * 2;
  opk::launch(forward_kernel<Element, kHead>, int64_t{work.list.share_count} * work.times, kThreads, kShared,
              work);
  opk::launch(join_kernel<Element, kHead>, int64_t{work.list.joined_count} * work.times, kJoinThreads, 0, work);
}

}  // namespace

opk::tuple<Tensor, Tensor> sparse_attn(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& layout,
                                       const opk::TensorList& lists, const MaybeTensor& key_bias,
                                       const MaybeTensor& mask, int64_t block, double scale, bool causal,
                                       int64_t window, bool multiply) {
  const Sizes sizes = sizes_of(q, layout, block);
  const Rules rules = rules_of(q, key_bias, mask, scale, causal, window, multiply);
  check_head(sizes);
  const Tensor* const read[] = {&q, &k, &v};
  for (const Tensor* each : read) check_rows(*each, q);
  const List list = list_of(lists, 0, sizes, kRows);
  Tensor out = opk::empty_like(q);
  Tensor lse = opk::empty({q.size(0), q.size(1), q.size(2)}, opk::DType::float32, q.device());
  OPK_DISPATCH(q, Element, (opk::half, opk::bfloat16), {
    Work<Element> work = {};
    work.q = q.data<const Element>();
    work.k = k.data<const Element>();
    work.v = v.data<const Element>();
    work.out = out.data<Element>();
    work.lse = lse.data<float>();
    work.q_strides = strides_of(q);
    work.k_strides = strides_of(k);
    work.v_strides = strides_of(v);
    work.out_strides = strides_of(out);
    work.sizes = sizes;
    work.rules = rules;
    work.list = list;
    work.times = static_cast<int32_t>(times(sizes));
    if (sizes.columns <= 64) {
      run<Element, 64>(work, q);
    } else {
      run<Element, 128>(work, q);
    }
  });
  return {static_cast<Tensor&&>(out), static_cast<Tensor&&>(lse)};
}

OPKILN_OP(sparse_attn, cuda);
