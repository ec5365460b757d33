// The forward pass on tensor cores: 64 queries to a block, an online softmax over tiles of 64 keys.
#include <opkiln/op.h>

#include "tiles.h"

using evoformer::MaybeTensor;
using evoformer::Sizes;
using evoformer::Work;
using opk::Tensor;

namespace {

using namespace evoformer;

// The blocks of a multiprocessor, for registers: four with heads of 32.
template <class Element, int kHead>
__global__ void __launch_bounds__(kThreads, kHead == 32 ? 4 : 3)
    attention_kernel(const OPK_GRID_CONSTANT Work<Element> work) {
  __shared__ uint4 keys[2][kTile * kHead / 8], values[2][kTile * kHead / 8];
  alignas(16) __shared__ float masks[2][kTile];
  const Unit unit(work, blockIdx.x);
  const int first = unit.tile * kTile + threadIdx.x / 32 * 16, quarter = quarter_of_lane();
  const Element* const pair = pair_of(work, unit.batch, unit.head);
  RowCopies<kHead, Element> k(work, work.k, work.k_strides, unit.batch, unit.row, unit.head, 0);
  RowCopies<kHead, Element> v(work, work.v, work.v_strides, unit.batch, unit.row, unit.head, 0);
  k.start(keys[0], work.k_strides);
  v.start(values[0], work.v_strides);
  end_batch();
  if (threadIdx.x < kTile) masks[0][threadIdx.x] = masked(work, unit.batch, unit.row, threadIdx.x);
  uint32_t queries[kHead / 16][4];
  const Element* const q = head_of(work.q, work.q_strides, unit.batch, unit.row, unit.head);
  load_left<kHead>(queries, q, work.q_strides.place, first, work.length, work.head);

  float out[kHead / 8][4] = {}, greatest[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
  for (int tile = 0; tile < work.tiles; ++tile) {
    const int stage = tile % 2;
    uint32_t biases[2][2][4];  // part, upper and lower row
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int query = first + group_of_lane() + i % 2 * 8, key = tile * kTile + i / 2 * 32 + quarter * 8;
      load_pair(biases[i / 2][i % 2], work, pair, query, key);
    }
    if (tile + 1 < work.tiles) {
      k.next_tile(work.k_strides);
      v.next_tile(work.v_strides);
      k.start(keys[1 - stage], work.k_strides);
      v.start(values[1 - stage], work.v_strides);
    }
    end_batch();
    float next_mask = 0;
    if (threadIdx.x < kTile) next_mask = masked(work, unit.batch, unit.row, (tile + 1) * kTile + threadIdx.x);
    wait_for_batches<1>();
    __syncthreads();

    float scores[2][4][4], most[2] = {greatest[0], greatest[1]};
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      multiply_by_rows<Element, kHead>(scores[part], queries, keys[stage], part);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float4 mask = of_columns(masks[stage], part, j / 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float bias = number<Element>(biases[part][i / 2][j], i % 2);
          const float other = fmaf(bias, kLog2e, at(mask, j % 2 * 2 + i % 2));
          scores[part][j][i] = fmaf(scores[part][j][i], work.scale, other);
          most[i / 2] = fmaxf(most[i / 2], scores[part][j][i]);
        }
      }
    }
    float shift[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      most[i] = fmaxf(most[i], __shfl_xor_sync(kAll, most[i], 1));
      most[i] = fmaxf(most[i], __shfl_xor_sync(kAll, most[i], 2));
      shift[i] = most[i] == -INFINITY ? 0.f : most[i];
      const float shrink = power_of_two(greatest[i] - shift[i]);
      greatest[i] = most[i];
      sum[i] *= shrink;
#pragma unroll
      for (int chunk = 0; chunk < kHead / 8; ++chunk) {
        out[chunk][2 * i] *= shrink;
        out[chunk][2 * i + 1] *= shrink;
      }
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          scores[part][j][i] = power_of_two(scores[part][j][i] - shift[i / 2]);
          sum[i / 2] += scores[part][j][i];
        }
      }
      add_product<Element, kHead>(out, scores[part], values[stage], part);
    }
    if (threadIdx.x < kTile) masks[1 - stage][threadIdx.x] = next_mask;
    __syncthreads();
  }

  float share[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    share[i] = 1.f / sum_of_row(sum[i]);  // infinite if all scores are minus infinity: such a result is NaN
    const int query = first + group_of_lane() + i * 8;
    if (quarter == 0 && query < work.length) {
      float* const moments = work.moments + int64_t{unit.line} * work.length + query;
      moments[0] = greatest[i];
      moments[work.queries] = share[i];
    }
  }
  store_rows<Element, kHead>(work.out, out, work, unit, first, share);
}

}  // namespace

opk::tuple<Tensor, Tensor> evoformer_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                               const MaybeTensor& mask_bias, const MaybeTensor& pair_bias,
                                               double scale) {
  const Sizes s = checked(q, k, v, mask_bias, pair_bias);
  check_served(s, q);
  Tensor out = opk::empty({s.batch, s.rows, s.length, s.heads, s.head}, q);
  Tensor moments = empty_moments(s, q);
  if (out.numel() == 0) return {out, moments};
  const Tensor queries = with_aligned_heads(q), keys = with_aligned_heads(k), values = with_aligned_heads(v);
  const Tensor mask = whole(mask_bias), pair = with_aligned_rows(pair_bias, s);
  OPK_DISPATCH(q, Element, (opk::half, opk::bfloat16), {
    Work<Element> work = work_of<Element>(s, queries, keys, values, mask, pair, scale);
    work.moments = moments.data<float>();
    work.out = out.data<Element>();
    const int64_t blocks = s.batch * s.rows * s.heads * work.tiles;
    opk::launch(s.head <= 32 ? attention_kernel<Element, 32> : attention_kernel<Element, 64>, blocks, kThreads, 0,
                work);
  });
  return {out, moments};
}

OPKILN_OP(evoformer_attention, cuda);
