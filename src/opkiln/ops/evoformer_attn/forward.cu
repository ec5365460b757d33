// The forward pass on tensor cores: a block has 64 queries and runs
// an online softmax over tiles of 64 keys, 32 at a time.
#include <opkiln/op.h>

#include "tiles.h"

using evoformer::MaybeTensor;
using evoformer::Sizes;
using evoformer::Work;
using opk::Tensor;

namespace {

using namespace evoformer;

// Copies the pair bias to tiles in shared memory, [query, key]. Each warp copies the rows that it reads.
template <class Element>
class PairCopies {
 public:
  __device__ PairCopies(const Work<Element>& work, const Element* pair, int first) {
    from_ = pair + int64_t{first + mine()} * work.pair_stride + chunk() * 8;
    rows_ = work.length - first - mine();
    keys_ = work.length - chunk() * 8;
  }

  // Starts copying a tile. Past the ends it writes zeros without reading.
  __device__ void start(uint4* tile, const Work<Element>& work) const {
    const Element* from = from_;
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      copy_later(tile + slot_of_pair(mine() + i, chunk()), from, i < rows_ && keys_ > 0);
      from += 4 * work.pair_stride;
    }
  }
  __device__ void next_tile() {
    from_ += kTile;
    keys_ -= kTile;
  }

  // A thread's eight numbers of its upper or lower row, for the keys of its columns in a part.
  __device__ static uint4 at(const uint4* tile, int lower, int part) {
    return tile[slot_of_pair(group_of_lane() + lower * 8, part * 4 + quarter_of_lane())];
  }

 private:
  // The swizzle puts two rows of 4 chunks, which lanes read at once, into different banks.
  __device__ static int slot_of_pair(int row, int chunk) {
    return static_cast<int>(threadIdx.x / 32) * 128 + row * 8 + (chunk ^ (row & 1) << 2);
  }
  __device__ static int mine() { return static_cast<int>(threadIdx.x % 32 / 8); }
  __device__ static int chunk() { return static_cast<int>(threadIdx.x % 8); }
  const Element* from_;
  int rows_, keys_;  // from the thread's first row and key on
};

// The shared memory for a tile of keys.
template <int kHead>
struct alignas(16) KeyTile {
  uint4 keys[kTile * kHead / 8], values[kTile * kHead / 8], pair[kTile * kTile / 8];
  float masks[kTile];
};

// Five blocks per multiprocessor for heads of 32, which limits the
// registers. So only the scores of 32 keys exist at a time.
template <class Element, int kHead>
__global__ void __launch_bounds__(kThreads, kHead == 32 ? 5 : 3)
    attention_kernel(const OPK_GRID_CONSTANT Work<Element> work) {
  extern __shared__ uint4 shared[];
  KeyTile<kHead>* const tiles = reinterpret_cast<KeyTile<kHead>*>(shared);
  const Unit unit(work, blockIdx.x);
  const int first = unit.tile * kTile + threadIdx.x / 32 * 16, quarter = quarter_of_lane();
  const Element* const pair = pair_of(work, unit.batch, unit.head);
  RowCopies<kHead, Element> k(work, work.k, work.k_strides, unit.batch, unit.row, unit.head, 0);
  RowCopies<kHead, Element> v(work, work.v, work.v_strides, unit.batch, unit.row, unit.head, 0);
  PairCopies<Element> biases(work, pair, first);
  const auto start = [&](KeyTile<kHead>& tile) {
    k.start(tile.keys, work.k_strides);
    v.start(tile.values, work.v_strides);
    if (pair != nullptr) biases.start(tile.pair, work);
  };
  start(tiles[0]);
  end_batch();
  if (threadIdx.x < kTile) tiles[0].masks[threadIdx.x] = load_mask(work, unit.batch, unit.row, threadIdx.x);
  uint32_t queries[kHead / 16][4];
  const Element* const q = head_of(work.q, work.q_strides, unit.batch, unit.row, unit.head);
  load_left<kHead>(queries, q, work.q_strides.place, first, work.length, work.head);

  float out[kHead / 8][4] = {}, greatest[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
  for (int tile = 0; tile < work.tiles; ++tile) {
    const KeyTile<kHead>& now = tiles[tile % 2];
    KeyTile<kHead>& next = tiles[1 - tile % 2];
    if (tile + 1 < work.tiles) {
      k.next_tile(work.k_strides);
      v.next_tile(work.v_strides);
      biases.next_tile();
      start(next);
    }
    end_batch();
    float next_mask = 0;
    if (threadIdx.x < kTile) next_mask = load_mask(work, unit.batch, unit.row, (tile + 1) * kTile + threadIdx.x);
    wait_for_batches<1>();
    __syncthreads();

#pragma unroll
    for (int part = 0; part < 2; ++part) {
      float scores[4][4], most[2] = {greatest[0], greatest[1]};
      multiply_by_rows<Element, kHead>(scores, queries, now.keys, part);
      uint4 bias[2] = {};  // of the upper and the lower row
      if (pair != nullptr) {
        bias[0] = PairCopies<Element>::at(now.pair, 0, part);
        bias[1] = PairCopies<Element>::at(now.pair, 1, part);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float4 mask = load_columns(now.masks, part, j / 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float added = widen_one<Element>(at(bias[i / 2], j), i % 2);
          const float other = fmaf(added, kLog2e, at(mask, j % 2 * 2 + i % 2));
          scores[j][i] = fmaf(scores[j][i], work.scale, other);
          most[i / 2] = fmaxf(most[i / 2], scores[j][i]);
        }
      }
      float shift[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        most[i] = fmaxf(most[i], __shfl_xor_sync(kAll, most[i], 1));
        most[i] = fmaxf(most[i], __shfl_xor_sync(kAll, most[i], 2));
        shift[i] = most[i] == -INFINITY ? 0.f : most[i];
        const float shrink = fast_exp2(greatest[i] - shift[i]);
        greatest[i] = most[i];
        sum[i] *= shrink;
#pragma unroll
        for (int chunk = 0; chunk < kHead / 8; ++chunk) {
          out[chunk][2 * i] *= shrink;
          out[chunk][2 * i + 1] *= shrink;
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          scores[j][i] = fast_exp2(scores[j][i] - shift[i / 2]);
          sum[i / 2] += scores[j][i];
        }
      }
      add_product<Element, kHead>(out, scores, now.values, part);
    }
    if (threadIdx.x < kTile) next.masks[threadIdx.x] = next_mask;
    __syncthreads();
  }

  float share[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    share[i] = 1.f / sum_of_row(sum[i]);  // infinite if all scores are minus infinity: the result is NaN
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
  const Sizes s = check_inputs(q, k, v, mask_bias, pair_bias);
  check_served(s, q);
  Tensor out = opk::empty({s.batch, s.rows, s.length, s.heads, s.head}, q);
  Tensor moments = empty_moments(s, q);
  if (out.numel() == 0) return {out, moments};
  const Tensor queries = align_heads(q), keys = align_heads(k), values = align_heads(v);
  const Tensor mask = make_contiguous(mask_bias), pair = align_rows(pair_bias, s);
  OPK_DISPATCH(q, Element, (opk::half, opk::bfloat16), {
    Work<Element> work = work_of<Element>(s, queries, keys, values, mask, pair, scale);
    work.moments = moments.data<float>();
    work.out = out.data<Element>();
    const int64_t blocks = s.batch * s.rows * s.heads * work.tiles;
    if (s.head <= 32) {
      opk::launch(attention_kernel<Element, 32>, blocks, kThreads, 2 * sizeof(KeyTile<32>), work);
    } else {
      opk::launch(attention_kernel<Element, 64>, blocks, kThreads, 2 * sizeof(KeyTile<64>), work);
    }
  });
  return {out, moments};
}

OPKILN_OP(evoformer_attention, cuda);
