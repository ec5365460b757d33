// Rotary position embedding on a GPU.
//
// A block has a few tokens. Its threads are units of a head (x), heads (y) and tokens (z). Each
// thread has the same unit of several heads, and loads them all before it waits for the cosines
// and sines, which the block computes once per token and pair, in shared memory. One thread has
// both elements of a pair, so the result may overwrite the input.

#include <opkiln/op.h>
#include <opkiln/sixteen_bytes.h>
#include <opkiln/device_index.h>

#include "rotary.h"

namespace {

using opkiln::device::Sixteen;
using rotary::Side;
using rotary::Work;

constexpr int kThreads = 128;
constexpr int kGroups = 4;  // of tokens, for a block that looks ahead for its angles
#if defined(OPKILN_EMULATED)
constexpr int64_t kManyGroups = 8;
#else
constexpr int64_t kManyGroups = 4096;  // enough for all blocks of a large GPU
#endif
constexpr int kHeads = 4;  // per thread: with two halves of sixteen bytes each, 128 bytes are in flight

// A unit that a thread rotates or copies at once: pairs in 16-byte accesses.
template <class T, bool kInterleaved>
struct Packed {
  using Pack = Sixteen<T>;
  static constexpr int kRest = Pack::kCount;  // elements per copied unit
  static constexpr int kPairs = kInterleaved ? kRest / 2 : kRest;
  Pack low, high;  // the two halves; interleaved pairs are in `low` alone

  __device__ void load(const Work& work, const T* head, int64_t, int unit, int rotated) {
    if (unit >= rotated) {
      low = *reinterpret_cast<const Pack*>(head + 2 * work.pairs + (unit - rotated) * kRest);
    } else {
      low = *reinterpret_cast<const Pack*>(head + unit * kRest);
      if (!kInterleaved) high = *reinterpret_cast<const Pack*>(head + work.pairs + unit * kRest);
    }
  }

  __device__ void store(const Work& work, T* head, int64_t, int unit, int rotated, const float* c,
                        const float* s) {
    if (unit >= rotated) {
      *reinterpret_cast<Pack*>(head + 2 * work.pairs + (unit - rotated) * kRest) = low;
      return;
    }
    if (kInterleaved) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const float a = low[2 * i], b = low[2 * i + 1];
        low.set_two(2 * i, a * c[i] - b * s[i], b * c[i] + a * s[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPairs; i += 2) {
        const float a = low[i], b = high[i], x = low[i + 1], y = high[i + 1];
        low.set_two(i, a * c[i] - b * s[i], x * c[i + 1] - y * s[i + 1]);
        high.set_two(i, b * c[i] + a * s[i], y * c[i + 1] + x * s[i + 1]);
      }
      *reinterpret_cast<Pack*>(head + work.pairs + unit * kRest) = high;
    }
    *reinterpret_cast<Pack*>(head + unit * kRest) = low;
  }
};

// Units for any strides and addresses: one pair, or one element to copy.
template <class T>
struct Single {
  static constexpr int kPairs = 1, kRest = 1;
  T a, b;

  __device__ static int64_t first(const Work& work, int unit) { return work.interleaved ? 2 * unit : unit; }
  __device__ static int64_t apart(const Work& work) { return work.interleaved ? 1 : work.pairs; }

  __device__ void load(const Work& work, const T* head, int64_t step, int unit, int rotated) {
    if (unit >= rotated) {
      a = head[(work.pairs + unit) * step];
    } else {
      a = head[first(work, unit) * step];
      b = head[(first(work, unit) + apart(work)) * step];
    }
  }
  __device__ void store(const Work& work, T* head, int64_t step, int unit, int rotated, const float* c,
                        const float* s) {
    if (unit >= rotated) {
      head[(work.pairs + unit) * step] = a;
    } else {
      const float x = float(a), y = float(b);
      head[first(work, unit) * step] = T(x * *c - y * *s);
      head[(first(work, unit) + apart(work)) * step] = T(y * *c + x * *s);
    }
  }
};

// Loads an element of a table as bits. table_float() converts it later, so that the load does not block.
__device__ inline uint32_t table_bits(const void* table, int64_t at, rotary::Element element) {
  return element == rotary::Element::kFloat ? static_cast<const uint32_t*>(table)[at]
                                            : static_cast<const uint16_t*>(table)[at];
}
__device__ inline float table_float(uint32_t bits, rotary::Element element) {
  if (element == rotary::Element::kFloat) return __uint_as_float(bits);
  return element == rotary::Element::kFloat16 ? opk::bits::half_to_float(static_cast<uint16_t>(bits))
                                              : __uint_as_float(bits << 16);
}

__device__ inline void find_angle(const Work& work, int64_t position, int pair, float* c, float* s) {
  if (work.cos && (position < 0 || position >= work.table_rows)) opkiln::device::trap();
  rotary::cos_sin_of(work, position, pair, c, s);
}

// A thread's unit of up to kHeads heads of one token.
template <class T, class Unit>
struct Heads {
  const Work& work;
  bool there;
  int64_t batch, seq;
  int head, unit, rotated;  // the first head; this unit, and how many are rotated
  Unit held[kHeads];

  __device__ void load() {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int h = head + i * static_cast<int>(blockDim.y);
      if (there && h < work.q.heads + work.k.heads) {
        const bool of_q = h < work.q.heads;
        const Side& side = of_q ? work.q : work.k;
        const int64_t at = batch * side.batch + seq * side.seq + (of_q ? h : h - work.q.heads) * side.head;
        held[i].load(work, static_cast<const T*>(side.x) + at, side.step, unit, rotated);
      }
    }
  }

  // `angles`: in shared memory.
  __device__ void rotate_and_store(const float* angles) {
    float c[Unit::kPairs], s[Unit::kPairs];
    if (there && unit < rotated) {
      const float* const place = angles + 2 * threadIdx.z * work.pairs + unit * Unit::kPairs;
#pragma unroll
      for (int i = 0; i < Unit::kPairs; ++i) {
        c[i] = place[i];
        s[i] = place[work.pairs + i];
      }
    }
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int h = head + i * static_cast<int>(blockDim.y);
      if (there && h < work.q.heads + work.k.heads) {
        const bool of_q = h < work.q.heads;
        const Side& side = of_q ? work.q : work.k;
        const int64_t at =
            batch * side.out_batch + seq * side.out_seq + (of_q ? h : h - work.q.heads) * side.out_head;
        held[i].store(work, static_cast<T*>(side.out) + at, side.out_step, unit, rotated, c, s);
      }
    }
  }
};

// The angle that a thread takes from the tables, in two loads, each begun a group of tokens before it is used. A load
// that waits for its address would queue behind the loads of heads of all blocks: the kernel took 1.15 times as long.
struct Ahead {
  bool there;
  int64_t position;
  uint32_t cosine, sine;

  __device__ void find(const Work& work, int64_t token) {
    there = token < work.tokens;
    if (there) position = rotary::position_of(work, static_cast<int>(token) / work.seq, static_cast<int>(token) % work.seq);
  }
  __device__ void load(const Work& work, int pair) {
    if (!there) return;
    if (position < 0 || position >= work.table_rows) opkiln::device::trap();
    cosine = table_bits(work.cos, position * work.cos_row + pair, work.table);
    sine = table_bits(work.sin, position * work.sin_row + pair, work.table);
  }
  __device__ void put(const Work& work, float* place) const {
    if (!there) return;
    const float s = table_float(sine, work.table);
    place[0] = table_float(cosine, work.table);
    place[work.pairs] = work.inverse ? -s : s;
  }
};

// Rotates by tables at given positions, many tokens. No thread has more than one angle or kHeads heads.
template <class T, bool kInterleaved>
__global__ void __launch_bounds__(kThreads, 5) ahead_kernel(const OPK_GRID_CONSTANT Work work) {
  opk::wait_for_previous();
  using Unit = Packed<T, kInterleaved>;
  extern __shared__ float angles[];
  const int rotated = work.pairs / Unit::kPairs, units = rotated + work.rest / Unit::kRest;
  const int rank = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x, pair = rank % work.pairs;
  const int step = static_cast<int>(gridDim.x * blockDim.z);
  const int mine = rank < static_cast<int>(blockDim.z) * work.pairs ? rank / work.pairs : work.tokens;
  int64_t first = int64_t{blockIdx.x} * blockDim.z;
  Ahead now, next;
  now.find(work, first + mine);
  next.find(work, first + mine + step);
  now.load(work, pair);
  for (; first < work.tokens; first += step) {
    const bool there = first + threadIdx.z < work.tokens && static_cast<int>(threadIdx.x) < units;
    const int token = there ? static_cast<int>(first + threadIdx.z) : 0;
    Heads<T, Unit> heads{work, there, token / work.seq, token % work.seq, static_cast<int>(threadIdx.y),
                         static_cast<int>(threadIdx.x), rotated};
    heads.load();
    __syncthreads();  // nobody uses the last angles any more
    now.put(work, angles + 2 * (rank / work.pairs) * work.pairs + pair);
    now = next;
    now.load(work, pair);
    next.find(work, first + mine + 2 * int64_t{step});
    __syncthreads();
    heads.rotate_and_store(angles);
  }
}

template <class T, class Unit>
__device__ inline void rotate(const Work& work) {
  extern __shared__ float angles[];  // per token: the cosines of its pairs, then the sines
  const int rotated = work.pairs / Unit::kPairs;
  const int units = rotated + work.rest / Unit::kRest;
  const int heads = work.q.heads + work.k.heads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.z;
  const bool has_token = first + threadIdx.z < work.tokens;
  const int token = has_token ? static_cast<int>(first + threadIdx.z) : 0;
  const int64_t batch = token / work.seq, seq = token % work.seq;
  const int step = static_cast<int>(blockDim.y) * kHeads;
  const int turns = (units + blockDim.x - 1) / blockDim.x * ((heads + step - 1) / step);

  // Loads the position of each thread's first angle before the heads, so that it arrives first. Without a
  // tensor of positions, the angle is loaded from its table at once.
  const int threads = blockDim.x * blockDim.y * blockDim.z;
  const int rank = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const int angle_token = static_cast<int>(first) + rank / work.pairs;
  const bool has_angle = rank < static_cast<int>(blockDim.z) * work.pairs && angle_token < work.tokens;
  const bool early = has_angle && work.cos && !work.positions;
  int64_t position = 0;
  uint32_t cosine = 0, sine = 0;
  if (has_angle) {
    position = rotary::position_of(work, angle_token / work.seq, angle_token % work.seq);
  }
  if (early) {
    cosine = table_bits(work.cos, position * work.cos_row + rank % work.pairs, work.table);
    sine = table_bits(work.sin, position * work.sin_row + rank % work.pairs, work.table);
  }

  int unit = threadIdx.x, head = threadIdx.y;
  for (int turn = 0; turn < turns; ++turn) {
    Heads<T, Unit> here{work, has_token && unit < units, batch, seq, head, unit, rotated};
    here.load();
    if (turn == 0) {
      float* const place = angles + 2 * (rank / work.pairs) * work.pairs + rank % work.pairs;
      if (early) {
        const float s = table_float(sine, work.table);
        place[0] = table_float(cosine, work.table);
        place[work.pairs] = work.inverse ? -s : s;
      } else if (has_angle) {
        find_angle(work, position, rank % work.pairs, place, place + work.pairs);
      }
      for (int i = rank + threads; i < static_cast<int>(blockDim.z) * work.pairs; i += threads) {
        const int z = i / work.pairs, pair = i - z * work.pairs;
        if (first + z < work.tokens) {
          const int other = static_cast<int>(first) + z;
          const int64_t position = rotary::position_of(work, other / work.seq, other % work.seq);
          float* const place = angles + 2 * z * work.pairs + pair;
          find_angle(work, position, pair, place, place + work.pairs);
        }
      }
      __syncthreads();
    }
    here.rotate_and_store(angles);
    unit += blockDim.x;
    if (unit - static_cast<int>(threadIdx.x) >= units) {
      unit = threadIdx.x;
      head += step;
    }
  }
}

template <class T, bool kInterleaved>
__global__ void __launch_bounds__(kThreads) packed_kernel(const OPK_GRID_CONSTANT Work work) {
  opk::wait_for_previous();
  rotate<T, Packed<T, kInterleaved>>(work);
}

template <class T>
__global__ void __launch_bounds__(kThreads) single_kernel(const OPK_GRID_CONSTANT Work work) {
  opk::wait_for_previous();
  rotate<T, Single<T>>(work);
}

// Whether all units are whole 16-byte accesses and aligned.
bool is_packed(const Side& side, int64_t width) {
  if (side.heads == 0) return true;
  const int64_t strides = side.batch | side.seq | side.head | side.out_batch | side.out_seq | side.out_head;
  const size_t addresses = reinterpret_cast<size_t>(side.x) | reinterpret_cast<size_t>(side.out);
  return side.step == 1 && side.out_step == 1 && strides % width == 0 && addresses % 16 == 0;
}

template <class T>
void launch(const Work& work) {
  constexpr int64_t kWidth = Sixteen<T>::kCount;
  const int64_t pairs = work.interleaved ? kWidth / 2 : kWidth;
  const bool packed = is_packed(work.q, kWidth) && is_packed(work.k, kWidth) && work.pairs % pairs == 0 &&
                      work.rest % kWidth == 0;
  const int64_t units = packed ? work.pairs / pairs + work.rest / kWidth : work.pairs + work.rest;
  const int64_t heads = work.q.heads + work.k.heads;
  // With few tokens, use more threads per token, so that none waits for several loads in sequence.
  const int64_t tokens = work.tokens;
  const int64_t wanted = tokens < 512 ? heads : (heads + kHeads - 1) / kHeads;
  const int64_t x = units < kThreads ? units : kThreads;
  const int64_t y = wanted < kThreads / x ? wanted : kThreads / x;
  int64_t z = tokens < 512 ? 1 : kThreads / (x * y);
  if (z > 64) z = 64;  // CUDA's limit
  const size_t shared = static_cast<size_t>(2 * z * work.pairs) * sizeof(float);
  const int64_t groups = (tokens + z - 1) / z;
  if (packed && work.cos && work.positions && groups >= kManyGroups && units <= x && heads <= y * kHeads &&
      work.pairs <= x * y) {
    return opk::launch_overlapping(work.interleaved ? ahead_kernel<T, true> : ahead_kernel<T, false>,
                                   (groups + kGroups - 1) / kGroups, {x, y, z}, shared, work);
  }
  opk::launch_overlapping(!packed ? single_kernel<T> : work.interleaved ? packed_kernel<T, true> : packed_kernel<T, false>,
              groups, {x, y, z}, shared, work);
}

}  // namespace

void rotary::run(const Work& work) {
  OPK_ELEMENT(work.element, T, (float, opk::bfloat16, opk::half), launch<T>(work));
}

OPKILN_OP(rotary::rotary, cuda);
OPKILN_OP(rotary::rotary_, cuda);
OPKILN_OP(rotary::rotary_qk, cuda);
OPKILN_OP(rotary::rotary_qk_, cuda);
