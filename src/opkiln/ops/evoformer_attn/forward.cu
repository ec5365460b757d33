// The forward pass on tensor cores: a block has 64 queries and runs an online softmax over tiles of 64 keys, 32 at a
// time. On Hopper another kernel serves heads of up to 32.
#include <opkiln/op.h>
#include <opkiln/warpgroup_matrix.h>

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

// Stores a warp's results: 16 rows of the output, and their moments.
template <int kHead, class Element>
__device__ inline void conclude(const Work<Element>& work, const Unit& unit, int first, const float (&out)[kHead / 8][4],
                                const float (&greatest)[2], const float (&sum)[2]) {
  float share[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    share[i] = 1.f / sum_of_row(sum[i]);  // infinite if all scores are minus infinity: the result is NaN
    const int query = first + group_of_lane() + i * 8;
    if (quarter_of_lane() == 0 && query < work.length) {
      float* const moments = work.moments + int64_t{unit.line} * work.length + query;
      moments[0] = greatest[i];
      moments[work.queries] = share[i];
    }
  }
  store_rows<Element, kHead>(work.out, out, work, unit, first, share);
}

// Five blocks per multiprocessor for heads of 32, which limits the
// registers. So only the scores of 32 keys exist at a time.
template <class Element, int kHead>
__global__ void __launch_bounds__(kThreads, kHead == 32 ? 5 : 3)
    attention_kernel(const OPK_GRID_CONSTANT Work<Element> work) {
  extern __shared__ uint4 shared[];
  KeyTile<kHead>* const tiles = reinterpret_cast<KeyTile<kHead>*>(shared);
  const Unit unit(work, blockIdx.x);
  const int first = unit.tile * kTile + threadIdx.x / 32 * 16;
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

  conclude<kHead>(work, unit, first, out, greatest, sum);
}

// ---- Hopper -----------------------------------------------------------------------------------------

// Here an item of work is 128 queries of a head in two rows, which share the pair bias. Two warpgroups have 64 queries
// each. A block takes a range of items, and copies the next one's tiles before it has finished one. (Ranges of one
// item are fastest, so the grid has a block for each: blocks for all multiprocessors took 1.1 times as long.)
constexpr int kShared = 2, kQueries = 2 * kTile, kQueryWarps = kQueries / 16, kQueryThreads = kQueryWarps * 32;

struct Maps {
  TensorMap q, k, v, mask, pair;
};

struct Item {
  int first, head, row, batch;  // `first` is a query

  template <class Element>
  __device__ Item(const Work<Element>& work, unsigned number) {
    const unsigned blocks = (work.length + kQueries - 1) / kQueries, groups = (work.rows + kShared - 1) / kShared;
    first = number % blocks * kQueries;
    head = number / blocks % work.heads;
    const unsigned both = number / blocks / work.heads;
    row = both % groups * kShared;
    batch = both / groups;
  }
};

// The shared memory. A tile is the bias of both warpgroups, and keys, values and masks of each row. Panels have 64
// rows: of 128 bytes for the bias, of 64 for the rest.
struct Layout {
  static constexpr int kPanel = kTile * 64, kBias = kTile * 128;
  static constexpr int kKeys = 2 * kBias, kMasks = kKeys + 2 * kShared * kPanel, kAll = kMasks + 1024;
  using Queries = Slots<2, 2 * kShared * kPanel, kQueryWarps>;
  using Tiles = Slots<2, kAll, kQueryWarps>;
  static constexpr int kBarriers = Queries::kAll + Tiles::kAll, kBytes = kBarriers + 8 * 8;
};

// Copies the tiles of a block's items in their order. One thread does this.
struct Copier {
  int next, last, tile, item;  // the next one's item and tile; `item` counts from the block's first

  template <class Element>
  __device__ void copy(const Maps& maps, const Work<Element>& work, const Layout::Queries& queries,
                       const Layout::Tiles& tiles) {
    if (next == last) return;
    const Item to(work, next);
    if (tile == 0) {
      uint64_t* const barrier = queries.fill(item);
      for (int i = 0; i < 2 * kShared; ++i) {  // both warpgroups' queries of each row
        load_tile(queries.slot(item) + i * Layout::kPanel, maps.q, barrier, 0, to.first + i % 2 * kTile, to.head,
                  to.row + i / 2, to.batch);
      }
    }
    const unsigned number = item * work.tiles + tile;
    const int bias = work.pair != nullptr ? 2 * Layout::kBias : 0, masks = work.mask != nullptr ? 2 * kTile : 0;
    uint64_t* const barrier = tiles.fill(number, bias + kShared * (2 * Layout::kPanel + masks));
    char* const at = tiles.slot(number);
    const int key = tile * kTile;
    for (int i = 0; i < 2; ++i) {
      if (bias > 0) load_tile(at + i * Layout::kBias, maps.pair, barrier, key, to.first + i * kTile, to.head, to.batch);
    }
    for (int r = 0; r < kShared; ++r) {
      char* const keys = at + Layout::kKeys + 2 * r * Layout::kPanel;
      load_tile(keys, maps.k, barrier, 0, key, to.head, to.row + r, to.batch);
      load_tile(keys + Layout::kPanel, maps.v, barrier, 0, key, to.head, to.row + r, to.batch);
      if (masks > 0) load_tile(at + Layout::kMasks + r * 2 * kTile, maps.mask, barrier, key, to.row + r, to.batch, 0);
    }
    if (++tile == work.tiles) {
      tile = 0;
      ++item;
      ++next;
    }
  }
};

// Turns a warp's products into scores, in the way of the backward pass. Keys past the end get minus infinity.
template <class Element>
__device__ inline void add_biases(float (&scores)[kTile / 8][4], const Work<Element>& work, const char* bias,
                                  const char* masks, int left) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16, quarter = lane % 4;
#pragma unroll
  for (int step = 0; step < kTile / 16; ++step) {
    uint32_t pairs[4] = {};
    if (work.pair != nullptr) load_matrices(pairs, bias + row * 128 + ((2 * step + lane / 16) ^ (row & 7)) * 16);
#pragma unroll
    for (int n = 2 * step; n < 2 * step + 2; ++n) {
      const uint32_t two = work.mask != nullptr ? reinterpret_cast<const uint32_t*>(masks)[n * 4 + quarter] : 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float added = widen_one<Element>(pairs[n % 2 * 2 + i / 2], i % 2);
        const float other = fmaf(added, kLog2e, widen_one<Element>(two, i % 2) * kLog2e);
        scores[n][i] = fmaf(scores[n][i], work.scale, other);
      }
    }
  }
  if (left >= kTile) return;
#pragma unroll
  for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[n][i] = n * 8 + quarter * 2 + i % 2 < left ? scores[n][i] : -INFINITY;
  }
}

template <class Element>
__global__ void __launch_bounds__(warpgroup_threads(kQueryThreads), warpgroup_threads(2))
    warpgroup_kernel(const OPK_GRID_CONSTANT Maps maps, const OPK_GRID_CONSTANT Work<Element> work, int items) {
#if defined(OPK_WARPGROUPS)
  extern __shared__ __align__(1024) char memory[];
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(memory + Layout::kBarriers);
  const Layout::Queries queries{memory, barriers};
  const Layout::Tiles tiles{memory + Layout::Queries::kAll, barriers + 4};
  __shared__ Copier copier;
  const int group = threadIdx.x / 128;
  const int begin = static_cast<int>(int64_t{items} * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(int64_t{items} * (blockIdx.x + 1) / gridDim.x);
  if (threadIdx.x == 0) {
    queries.prepare();
    tiles.prepare();
    publish_barriers();
    copier = {begin, end, 0, 0};
    copier.copy(maps, work, queries, tiles);
  }
  __syncthreads();
  float scores[kTile / 8][4], shrink[2];
  uint32_t weights[kTile / 16][4];
  for (int item = 0; item < end - begin; ++item) {
    float out[kShared][4][4] = {}, base[kShared][2], sum[kShared][2] = {};
#pragma unroll
    for (int r = 0; r < kShared; ++r) base[r][0] = base[r][1] = -INFINITY;
    const uint64_t left = matrix<64>(queries.wait(item) + group * Layout::kPanel);
#pragma unroll 1
    for (int tile = 0; tile < work.tiles; ++tile) {
      const unsigned number = item * work.tiles + tile;
      const char* const now = tiles.wait(number);
      const uint64_t keys = matrix<64>(now + Layout::kKeys);
      const auto multiply_keys = [&](int r) {
        begin_products();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          multiply_later<Element, false>(scores, move(left, 2 * r * Layout::kPanel + i * 32),
                                         move(keys, 2 * r * Layout::kPanel + i * 32), i > 0);
        }
        end_products();
      };
      const auto multiply_values = [&](int r) {
        begin_products();
#pragma unroll
        for (int i = 0; i < kTile / 16; ++i) {
          multiply_later<Element, true>(out[r], weights[i], move(keys, (2 * r + 1) * Layout::kPanel + i * 1024), true);
        }
        end_products();
      };
      const auto weigh_row = [&](int r) {
        take(scores);
        add_biases(scores, work, now + group * Layout::kBias, now + Layout::kMasks + r * 2 * kTile,
                   work.length - tile * kTile);
        const bool raised = weigh(scores, base[r], sum[r], shrink, 1.f);
        take(scores);
        return raised;
      };
      multiply_keys(0);
      wait_for_products<0>();
      if (weigh_row(0)) scale_rows(out[0], shrink);
      pack_left<Element>(weights, scores);
      multiply_keys(1);
      multiply_values(0);
      // The other warpgroup has left the last tile by now.
      if (threadIdx.x == 0) copier.copy(maps, work, queries, tiles);
      __syncwarp();
      wait_for_products<1>();
      if (weigh_row(1)) scale_rows(out[1], shrink);
      wait_for_products<0>();
      take(out[0]);
      pack_left<Element>(weights, scores);
      multiply_values(1);
      wait_for_products<0>();
      take(out[1]);
      tiles.release(number);
    }
    queries.release(item);
    const Item from(work, begin + item);
#pragma unroll
    for (int r = 0; r < kShared; ++r) {
      if (from.row + r == work.rows) break;
      Unit unit;
      unit.head = from.head;
      unit.row = from.row + r;
      unit.batch = from.batch;
      unit.line = (from.batch * work.rows + unit.row) * work.heads + from.head;
      conclude<32>(work, unit, from.first + static_cast<int>(threadIdx.x) / 32 * 16, out[r], base[r], sum[r]);
    }
  }
#endif
}

inline bool map(TensorMap& out, const Tensor& x, const Sizes& s) {
  return opkiln::map_tensor(out, x.data(), {s.head, s.length, s.heads, s.rows, s.batch},
                            {1, x.stride(2), x.stride(3), x.stride(1), x.stride(0)}, 32, kTile);
}

// Whether the copy engine can read all tensors.
inline bool map(Maps& out, const Sizes& s, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask,
                const Tensor& pair) {
  const int64_t lines = s.length * s.length;
  return map(out.q, q, s) && map(out.k, k, s) && map(out.v, v, s) &&
      (!mask.defined() ||
       opkiln::map_tensor(out.mask, mask.data(), {s.length, s.rows, s.batch, 1, 1},
                          {1, s.length, s.rows * s.length, 1, 1}, kTile, 1)) &&
      (!pair.defined() ||
       opkiln::map_tensor(out.pair, pair.data(), {s.length, s.length, s.heads, s.batch, 1},
                          {1, s.length, lines, lines * s.heads, 1}, kTile, kTile));
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
    Maps maps;
    const int64_t items = s.batch * ((s.rows + kShared - 1) / kShared) * s.heads * ((s.length + kQueries - 1) / kQueries);
    if (s.head <= 32 && s.length % 8 == 0 && opk::runs_as(warpgroup_kernel<Element>, 90) &&
        map(maps, s, queries, keys, values, mask, pair)) {
      opk::launch(warpgroup_kernel<Element>, items, kQueryThreads, Layout::kBytes, maps, work, static_cast<int>(items));
    } else if (s.head <= 32) {
      opk::launch(attention_kernel<Element, 32>, blocks, kThreads, 2 * sizeof(KeyTile<32>), work);
    } else {
      opk::launch(attention_kernel<Element, 64>, blocks, kThreads, 2 * sizeof(KeyTile<64>), work);
    }
  });
  return {out, moments};
}

OPKILN_OP(evoformer_attention, cuda);
