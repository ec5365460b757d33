// The backward pass on tensor cores, in three kernels that each recompute the weights:
//   by queries: a block has 64 queries and goes through all keys. Computes the gradient of q, and for each query the
//     sum that is subtracted from the gradients of its weights.
//   by keys: a block has 64 keys and goes through all queries. Computes the gradients of k and v, and the mask's for
//     each head.
//   by pairs: a block has 64 queries x 64 keys of a head and goes through the rows. Computes the pair bias' gradient.
// Each sum is computed by one thread in a fixed order, so there are no atomics. If there
// are too few pairs to fill a GPU, several blocks share the rows. A last kernel adds
// their partial sums, and the heads' parts of the mask's gradient.
#include <opkiln/op.h>

#include "tiles.h"

using evoformer::MaybeTensor;
using evoformer::Sizes;
using evoformer::Work;
using opk::Tensor;

namespace {

using namespace evoformer;

template <int kHead>
// blocks per multiprocessor; with more, a thread would have too few registers
constexpr int kBlocks = kHead == 32 ? 3 : 2;
constexpr int kBlocksWanted = 1024;  // blocks of the by-pairs kernel: enough for several rounds on an H100

// The moments of a thread's two queries (rows of fragments). Queries past the end get weights of 0.
struct Queries {
  float greatest[2], share[2], shift[2];

  template <class Element>
  __device__ void load(const Work<Element>& work, int64_t line, int first, bool with_shift) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int query = first + group_of_lane() + i * 8;
      const int64_t at = line * work.length + query;
      const bool there = query < work.length;
      greatest[i] = there ? work.moments[at] : INFINITY;
      share[i] = there ? work.moments[work.queries + at] : 0.f;
      shift[i] = there && with_shift ? work.shifts[at] : 0.f;
    }
  }
};

// Turns scores into gradients of scores. `through` has the gradients
// of the weights, `masks` the tile's mask in shared memory.
template <class Element>
__device__ inline void differentiate(float (&scores)[4][4], const float (&through)[4][4],
                                     const uint32_t (&biases)[2][4], const float* masks, int part,
                                     const Work<Element>& work, const Queries& queries) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float4 mask = load_columns(masks, part, j / 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float bias = widen_one<Element>(biases[i / 2][j], i % 2);
      const float other = fmaf(bias, kLog2e, at(mask, j % 2 * 2 + i % 2));
      const float power = fast_exp2(fmaf(scores[j][i], work.scale, other) - queries.greatest[i / 2]);
      scores[j][i] = power * fmaf(through[j][i], queries.share[i / 2], -queries.shift[i / 2]);
    }
  }
}

template <class Element, int kHead>
__global__ void __launch_bounds__(kThreads, kBlocks<kHead>)
    by_queries_kernel(const OPK_GRID_CONSTANT Work<Element> work) {
  __shared__ uint4 keys[2][kTile * kHead / 8], values[2][kTile * kHead / 8];
  alignas(16) __shared__ float masks[2][kTile];
  const Unit unit(work, blockIdx.x);
  const int first = unit.tile * kTile + threadIdx.x / 32 * 16;
  const Element* const pair = pair_of(work, unit.batch, unit.head);
  RowCopies<kHead, Element> k(work, work.k, work.k_strides, unit.batch, unit.row, unit.head, 0);
  RowCopies<kHead, Element> v(work, work.v, work.v_strides, unit.batch, unit.row, unit.head, 0);
  k.start(keys[0], work.k_strides);
  v.start(values[0], work.v_strides);
  end_batch();
  if (threadIdx.x < kTile) masks[0][threadIdx.x] = load_mask(work, unit.batch, unit.row, threadIdx.x);

  uint32_t q[kHead / 16][4], grad[kHead / 16][4];
  load_left<kHead>(q, head_of(work.q, work.q_strides, unit.batch, unit.row, unit.head), work.q_strides.place, first,
                   work.length, work.head);
  load_left<kHead>(grad, head_of(work.grad, work.grad_strides, unit.batch, unit.row, unit.head),
                   work.grad_strides.place, first, work.length, work.head);
  Queries queries;
  queries.load(work, unit.line, first, false);
  {
    uint32_t output[kHead / 16][4];
    load_left<kHead>(output, head_of(work.output, work.output_strides, unit.batch, unit.row, unit.head),
                     work.output_strides.place, first, work.length, work.head);
#pragma unroll
    for (int step = 0; step < kHead / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        queries.shift[i / 2 % 2] = fmaf(widen_one<Element>(output[step][i / 2], i % 2),
                                        widen_one<Element>(grad[step][i / 2], i % 2), queries.shift[i / 2 % 2]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    queries.shift[i] = sum_of_row(queries.shift[i]) * queries.share[i];
    const int query = first + group_of_lane() + i * 8;
    if (quarter_of_lane() == 0 && query < work.length) work.shifts[int64_t{unit.line} * work.length + query] = queries.shift[i];
  }

  float q_grad[kHead / 8][4] = {};
  for (int tile = 0; tile < work.tiles; ++tile) {
    const int stage = tile % 2;
    if (tile + 1 < work.tiles) {
      k.next_tile(work.k_strides);
      v.next_tile(work.v_strides);
      k.start(keys[1 - stage], work.k_strides);
      v.start(values[1 - stage], work.v_strides);
    }
    end_batch();
    float next_mask = 0;
    if (threadIdx.x < kTile) next_mask = load_mask(work, unit.batch, unit.row, (tile + 1) * kTile + threadIdx.x);
    uint32_t biases[2][2][4];  // [part][upper or lower row]
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int query = first + group_of_lane() + i % 2 * 8;
      load_pair(biases[i / 2][i % 2], work, pair, query, tile * kTile + i / 2 * 32 + quarter_of_lane() * 8);
    }
    wait_for_batches<1>();
    __syncthreads();
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      float scores[4][4], through[4][4];
      multiply_by_rows<Element, kHead>(scores, q, keys[stage], part);
      multiply_by_rows<Element, kHead>(through, grad, values[stage], part);
      differentiate(scores, through, biases[part], masks[stage], part, work, queries);
      add_product<Element, kHead>(q_grad, scores, keys[stage], part);
    }
    if (threadIdx.x < kTile) masks[1 - stage][threadIdx.x] = next_mask;
    __syncthreads();
  }
  const float factors[2] = {work.plain_scale, work.plain_scale};
  store_rows<Element, kHead>(work.q_grad, q_grad, work, unit, first, factors);
}

// The shared memory of the by-keys kernel for a tile of queries.
template <int kHead>
struct alignas(16) QueryTile {
  uint4 q[kTile * kHead / 8], grad[kTile * kHead / 8];
  uint4 pair[kTile * kTile / 8];  // [query, key]
  float moments[3][kTile];        // the greatest score, the share, the shift
};

// Starts copying a tile of the pair bias.
template <class Element>
__device__ inline void start_pair(uint4* tile, const Work<Element>& work, const Element* pair, int query, int key) {
  if (pair == nullptr) return;
  const int first = static_cast<int>(threadIdx.x) / 8, chunk = threadIdx.x % 8;
  const Element* const from = pair + int64_t{query + first} * work.pair_stride + key + chunk * 8;
#pragma unroll
  for (int i = 0; i < kTile * 8 / kThreads; ++i) {
    const int row = first + i * (kThreads / 8);
    const bool there = query + row < work.length && key + chunk * 8 < work.length;
    copy_later(tile + slot<8>(row, chunk), there ? from + i * (kThreads / 8) * work.pair_stride : pair, there);
  }
}

template <class Element, int kHead>
__global__ void __launch_bounds__(kThreads, kBlocks<kHead>)
    by_keys_kernel(const OPK_GRID_CONSTANT Work<Element> work) {
  extern __shared__ uint4 shared[];
  QueryTile<kHead>* const tiles = reinterpret_cast<QueryTile<kHead>*>(shared);
  const Unit unit(work, blockIdx.x);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = unit.tile * kTile + warp * 16;
  const Element* const pair = pair_of(work, unit.batch, unit.head);
  RowCopies<kHead, Element> queries(work, work.q, work.q_strides, unit.batch, unit.row, unit.head, 0);
  RowCopies<kHead, Element> grads(work, work.grad, work.grad_strides, unit.batch, unit.row, unit.head, 0);
  const auto start = [&](int tile) {
    QueryTile<kHead>& to = tiles[tile % 2];
    queries.start(to.q, work.q_strides);
    grads.start(to.grad, work.grad_strides);
    start_pair(to.pair, work, pair, tile * kTile, unit.tile * kTile);
    queries.next_tile(work.q_strides);
    grads.next_tile(work.grad_strides);
  };
  const auto moment = [&](int which, int tile) {
    const int query = tile * kTile + threadIdx.x;
    if (query >= work.length) return which == 0 ? INFINITY : 0.f;
    const int64_t at = int64_t{unit.line} * work.length + query;
    return which == 2 ? work.shifts[at] : work.moments[which * work.queries + at];
  };
  start(0);
  end_batch();
  if (threadIdx.x < kTile) {
#pragma unroll
    for (int i = 0; i < 3; ++i) tiles[0].moments[i][threadIdx.x] = moment(i, 0);
  }
  uint32_t k[kHead / 16][4], v[kHead / 16][4];
  load_left<kHead>(k, head_of(work.k, work.k_strides, unit.batch, unit.row, unit.head), work.k_strides.place, first,
                   work.length, work.head);
  load_left<kHead>(v, head_of(work.v, work.v_strides, unit.batch, unit.row, unit.head), work.v_strides.place, first,
                   work.length, work.head);
  const float mask[2] = {load_mask(work, unit.batch, unit.row, first + group_of_lane()),
                         load_mask(work, unit.batch, unit.row, first + group_of_lane() + 8)};

  float k_grad[kHead / 8][4] = {}, v_grad[kHead / 8][4] = {}, mask_grad[2] = {0, 0};
  for (int tile = 0; tile < work.tiles; ++tile) {
    const QueryTile<kHead>& now = tiles[tile % 2];
    if (tile + 1 < work.tiles) start(tile + 1);
    end_batch();
    float next[3] = {0, 0, 0};
    if (threadIdx.x < kTile) {
#pragma unroll
      for (int i = 0; i < 3; ++i) next[i] = moment(i, tile + 1);
    }
    wait_for_batches<1>();
    __syncthreads();
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      float scores[4][4], through[4][4];  // rows are keys here, and columns are queries
      multiply_by_rows<Element, kHead>(scores, k, now.q, part);
      multiply_by_rows<Element, kHead>(through, v, now.grad, part);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // of fragments 2 * half and 2 * half + 1: the upper rows, then the lower rows
        uint32_t biases[4] = {0, 0, 0, 0};
        if (pair != nullptr) {
          load_transposed(biases, now.pair + slot_of_columns<8>(lane, part, half, warp * 2));
        }
        const float4 greatest = load_columns(now.moments[0], part, half), share = load_columns(now.moments[1], part, half);
        const float4 shift = load_columns(now.moments[2], part, half);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int j = i / 4, lower = i / 2 % 2, column = j * 2 + i % 2;
          float &score = scores[2 * half + j][i % 4], &of_weight = through[2 * half + j][i % 4];
          const float other = fmaf(widen_one<Element>(biases[j + 2 * lower], i % 2), kLog2e, mask[lower]);
          const float power = fast_exp2(fmaf(score, work.scale, other) - at(greatest, column));
          score = power * at(share, column);
          of_weight = power * fmaf(of_weight, at(share, column), -at(shift, column));
          mask_grad[lower] += of_weight;
        }
      }
      add_product<Element, kHead>(v_grad, scores, now.grad, part);
      add_product<Element, kHead>(k_grad, through, now.q, part);
    }
    if (threadIdx.x < kTile) {
#pragma unroll
      for (int i = 0; i < 3; ++i) tiles[1 - tile % 2].moments[i][threadIdx.x] = next[i];
    }
    __syncthreads();
  }
  const float ones[2] = {1.f, 1.f}, scales[2] = {work.plain_scale, work.plain_scale};
  store_rows<Element, kHead>(work.v_grad, v_grad, work, unit, first, ones);
  store_rows<Element, kHead>(work.k_grad, k_grad, work, unit, first, scales);
  if (work.mask_parts == nullptr) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float sum = sum_of_row(mask_grad[i]);
    const int key = first + group_of_lane() + i * 8;
    if (quarter_of_lane() == 0 && key < work.length) work.mask_parts[int64_t{unit.line} * work.length + key] = sum;
  }
}

// The shared memory of the by-pairs kernel for a row.
template <int kHead>
struct alignas(16) RowTile {
  uint4 q[kTile * kHead / 8], grad[kTile * kHead / 8], k[kTile * kHead / 8], v[kTile * kHead / 8];
  float masks[kTile];
};

template <class Element, int kHead>
__global__ void __launch_bounds__(kThreads, kBlocks<kHead>)
    by_pairs_kernel(const OPK_GRID_CONSTANT Work<Element> work) {
  extern __shared__ uint4 shared[];
  RowTile<kHead>* const tiles = reinterpret_cast<RowTile<kHead>*>(shared);
  const int key = static_cast<int>(blockIdx.x) % work.tiles * kTile;
  const int query = static_cast<int>(blockIdx.x) / work.tiles * kTile;
  const int head = static_cast<int>(blockIdx.y) % work.heads, batch = static_cast<int>(blockIdx.y) / work.heads;
  const int split = blockIdx.z, first = query + threadIdx.x / 32 * 16, quarter = quarter_of_lane();
  const int begin = static_cast<int>(int64_t{work.rows} * split / work.splits);
  const int end = static_cast<int>(int64_t{work.rows} * (split + 1) / work.splits);
  RowCopies<kHead, Element> q_copies(work, work.q, work.q_strides, batch, begin, head, query);
  RowCopies<kHead, Element> grad_copies(work, work.grad, work.grad_strides, batch, begin, head, query);
  RowCopies<kHead, Element> k_copies(work, work.k, work.k_strides, batch, begin, head, key);
  RowCopies<kHead, Element> v_copies(work, work.v, work.v_strides, batch, begin, head, key);
  const auto start = [&](int row) {
    RowTile<kHead>& to = tiles[(row - begin) % 2];
    const auto copy = [](RowCopies<kHead, Element>& from, uint4* tile, const Strides& strides) {
      from.start(tile, strides);
      from.next_row(strides);
    };
    copy(q_copies, to.q, work.q_strides);
    copy(grad_copies, to.grad, work.grad_strides);
    copy(k_copies, to.k, work.k_strides);
    copy(v_copies, to.v, work.v_strides);
  };
  start(begin);
  end_batch();
  if (threadIdx.x < kTile) tiles[0].masks[threadIdx.x] = load_mask(work, batch, begin, key + threadIdx.x);
  uint32_t biases[2][2][4];
  const Element* const pair = pair_of(work, batch, head);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    load_pair(biases[i / 2][i % 2], work, pair, first + group_of_lane() + i % 2 * 8, key + i / 2 * 32 + quarter * 8);
  }

  float sums[2][4][4] = {};
  for (int row = begin; row < end; ++row) {
    const RowTile<kHead>& now = tiles[(row - begin) % 2];
    if (row + 1 < end) start(row + 1);
    end_batch();
    float next_mask = 0;
    if (threadIdx.x < kTile && row + 1 < end) next_mask = load_mask(work, batch, row + 1, key + threadIdx.x);
    Queries queries;
    queries.load(work, (int64_t{batch} * work.rows + row) * work.heads + head, first, true);
    wait_for_batches<1>();
    __syncthreads();
    uint32_t q[kHead / 16][4], grad[kHead / 16][4];
    load_left<kHead>(q, now.q);
    load_left<kHead>(grad, now.grad);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      float scores[4][4], through[4][4];
      multiply_by_rows<Element, kHead>(scores, q, now.k, part);
      multiply_by_rows<Element, kHead>(through, grad, now.v, part);
      differentiate(scores, through, biases[part], now.masks, part, work, queries);
#pragma unroll
      for (int i = 0; i < 16; ++i) sums[part][i / 4][i % 4] += scores[i / 4][i % 4];
    }
    if (threadIdx.x < kTile) tiles[1 - (row - begin) % 2].masks[threadIdx.x] = next_mask;
    __syncthreads();
  }

  const int64_t line = (int64_t{blockIdx.y} + int64_t{gridDim.y} * split) * work.length;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int mine = first + group_of_lane() + i % 2 * 8, column = key + i / 2 * 32 + quarter * 8;
    if (mine >= work.length || column >= work.length) continue;
    const int64_t to = (line + mine) * work.length + column;
    const float(&part)[4][4] = sums[i / 2];
    const int upper = i % 2 * 2;
    if (work.splits > 1) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (column + j < work.length) work.pair_parts[to + j] = part[j / 2][upper + j % 2];
      }
    } else if (work.length % 8 == 0) {
      uint4 eight;
      eight.x = narrow_two<Element>(part[0][upper], part[0][upper + 1]);
      eight.y = narrow_two<Element>(part[1][upper], part[1][upper + 1]);
      eight.z = narrow_two<Element>(part[2][upper], part[2][upper + 1]);
      eight.w = narrow_two<Element>(part[3][upper], part[3][upper + 1]);
      *reinterpret_cast<uint4*>(work.pair_grad + to) = eight;
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (column + j < work.length) work.pair_grad[to + j] = Element(part[j / 2][upper + j % 2]);
      }
    }
  }
}

// out[i, k] = the sum of parts[i, j, k] over j, added in order.
template <class Element>
__global__ void __launch_bounds__(256) sum_kernel(const float* parts, Element* out, int64_t total, int64_t inner,
                                                  int32_t count) {
  for (int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x; i < total; i += int64_t{gridDim.x} * 256) {
    const float* from = parts + i / inner * inner * count + i % inner;
    float sum = 0;
    for (int32_t j = 0; j < count; ++j) sum += from[j * inner];
    out[i] = Element(sum);
  }
}

template <class Element>
void launch_sum(const Tensor& parts, Tensor& out, int64_t inner, int64_t count) {
  const int64_t total = out.numel(), blocks = (total + 255) / 256;
  opk::launch(sum_kernel<Element>, blocks < 8192 ? blocks : 8192, 256, 0, parts.data<const float>(),
              out.data<Element>(), total, inner, static_cast<int32_t>(count));
}

template <class Element, int kHead>
void launch_all(const Sizes& s, const Work<Element>& work) {
  const int64_t blocks = s.batch * s.rows * s.heads * work.tiles;
  opk::launch(by_queries_kernel<Element, kHead>, blocks, kThreads, 0, work);
  opk::launch(by_keys_kernel<Element, kHead>, blocks, kThreads, 2 * sizeof(QueryTile<kHead>), work);
  if (work.pair_grad == nullptr) return;
  opk::Launch how;
  how.grid = {int64_t{work.tiles} * work.tiles, s.batch * s.heads, work.splits};
  how.block = kThreads;
  how.shared = 2 * sizeof(RowTile<kHead>);
  opk::launch(by_pairs_kernel<Element, kHead>, how, work);
}

}  // namespace

opk::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> evoformer_attention_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& output, const Tensor& moments,
    const MaybeTensor& mask_bias, const MaybeTensor& pair_bias, double scale, bool mask_grad, bool pair_grad) {
  const Sizes s = check_inputs(q, k, v, mask_bias, pair_bias);
  check_results(s, q, grad, output, moments);
  check_served(s, q);
  OPK_SERVED(!pair_grad || s.batch * s.heads < 65536, q, " has ", s.batch * s.heads, " batches and heads");
  Gradients out(s, q, mask_grad, pair_grad);
  if (q.numel() == 0) return {out.q, out.k, out.v, out.mask, out.pair};
  const Tensor grads = align_heads(grad), outputs = align_heads(output);
  const Tensor queries = align_heads(q), keys = align_heads(k), values = align_heads(v);
  const Tensor mask = make_contiguous(mask_bias), pair = align_rows(pair_bias, s);
  Tensor kept = opk::contiguous(moments);
  Tensor shifts = opk::empty({s.batch, s.rows, s.heads, s.length}, opk::DType::float32, q.device());
  Tensor mask_parts, pair_parts;
  if (mask_grad) mask_parts = opk::empty({s.batch, s.rows, s.heads, s.length}, opk::DType::float32, q.device());
  const int64_t pairs = s.batch * s.heads * tiles_of(s) * tiles_of(s), wanted = (kBlocksWanted + pairs - 1) / pairs;
  const int64_t splits = wanted < s.rows ? wanted : s.rows;
  if (pair_grad && splits > 1) {
    pair_parts = opk::empty({splits, s.batch, s.heads, s.length, s.length}, opk::DType::float32, q.device());
  }
  OPK_DISPATCH(q, Element, (opk::half, opk::bfloat16), {
    Work<Element> work = work_of<Element>(s, queries, keys, values, mask, pair, scale);
    work.grad = grads.data<const Element>();
    work.output = outputs.data<const Element>();
    work.grad_strides = strides_of(grads);
    work.output_strides = strides_of(outputs);
    work.moments = kept.data<float>();
    work.shifts = shifts.data<float>();
    work.q_grad = out.q.data<Element>();
    work.k_grad = out.k.data<Element>();
    work.v_grad = out.v.data<Element>();
    if (mask_grad) work.mask_parts = mask_parts.data<float>();
    if (pair_grad) work.pair_grad = out.pair.data<Element>();
    if (pair_parts.defined()) work.pair_parts = pair_parts.data<float>();
    work.splits = static_cast<int32_t>(splits);
    if (s.head <= 32) {
      launch_all<Element, 32>(s, work);
    } else {
      launch_all<Element, 64>(s, work);
    }
    if (mask_grad) launch_sum<Element>(mask_parts, out.mask, s.length, s.heads);
    if (pair_parts.defined()) launch_sum<Element>(pair_parts, out.pair, out.pair.numel(), splits);
  });
  return {out.q, out.k, out.v, out.mask, out.pair};
}

OPKILN_OP(evoformer_attention_backward, cuda);
