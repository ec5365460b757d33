// Tiles of attention: loading rows into shared memory, fragments of them, and the visibility rules.
//
// A thread block keeps a tile of rows, and streams tiles of 64 rows past it, one in use and one in flight.
// Each warp has 16 of the kept rows. A tile's bits tell which of its pieces, 16 by 16 tokens, are visible. A
// warp skips the others as a whole, so no lane idles in a branch.
#pragma once

#include <math.h>
#include <opkiln/warp_matrix.h>

#include "work.h"

namespace sparse __attribute__((visibility("hidden"))) {

using namespace opkiln::device;

constexpr unsigned kAll = 0xffffffffu;
constexpr int kStreamed = 64;  // rows of a streamed tile
constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

// A block's share of the work, and its position.
struct Place {
  int batch, head, tile, begin, end, slot;
  int which;  // among the blocks with this share

  __device__ Place(const List& list, const Sizes& sizes, const int32_t* from, int times, bool joined = false) {
    const int4 found = reinterpret_cast<const int4*>(from)[blockIdx.x / times];
    which = blockIdx.x % times;
    tile = found.x % list.lines;
    begin = found.y;
    end = joined ? found.y + found.z : found.z;
    slot = joined ? found.y : found.w;
    if (sizes.layout_heads == 1) {
      head = which % sizes.heads;
      batch = which / sizes.heads;
    } else {
      head = found.x / list.lines;
      batch = which;
    }
  }
};

// The index at which a head's numbers begin in [batch, heads, tokens].
__device__ inline int64_t line_of(const Place& place, const Sizes& sizes) {
  return (int64_t{place.batch} * sizes.heads + place.head) * sizes.tokens;
}

// The rows of one head. Keeps references to kernel parameters, because registers are scarce.
template <class Element>
struct Rows {
  Element* data;
  const int64_t& stride;
  const Sizes& sizes;

  __device__ Rows(Element* base, const Strides& strides, const Place& place, const Sizes& given)
      : data(base + place.batch * strides.batch + place.head * strides.head), stride(strides.token), sizes(given) {}
};

// The position of 16 bytes of a row in a tile. The swizzle puts the
// eight rows that are read at once into different banks.
template <int kHead>
__device__ inline int slot(int row, int chunk) {
  return row * (kHead / 8) + (chunk ^ (row & 7));
}

// Starts copying a tile's rows. Past the last row or column it writes zeros without reading.
template <int kHead, int kCount, int kThreads, class Element>
__device__ inline void start(uint4* tile, const Rows<const Element>& rows, int first) {
  constexpr int kChunks = kHead / 8, kStep = kThreads / kChunks;  // rows that the block copies at a time
  static_assert(kStep % 8 == 0, "a thread's rows are at the same place of their eights");
  const int row = static_cast<int>(threadIdx.x / kChunks), chunk = threadIdx.x % kChunks;
  // check_rows has checked that it fits; a 32-bit stride takes one multiplication
  const int stride = static_cast<int>(rows.stride);
  const Element* from = rows.data + int64_t{first + row} * stride + chunk * 8;
  const int left = chunk * 8 < rows.sizes.columns ? rows.sizes.tokens - first - row : 0;
  uint4* const to = tile + slot<kHead>(row, chunk);
#pragma unroll
  for (int i = 0; i < kCount / kStep; ++i) {
    copy_later(to + i * kStep * kChunks, from, i * kStep < left);
    from += int64_t{kStep} * stride;
  }
}

// The stream of tiles past a block, one in use and one in flight. Each lane holds an entry of
// the list, so the next tile is known without waiting for memory.
template <int kHead, int kThreads, class Element>
struct Stream {
  static constexpr int kTile = kStreamed * kHead / 8;
  uint4* stages;  // two stages, each with a tile of `one` and a tile of `other`
  Rows<const Element> one, other;
  const int2* tiles;
  int begin, last;
  int2 listed;  // this lane's entry, of 32
  int now = 0, next = 0;
  unsigned pieces = 0;  // visible pieces of `now`

  __device__ Stream(uint4* memory, Rows<const Element> first, Rows<const Element> second, const List& list,
                    const Place& place)
      : stages(memory), one(first), other(second), tiles(reinterpret_cast<const int2*>(list.tiles)),
        begin(place.begin), last(place.end - 1), listed{0, 0} {
    if (begin > last) return;
    read(begin);
    now = __shfl_sync(kAll, listed.x, 0);
    start_tile(0, now);
  }
  // Makes entry i current, and starts copying the one after it.
  __device__ void go_to(int i) {
    const int at = i - begin;
    now = __shfl_sync(kAll, listed.x, at % 32);
    pieces = __shfl_sync(kAll, listed.y, at % 32);
    if (i == last) return;
    if (at % 32 == 31) read(i + 1);
    next = __shfl_sync(kAll, listed.x, (at + 1) % 32);
    start_tile((at + 1) % 2, next);
  }
  __device__ const uint4* tile(int i) const { return stages + (i - begin) % 2 * 2 * kTile; }

 private:
  __device__ void read(int first) { listed = tiles[min(first + static_cast<int>(threadIdx.x % 32), last)]; }
  __device__ void start_tile(int stage, int tile) const {
    uint4* const to = stages + stage * 2 * kTile;
    start<kHead, kStreamed, kThreads>(to, one, tile * kStreamed);
    start<kHead, kStreamed, kThreads>(to + kTile, other, tile * kStreamed);
  }
};

// Loads 16 rows and 16 columns as a left fragment.
template <int kHead>
__device__ inline void load_left(uint32_t (&out)[4], const uint4* tile, int row, int step) {
  const int lane = threadIdx.x % 32;
  load_matrices(out, tile + slot<kHead>(row + lane % 16, step * 2 + lane / 16));
}

// The same transposed, as two right fragments: a row of the tile becomes a column.
template <int kHead>
__device__ inline void load_columns(uint32_t (&out)[4], const uint4* tile, int row, int step) {
  const int lane = threadIdx.x % 32;
  load_matrices(out, tile + slot<kHead>(row + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
}

// The same, not transposed, as two right fragments of 8 columns each.
template <int kHead>
__device__ inline void load_rows(uint32_t (&out)[4], const uint4* tile, int row, int step) {
  const int lane = threadIdx.x % 32;
  load_transposed(out, tile + slot<kHead>(row + lane / 8 % 2 * 8 + lane % 8, step * 2 + lane / 16));
}

// Adds left * each of the two right fragments to two sums.
template <class Element>
__device__ inline void multiply_both(float (&first)[4], float (&second)[4], const uint32_t (&left)[4],
                                     const uint32_t (&right)[4]) {
  const uint32_t low[2] = {right[0], right[1]}, high[2] = {right[2], right[3]};
  multiply_add<Element>(first, left, low);
  multiply_add<Element>(second, left, high);
}

// Packs two sums, 16 x 16 together, into a left fragment.
template <class Element>
__device__ inline void pack(uint32_t (&out)[4], const float (&first)[4], const float (&second)[4]) {
  out[0] = narrow_two<Element>(first[0], first[1]);
  out[1] = narrow_two<Element>(first[2], first[3]);
  out[2] = narrow_two<Element>(second[0], second[1]);
  out[3] = narrow_two<Element>(second[2], second[3]);
}

// The left fragments of a warp's 16 rows: in registers, or in shared memory if registers are scarce.
template <int kHead, bool kInRegisters = true>
struct Kept {
  uint32_t held[kInRegisters ? kHead / 16 : 1][4];
  const uint4* tile;
  int row;

  __device__ void load(const uint4* from, int first) {
    tile = from;
    row = first;
    if constexpr (kInRegisters) {
#pragma unroll
      for (int step = 0; step < kHead / 16; ++step) load_left<kHead>(held[step], tile, row, step);
    }
  }
  // Returns the columns from 16 * step on.
  __device__ void get(uint32_t (&out)[4], int step) const {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[i] = held[step][i];
    } else {
      load_left<kHead>(out, tile, row, step);
    }
  }
};

// The visibility rules and biases of one head. Exponents are of 2.
template <class Element>
struct Seen {
  const Rules& rules;
  const Place& place;
  const int& tokens;
  float factor;  // applies to scores after `add`

  __device__ Seen(const Rules& given, const Place& where, const Sizes& sizes)
      : rules(given), place(where), tokens(sizes.tokens),
        factor(given.biased ? 1.f : given.scale * kLog2E) {}

  // Whether all of these queries see all of these keys.
  __device__ bool sees_all(int query, int queries, int key, int keys) const {
    return key + keys <= tokens && query - (key + keys - 1) >= rules.least &&
        query + queries - 1 - key <= rules.most;
  }

  // Adds the biases to sums of 16 x 8 kEights. The rows are queries, or keys with kKeysDown.
  template <bool kKeysDown, int kEights>
  __device__ void add(float (&scores)[kEights][4], int down, int across) const {
    const int lane = threadIdx.x % 32;
    const float* const key_bias = rules.key_bias + int64_t{place.batch} * tokens;
    const Element* const mask = static_cast<const Element*>(rules.mask) + place.batch * rules.mask_strides.batch +
        place.head * rules.mask_strides.head;
#pragma unroll
    for (int i = 0; i < 4 * kEights; ++i) {
      const int row = min(down + lane / 4 + i / 2 % 2 * 8, tokens - 1);
      const int column = min(across + i / 4 * 8 + lane % 4 * 2 + i % 2, tokens - 1);
      const int query = kKeysDown ? column : row, key = kKeysDown ? row : column;
      float bias = rules.key_bias != nullptr ? key_bias[key] : 0.f;
      if (rules.mask != nullptr) {
        const float found = float(mask[query * rules.mask_strides.token + key]);
        bias += !rules.multiply ? found : found == 0.f ? -INFINITY : 0.f;
      }
      scores[i / 4][i % 4] = fmaf(scores[i / 4][i % 4], rules.scale * kLog2E, bias * kLog2E);
    }
  }

  // Hides keys that the rules exclude.
  template <bool kKeysDown, int kEights>
  __device__ void hide(float (&scores)[kEights][4], int down, int across) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = down + lane / 4 + i * 8;
      // the first and the last visible column
      const int low = kKeysDown ? row + rules.least : row - rules.most;
      const int high = !kKeysDown ? min(row - rules.least, tokens - 1) : row < tokens ? row + rules.most : low - 1;
#pragma unroll
      for (int j = 0; j < 2 * kEights; ++j) {
        const int column = across + j / 2 * 8 + lane % 4 * 2 + j % 2;
        if (column < low || column > high) scores[j / 2][2 * i + j % 2] = -INFINITY;
      }
    }
  }
};

// Rounds and stores a warp's 16 rows. `tile` is shared memory of the warp's own rows.
template <int kHead, class Element>
__device__ inline void store(const Rows<Element>& rows, uint4* tile, int row, int first,
                             const float (&sums)[kHead / 8][4], float upper, float lower) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kHead / 8; ++n) {
    uint32_t* const high = reinterpret_cast<uint32_t*>(tile + slot<kHead>(row + lane / 4, n));
    uint32_t* const low = reinterpret_cast<uint32_t*>(tile + slot<kHead>(row + lane / 4 + 8, n));
    high[lane % 4] = narrow_two<Element>(sums[n][0] * upper, sums[n][1] * upper);
    low[lane % 4] = narrow_two<Element>(sums[n][2] * lower, sums[n][3] * lower);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kHead / 16; ++i) {
    const int down = (i * 32 + lane) / (kHead / 8), chunk = (i * 32 + lane) % (kHead / 8);
    if (first + down >= rows.sizes.tokens || chunk * 8 >= rows.sizes.columns) continue;
    *reinterpret_cast<uint4*>(rows.data + (first + down) * rows.stride + chunk * 8) =
        tile[slot<kHead>(row + down, chunk)];
  }
}

// Stores 16 unrounded rows of a share that will be joined. `part` is the slot's [rows, kHead].
template <int kHead>
__device__ inline void store_part(float* part, int row, const float (&sums)[kHead / 8][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kHead / 8; ++n) {
    float* const at = part + (row + lane / 4) * kHead + n * 8 + lane % 4 * 2;
    *reinterpret_cast<float2*>(at) = {sums[n][0], sums[n][1]};
    *reinterpret_cast<float2*>(at + 8 * kHead) = {sums[n][2], sums[n][3]};
  }
}

}  // namespace sparse
