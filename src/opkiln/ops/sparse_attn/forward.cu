// The kernels of sparse_attn: an online softmax over the listed tiles, times the values. tile.h has the parts.
// One kernel runs on all GPUs, the other on Hopper.
#include <opkiln/op.h>
#include <opkiln/warpgroup_matrix.h>

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
  float* sums;  // [slots, times, kRows, 2]: the base of the weights, and their sum
};

// A warp's running results for 16 rows: the output, the bases of weights, and each lane's sums of them.
template <int kHead>
struct Running {
  float out[kHead / 8][4] = {}, base[2] = {-INFINITY, -INFINITY}, sum[2] = {};
};

constexpr unsigned kEvery = (1u << kStreamed / 16) - 1;  // all pieces of a tile

// Hides the keys of a tile that a warp's queries do not see.
template <class Element>
__device__ inline void hide(float (&scores)[kStreamed / 8][4], unsigned pieces, int query, int key,
                              const Seen<Element>& seen) {
  if (!seen.sees_all(query, 16, key, kStreamed)) seen.template hide<false>(scores, query, key);
  if (pieces == kEvery) return;
#pragma unroll
  for (int n = 0; n < kStreamed / 8; ++n) {
    const bool used = (pieces >> n / 2 & 1) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[n][i] = used ? scores[n][i] : -INFINITY;
  }
}

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
    hide(scores, pieces, query, key, seen);
  }
  float shrink[2];
  if (weigh(scores, running.base, running.sum, shrink, seen.factor)) scale_rows(running.out, shrink);
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

// Stores a warp's results: rows of the output, or of a part of it. `tile` is shared memory that no one reads.
template <int kHead, class Element>
__device__ inline void conclude(const Running<kHead>& running, const Work<Element>& work, const Place& place,
                                uint4* tile, int row) {
  const int lane = threadIdx.x % 32, first_row = place.tile * kRows;
  float factor[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float sum = running.sum[i];
    sum += __shfl_xor_sync(kAll, sum, 1);
    sum += __shfl_xor_sync(kAll, sum, 2);
    const float base = running.base[i];
    factor[i] = sum == 0 ? 0.f : 1 / sum;
    const int down = row + lane / 4 + 8 * i;
    if (lane % 4 != 0) continue;
    if (place.slot >= 0) {
      const int64_t part = (int64_t{place.slot} * work.times + place.which) * kRows + down;
      reinterpret_cast<float2*>(work.sums)[part] = {base, sum};
    } else if (first_row + down < work.sizes.tokens) {
      work.lse[line_of(place, work.sizes) + first_row + down] = sum == 0 ? INFINITY : (base + log2f(sum)) * kLn2;
    }
  }
  if (place.slot >= 0) {
    const int64_t part = int64_t{place.slot} * work.times + place.which;
    store_part<kHead>(work.parts + part * kRows * kHead, row, running.out);
  } else {
    const Rows<Element> out(work.out, work.out_strides, place, work.sizes);
    store<kHead>(out, tile, row, first_row + row, running.out, factor[0], factor[1]);
  }
}

template <class Element, int kHead>
__global__ void __launch_bounds__(kThreads, kHead == 64 ? 2 : 1)
    forward_kernel(const OPK_GRID_CONSTANT Work<Element> work) {
  constexpr int kTile = kStreamed * kHead / 8;
  extern __shared__ uint4 shared[];  // queries, and the stream
  const int warp = threadIdx.x / 32, row = warp * 16;
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
  conclude(running, work, place, shared, row);
}

// ---- Hopper -----------------------------------------------------------------------------------------

struct Maps {
  TensorMap q, k, v;
};

// The shared memory: queries, and a ring of tiles, each keys and values. All are panels of 64 rows and 64 columns.
template <int kHead>
struct Layout {
  static constexpr int kPanels = kHead / 64, kPanel = kStreamed * 128, kQueries = 2 * kPanels * kPanel, kSlots = 4;
  using Ring = Slots<kSlots, 2 * kPanels * kPanel, kWarps>;
  static constexpr int kBytes = kQueries + Ring::kAll + (2 * kSlots + 1) * 8;
  // With two blocks on a multiprocessor, their first threads start the copies. With one there are registers left for
  // a warpgroup that does nothing else.
  static constexpr int kBlocks = kHead == 64 ? 2 : 1;
  static constexpr bool kCopies = kBlocks == 1;
  static constexpr int kAllThreads = kThreads + 128 * kCopies;
};

template <int kHead>
__device__ inline void copy_tiles(const typename Layout<kHead>::Ring& ring, const Maps& maps, const Place& place,
                                  const int2* tiles, int first, int last) {
  constexpr int kPanels = Layout<kHead>::kPanels, kPanel = Layout<kHead>::kPanel;
  last = min(last, place.end - place.begin);
#pragma unroll 1
  for (int i = first; i < last; ++i) {
    const int key = tiles[i].x * kStreamed;
    uint64_t* const barrier = ring.fill(i);
    char* const to = ring.slot(i);
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      load_tile(to + p * kPanel, maps.k, barrier, p * 64, key, place.head, place.batch);
      load_tile(to + (kPanels + p) * kPanel, maps.v, barrier, p * 64, key, place.head, place.batch);
    }
  }
}

// Two warpgroups have 64 queries each. The products of a tile's weights run while the next tile's are computed.
template <class Element, int kHead>
__global__ void __launch_bounds__(warpgroup_threads(Layout<kHead>::kAllThreads), warpgroup_threads(Layout<kHead>::kBlocks))
    warpgroup_kernel(const OPK_GRID_CONSTANT Maps maps, const OPK_GRID_CONSTANT Work<Element> work) {
#if defined(OPK_WARPGROUPS)
  using In = Layout<kHead>;
  extern __shared__ __align__(1024) char memory[];
  uint64_t* const ready = reinterpret_cast<uint64_t*>(memory + In::kQueries + In::Ring::kAll);
  const typename In::Ring ring{memory + In::kQueries, ready + 1};
  const int warp = threadIdx.x / 32, row = warp * 16, group = warp / 4;
  const Place place(work.list, work.sizes, work.list.shares, work.times);
  if (threadIdx.x == 0) {
    prefetch(maps.q);
    prefetch(maps.k);
    prefetch(maps.v);
    ring.prepare();
    make_barrier(ready, 1);
    publish_barriers();
  }
  __syncthreads();
  const int2* const tiles = reinterpret_cast<const int2*>(work.list.tiles) + place.begin;
  const auto copy_first = [&] {
    arrive_expecting(ready, In::kQueries);
    for (int i = 0; i < 2 * In::kPanels; ++i) {  // both warpgroups' rows of each panel
      load_tile(memory + i * In::kPanel, maps.q, ready, i / 2 * 64, place.tile * kRows + i % 2 * 64, place.head,
                place.batch);
    }
    copy_tiles<kHead>(ring, maps, place, tiles, 0, In::kCopies ? place.end : In::kSlots - 1);
  };
  if constexpr (In::kCopies) {
    if (warp >= kWarps) {
      give_registers<24>();
      if (threadIdx.x == kThreads) copy_first();
      return;
    }
    take_registers<240>();
  } else {
    if (threadIdx.x == 0) copy_first();
    __syncwarp();
  }
  const int count = place.end - place.begin, query = place.tile * kRows + row;
  Running<kHead> running;
  const Seen<Element> seen(work.rules, place, work.sizes);
  const uint64_t queries = matrix<128>(memory + group * In::kPanel);
  uint32_t weights[kStreamed / 16][4];
  float scores[kStreamed / 8][4], shrink[2];
  wait_for_phase(ready, 0);
  const auto at = [&](int i) { return i < count ? tiles[i] : int2{0, 0}; };
  // The bits of this warpgroup's pieces.
  const auto used = [&](const int2& entry) { return static_cast<unsigned>(entry.y) >> (group * 16) & 0xffff; };
  const auto multiply_keys = [&](int i) {
    const uint64_t keys = matrix<128>(ring.wait(i));
    begin_products();
#pragma unroll
    for (int step = 0; step < kHead / 16; ++step) {
      const int panel = step / 4 * In::kPanel, column = step % 4 * 32;
      multiply_later<Element, false>(scores, move(queries, 2 * panel + column), move(keys, panel + column), step > 0);
    }
    end_products();
  };
  const auto multiply_values = [&](int i) {
    const uint64_t values = matrix<128>(ring.slot(i) + In::kPanels * In::kPanel);
    begin_products();
#pragma unroll
    for (int step = 0; step < kStreamed / 16; ++step) {
#pragma unroll
      for (int p = 0; p < In::kPanels; ++p) {
        auto& out = *reinterpret_cast<float(*)[8][4]>(running.out + 8 * p);
        multiply_later<Element, true>(out, weights[step], move(values, p * In::kPanel + step * 2048), true);
      }
    }
    end_products();
  };
  const auto weigh_tile = [&](const int2& entry) {
    take(scores);
    const unsigned pieces = used(entry) >> (warp % 4 * 4) & kEvery;
    const int key = entry.x * kStreamed;
    if (pieces != kEvery || !seen.sees_all(query, 16, key, kStreamed)) hide(scores, pieces, query, key, seen);
    const bool raised = weigh(scores, running.base, running.sum, shrink, seen.factor);
    take(scores);  // so that the compiler does not move their computation behind a wait
    return raised;
  };
  // Goes where tile i - 1 was, which the other warpgroup has left, too. (It also ends a block of instructions: the
  // compiler would wait for the products of values before it computes weights.)
  const auto copy_next = [&](int i) {
    if (In::kCopies) return;
    if (threadIdx.x == 0) copy_tiles<kHead>(ring, maps, place, tiles, i + In::kSlots - 1, i + In::kSlots);
    __syncwarp();
  };
  int2 entry = at(0);
  for (int i = 0; i < count; ++i) {
    int2 next = at(i + 1);
    if (used(entry) == 0) {
      ring.wait(i);
    } else {
      multiply_keys(i);
      wait_for_products<0>();
      if (weigh_tile(entry)) scale_rows(running.out, shrink);
      pack_left<Element>(weights, scores);
      for (; i + 1 < count && used(next) != 0; ++i) {
        entry = next;
        next = at(i + 2);
        multiply_keys(i + 1);
        multiply_values(i);
        wait_for_products<1>();
        const bool raised = weigh_tile(entry);
        copy_next(i);
        wait_for_products<0>();
        take(running.out);
        ring.release(i);
        if (raised) scale_rows(running.out, shrink);
        pack_left<Element>(weights, scores);
      }
      multiply_values(i);
      wait_for_products<0>();
      take(running.out);
    }
    ring.release(i);
    copy_next(i);
    entry = next;
  }
  sync_threads(1, kThreads);  // no product reads the queries any more
  conclude(running, work, place, reinterpret_cast<uint4*>(memory), row);
#endif
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

// Whether the copy engine can read a tensor's heads.
inline bool map(TensorMap& out, const void* data, const Strides& strides, const Sizes& sizes) {
  return opkiln::map_tensor(out, data, {sizes.columns, sizes.tokens, sizes.heads, sizes.batch, 1},
                            {1, strides.token, strides.head, strides.batch, 1}, 64, 64);
}

template <class Element, int kHead>
void run(Work<Element>& work, const Tensor& like) {
  const int64_t rows = int64_t{work.list.slots} * work.times * kRows;
  Tensor parts = opk::empty({rows * (kHead + 2)}, opk::DType::float32, like.device());
  work.parts = parts.data<float>();
  work.sums = work.parts + rows * kHead;
  constexpr int kShared = (kRows + 4 * kStreamed) * kHead * 2;
  const int64_t blocks = int64_t{work.list.share_count} * work.times;
  Maps maps;
  if (!work.rules.biased && opk::runs_as(warpgroup_kernel<Element, kHead>, 90) && map(maps.q, work.q, work.q_strides, work.sizes) &&
      map(maps.k, work.k, work.k_strides, work.sizes) && map(maps.v, work.v, work.v_strides, work.sizes)) {
    opk::launch(warpgroup_kernel<Element, kHead>, blocks, Layout<kHead>::kAllThreads, Layout<kHead>::kBytes, maps,
                work);
  } else {
    opk::launch(forward_kernel<Element, kHead>, blocks, kThreads, kShared, work);
  }
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
