// The kernel of kv_attention and its launch. decode.h has the parts.
#include <opkiln/op.h>

#include "decode.h"

using opk::Tensor;
using namespace decode;

namespace {

// Adds the partial results of one unit's splits, in order.
template <int kRows>
__device__ void add_parts(const Work& work, float* factors, int64_t unit, int splits, int rows, int batch,
                          int head, int first_row) {
  constexpr int kAhead = 8, kFours = HEAD / 4;
  const int lane = threadIdx.x % 32;
  const float* parts = work.parts + unit * work.splits * kRows * HEAD;
  const int64_t units = int64_t{gridDim.y} * gridDim.z;
  const float2* sums = reinterpret_cast<const float2*>(work.parts + units * work.splits * kRows * HEAD) +
      unit * work.splits * kRows;
  const auto part = [&](int split, int i) {
    return __ldcg(reinterpret_cast<const float4*>(parts) + int64_t{split} * kRows * kFours + i);
  };
  // A thread's first loads are in flight while the factors are computed.
  float4 ahead[kAhead];
#pragma unroll
  for (int split = 0; split < kAhead; ++split) {
    const bool needed = split < splits && int(threadIdx.x) < rows * kFours;
    ahead[split] = needed ? part(split, threadIdx.x) : float4{0, 0, 0, 0};
  }
  for (int row = threadIdx.x / 32; row < rows; row += block_warps()) {  // a warp for each row
    float most = -INFINITY, total = 0;
    for (int split = lane; split < splits; split += 32) {
      const float2 found = __ldcg(sums + split * kRows + row);
      const float greater = fmaxf(most, found.x);
      if (greater != -INFINITY) {
        total = total * fast_exp2(most - greater) + found.y * fast_exp2(found.x - greater);
      }
      most = greater;
    }
    float all = most;
    for (int step = 16; step > 0; step /= 2) all = fmaxf(all, __shfl_xor_sync(kAll, all, step));
    total = all == -INFINITY ? 0.f : total * fast_exp2(most - all);
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(kAll, total, step);
    for (int split = lane; split < splits; split += 32) {
      const float own = __ldcg(sums + split * kRows + row).x;
      factors[split * kRows + row] = all == -INFINITY ? 0.f : fast_exp2(own - all) / total;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < rows * kFours; i += block_warps() * 32) {
    const int row = i / kFours;
    float4 sum = {0, 0, 0, 0};
    int split = 0;
    if (i == int(threadIdx.x)) {
#pragma unroll
      for (; split < kAhead; ++split) {
        if (split < splits) add(sum, factors[split * kRows + row], ahead[split]);
      }
    }
#pragma unroll 8
    for (; split < splits; ++split) add(sum, factors[split * kRows + row], part(split, i));
    store_out(work, batch, head, first_row + row, i % kFours, sum, 1.f);
  }
}

// The parts that the blocks of a cluster send each other. Each block adds up some columns of all.
template <int kRows>
struct Received {
  float4 parts[kRows * HEAD / 4 + kMostBlocks];  // [block, column]
  float2 sums[kMostBlocks][kRows];

  __device__ static int columns(const Work& work, int rows) {
    return (rows * (HEAD / 4) + work.splits - 1) / work.splits;
  }

  // `this` is that of the sender.
  __device__ void send(const Work& work, int rows, int i, const float4& part, const float2& sum) {
    const int each = columns(work, rows), to = i / each, from = blockIdx.x;
    in_other(this, to)->parts[from * each + i - to * each] = part;
    if (i % (HEAD / 4) == 0) {
      for (int block = 0; block < work.splits; ++block) in_other(this, block)->sums[from][i / (HEAD / 4)] = sum;
    }
  }

  __device__ void add_up(const Work& work, int rows, int batch, int head, int first_row) const {
    constexpr int kFours = HEAD / 4;
    const int each = columns(work, rows), begin = blockIdx.x * each;
    for (int i = threadIdx.x; i < min(each, rows * kFours - begin); i += block_warps() * 32) {
      const int row = (begin + i) / kFours;
      float2 found[kMostBlocks];
      float most = -INFINITY, total = 0;
#pragma unroll
      for (int block = 0; block < kMostBlocks; ++block) {
        found[block] = block < work.splits ? sums[block][row] : float2{-INFINITY, 0};
        most = fmaxf(most, found[block].x);
      }
      float4 sum = {0, 0, 0, 0};
#pragma unroll
      for (int block = 0; block < kMostBlocks; ++block) {
        if (block >= work.splits) break;
        const float factor = fast_exp2(found[block].x - (most == -INFINITY ? 0.f : most));
        total += factor * found[block].y;
        add(sum, factor, parts[block * each + i]);
      }
      const float factor = most == -INFINITY ? 0.f : 1.f / total;
      store_out(work, batch, head, first_row + row, (begin + i) % kFours, sum, factor);
    }
  }
};

template <int kEights>
__global__ void __launch_bounds__(kMostWarps * 32) decode_kernel(const OPK_GRID_CONSTANT Work work) {
  extern __shared__ __align__(128) uint4 shared[];  // copies of whole lines: half of a line takes as long
  __shared__ bool is_last;
  constexpr int kRows = kEights * 8, kFours = HEAD / 4;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, batch = blockIdx.z;
  const int head = blockIdx.y / work.row_blocks, first_row = blockIdx.y % work.row_blocks * kRows;
  const int rows = min(kRows, work.tokens * work.group - first_row);
  const int warps = block_warps(), step = warps * kTile;  // keys that the block reads at a time
  if (work.clustered) arrive_in_cluster();
  opk::wait_for_previous();

  const Rows source(work, batch, head);
  const Share share(work, source.total);
  const int splits = share.splits, split = blockIdx.x;
  if (split >= splits && !work.clustered) return;
  const int begin = share.begin, end = share.end;

  // This warp's tiles are every warps-th, so that a block reads neighbours at one time.
  const int first = begin + warp * kTile;
  const int count = first < end ? (end - first + step - 1) / step : 0;
  uint4* ring = shared + warp * kStages * 2 * kTileChunks;
  int next = source.look_up_block(first), after_next = source.look_up_block(first + step);
#pragma unroll
  for (int tile = 0; tile < kStages - 1; ++tile) {
    const int blocks = next;
    next = after_next;
    after_next = source.look_up_block(first + (tile + 2) * step);
    if (tile < count) source.start(ring + tile * 2 * kTileChunks, first + tile * step, blocks);
    end_batch();
  }
  uint32_t queries[kEights][kSteps][2];
  load_queries(queries, work, batch, head, first_row);
  Columns<kEights> columns(work, head, first_row, source.total);
  if (first_row == 0 && end > source.old) append(work, source, begin, end);

  float out[kSteps][kEights][4] = {};
  const int all_visible = work.causal ? source.total - work.tokens + 1 : source.total;
  int stage = 0, free_stage = kStages - 1;
  for (int tile = 0; tile < count; ++tile) {
    wait_for_batches<kStages - 2>();
    __syncwarp();  // the tile is visible to all lanes, and all have finished reading the one before it
    const int blocks = next;
    const int later = tile + kStages - 1;
    next = after_next;
    after_next = source.look_up_block(first + (later + 2) * step);
    if (later < count) {
      source.start(ring + free_stage * 2 * kTileChunks, first + later * step, blocks);
    }
    end_batch();
    attend(ring + stage * 2 * kTileChunks, first + tile * step, all_visible, work, queries, columns, out);
    free_stage = stage;
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }

  // Adds up the warps of the block in shared memory.
  __syncthreads();
  float* outs = reinterpret_cast<float*>(shared);  // [warp, row, kOutRow]
  float2* sums = reinterpret_cast<float2*>(outs + warps * kRows * kOutRow);  // [warp, row]
#pragma unroll
  for (int eight = 0; eight < kEights; ++eight) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = eight * 8 + lane % 4 * 2 + i % 2;
      float* to = outs + (warp * kRows + row) * kOutRow + lane / 4 + i / 2 * 8;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) to[step * 16] = out[step][eight][i];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = columns.sum[eight][i];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(kAll, sum, step);
      if (lane < 4) sums[warp * kRows + eight * 8 + lane * 2 + i] = {columns.greatest[eight][i], sum};
    }
  }
  __syncthreads();
  const int64_t unit = int64_t{batch} * gridDim.y + blockIdx.y, units = int64_t{gridDim.y} * gridDim.z;
  float4* parts = reinterpret_cast<float4*>(work.parts) + (unit * work.splits + split) * kRows * kFours;
  float2* part_sums = reinterpret_cast<float2*>(work.parts + units * work.splits * kRows * HEAD) +
      (unit * work.splits + split) * kRows;
  auto* received = reinterpret_cast<Received<kRows>*>(shared + warps * (kRingBytes / kWarps / 16));
  if (work.clustered) wait_for_cluster();  // they have all begun
  for (int i = threadIdx.x; i < rows * kFours; i += block_warps() * 32) {
    const int row = i / kFours, column = i % kFours;
    float most = -INFINITY, total = 0;
#pragma unroll kWarps
    for (int w = 0; w < warps; ++w) most = fmaxf(most, sums[w * kRows + row].x);
    const float base = most == -INFINITY ? 0.f : most;
    float4 sum = {0, 0, 0, 0};
#pragma unroll kWarps
    for (int w = 0; w < warps; ++w) {
      const float2 found = sums[w * kRows + row];
      const float factor = fast_exp2(found.x - base);
      total += factor * found.y;
      add(sum, factor, *reinterpret_cast<const float4*>(outs + (w * kRows + row) * kOutRow + column * 4));
    }
    if (work.clustered) {
      received->send(work, rows, i, sum, {most, total});
    } else if (splits == 1) {
      // A query that sees nothing gives zeros.
      store_out(work, batch, head, first_row + row, column, sum, most == -INFINITY ? 0.f : 1.f / total);
    } else {
      parts[row * kFours + column] = sum;
      if (column == 0) part_sums[row] = {most, total};
    }
  }
  if (work.clustered) {
    arrive_in_cluster();
    wait_for_cluster();
    received->add_up(work, rows, batch, head, first_row);
    return;
  }
  if (splits == 1) return;

  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(work.counters + unit, 1) == splits - 1;
    if (is_last) work.counters[unit] = 0;  // reset for the next launch
    __threadfence();
  }
  __syncthreads();
  if (is_last) {
    add_parts<kRows>(work, reinterpret_cast<float*>(shared), unit, splits, rows, batch, head, first_row);
  }
}

Strides strides_of(const Tensor& x, bool tokens_first = false) {
  const opk::Ints all = x.strides();
  return {all[0], all[tokens_first ? 2 : 1], all[tokens_first ? 1 : 2]};
}

// Rows are read 16 bytes at a time, queries 4 bytes at a time.
void check_rows(const Tensor& x, int64_t heads) {
  const opk::Ints sizes = x.sizes(), strides = x.strides();
  OPK_CHECK(sizes.size() == 4 && sizes[3] == HEAD, x, " has shape ", sizes, ", expected rows of ", HEAD);
  OPK_CHECK(heads == 0 || sizes[1] == heads, x, " has ", sizes[1], " heads, expected ", heads);
  OPK_SERVED(strides[3] == 1 && strides[0] % 8 == 0 && strides[1] % 8 == 0 && strides[2] % 8 == 0 &&
                 reinterpret_cast<uintptr_t>(x.data()) % 16 == 0,
             x, " has rows that do not begin at multiples of 16 bytes");
}

template <int kEights>
void launch_decode(Work& work, int64_t batch, opk::Device device) {
  opk::Launch how;
  how.grid = {work.splits, int64_t{work.heads} * work.row_blocks, batch};
  const size_t most = opk::most_shared(decode_kernel<kEights>), sent = sizeof(Received<kEights * 8>);
  const bool is_wide = !kPaged && how.grid.count() <= kWideBlocks && most >= 2 * kRingBytes + sent;
  const int wide = is_wide ? 2 : 1;
  how.block = wide * kThreads;
  how.shared = wide * kRingBytes;
  how.overlap = true;
  work.clustered = work.splits > 1 && work.splits <= kMostBlocks &&
      (is_wide || work.capacity <= work.splits * kClusteredKeys) && most >= how.shared + sent &&
      opk::has_clusters(decode_kernel<kEights>);
  Tensor parts;
  if (work.clustered) {
    how.cluster = work.splits;
    how.shared += sent;
  } else if (work.splits > 1) {
    const int64_t rows = static_cast<int64_t>(how.grid.count()) * kEights * 8;
    parts = opk::empty({rows * (HEAD + 2)}, opk::DType::float32, device);
    work.parts = parts.data<float>();
  }
  opk::launch(decode_kernel<kEights>, how, work);
}

}  // namespace

Tensor kv_attention(const Tensor& q, const opk::optional<Tensor>& k, const opk::optional<Tensor>& v,
                    Tensor& k_cache, Tensor& v_cache, const Tensor& lengths,
                    const opk::optional<Tensor>& block_table, const opk::optional<Tensor>& slopes,
                    Tensor& counters, double scale, bool causal, int64_t splits) {
  OPK_CHECK(block_table.has_value() == kPaged, "block_table is needed by the paged kernel, and only by it");
  const int64_t batch = q.size(0), q_heads = q.size(1), tokens = q.size(2);
  const int64_t heads = k_cache.size(kPaged ? 2 : 1);
  check_rows(q, 0);
  check_rows(k_cache, 0);
  opk::check_same_shape(k_cache, v_cache);
  opk::check_same_dtype(q, k_cache, v_cache);
  OPK_CHECK(heads > 0 && q_heads % heads == 0, "q has ", q_heads, " heads, the cache has ", heads);
  opk::check_shape(lengths, {batch});
  opk::check_contiguous(lengths, counters);
  for (int i = 0; i < 4; ++i) {
    OPK_SERVED(k_cache.stride(i) == v_cache.stride(i), "k_cache and v_cache have different strides");
  }

  Work work = {};
  work.q = q.data<const Element>();
  work.k_cache = k_cache.data<Element>();
  work.v_cache = v_cache.data<Element>();
  work.lengths = lengths.data<const int32_t>();
  work.q_strides = strides_of(q);
  work.cache_strides = strides_of(k_cache, kPaged);
  if (k.has_value()) {
    OPK_CHECK(v.has_value(), "k is given without v");
    check_rows(*k, heads);
    opk::check_shape(*k, {batch, heads, tokens, HEAD});
    opk::check_same_shape(*k, *v);
    opk::check_same_dtype(q, *k, *v);
    for (int i = 0; i < 4; ++i) OPK_SERVED(k->stride(i) == v->stride(i), "k and v have different strides");
    work.k = k->data<const Element>();
    work.v = v->data<const Element>();
    work.new_strides = strides_of(*k);
  }
  int64_t capacity = k_cache.size(2);
  if constexpr (kPaged) {
    const Tensor& table = *block_table;
    OPK_CHECK(table.dim() == 2 && table.size(0) == batch && table.stride(1) == 1,
              "block_table has shape ", table.sizes(), ", expected ", batch, " rows");
    const int64_t block_size = k_cache.size(1);
    OPK_SERVED(k_cache.stride(0) == block_size * k_cache.stride(1), "the blocks of the cache have gaps");
    OPK_SERVED(k_cache.size(0) * block_size < (int64_t{1} << 31), "the cache has 2^31 tokens or more");
    work.table = table.data<const int32_t>();
    work.table_stride = table.stride(0);
    work.block_size = static_cast<int32_t>(block_size);
    work.blocks = static_cast<int32_t>(k_cache.size(0));
    capacity = table.size(1) * block_size;
  } else {
    OPK_CHECK(k_cache.size(0) >= batch, "the cache has ", k_cache.size(0), " sequences, q has ", batch);
  }
  OPK_SERVED(capacity < (int64_t{1} << 30), "the cache has room for ", capacity, " tokens, at most 2^30");
  if (slopes.has_value()) {
    opk::check_shape(*slopes, {q_heads});
    opk::check_contiguous(*slopes);
    work.slopes = slopes->data<const float>();
  }
  const int64_t rows = q_heads / heads * tokens, held = rows > 8 ? 16 : 8;
  const int64_t row_blocks = (rows + held - 1) / held, units = batch * heads * row_blocks;
  OPK_CHECK(splits >= 1 && splits <= 256, "splits is ", splits, ", expected 1 to 256");
  if (units > counters.numel()) splits = 1;
  Tensor out = opk::empty_strided({batch, q_heads, tokens, HEAD},
                                  {tokens * q_heads * HEAD, HEAD, q_heads * HEAD, 1}, q.dtype(), q.device());
  work.counters = counters.data<int32_t>();
  work.out = out.data<Element>();
  work.capacity = static_cast<int32_t>(capacity);
  work.tokens = static_cast<int32_t>(tokens);
  work.group = static_cast<int32_t>(q_heads / heads);
  work.heads = static_cast<int32_t>(heads);
  work.row_blocks = static_cast<int32_t>(row_blocks);
  work.splits = static_cast<int32_t>(splits);
  work.scale = static_cast<float>(scale * 1.4426950408889634);
  work.causal = causal;
  if (rows > 8) {
    launch_decode<2>(work, batch, q.device());
  } else {
    launch_decode<1>(work, batch, q.device());
  }
  return out;
}

OPKILN_OP(kv_attention, cuda);
