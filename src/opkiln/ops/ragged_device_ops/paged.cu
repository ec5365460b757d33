// Copies keys and values into a paged cache, with rotary position embedding on the way.
//
// The heads of all tokens, queries first, form one row of units. A unit is both halves of some pairs, or the
// same number of elements to copy. A block has one unit per thread, from one token or many. It loads the
// units, meanwhile finds the places and angles of its tokens, and stores. If nothing is rotated, each thread
// has a unit of k and the same unit of v, and finds their place itself.

#include <opkiln/op.h>
#include <opkiln/sixteen_bytes.h>
#include <opkiln/device_index.h>

#include "paged.h"

namespace {

using opkiln::device::Sixteen;
using opkiln::device::store_once;
using paged::Cache;
using paged::Copy;
using paged::Element;
using paged::Heads;
using paged::Work;

constexpr int kThreads = 128;
// A token has at least three heads (q, k and v), so a block has at
// most a third as many tokens, plus two partial ones.
constexpr int kMostTokens = kThreads / 3 + 2;
// Rotated tokens have at least three heads with units of 8 pairs, and two tokens may be partial.
constexpr int kMostAngles = (kThreads * 8 / 3 + 2 * opkiln::kMostPairs + 3) / 4 * 4;

struct alignas(16) Angles {
  float cosines[kMostAngles], sines[kMostAngles];
};

// Units of aligned 16-byte accesses.
template <class T>
struct Packed {
  using Pack = Sixteen<T>;
  using Item = T;
  static constexpr int kPairs = Pack::kCount, kRest = 2 * Pack::kCount;
  Pack low, high;

  // Loads the unit's elements, which are at `at` and at `at + apart`.
  __device__ void load(const T* at, int apart) {
    low = *reinterpret_cast<const Pack*>(at);
    high = *reinterpret_cast<const Pack*>(at + apart);
  }
  __device__ void store(T* at, int apart) const {
    store_once(reinterpret_cast<Pack*>(at), low);
    store_once(reinterpret_cast<Pack*>(at + apart), high);
  }
  __device__ void rotate(const float* cosines, const float* sines) {
#pragma unroll
    for (int i = 0; i < kPairs; i += 4) {
      const Sixteen<float> c = *reinterpret_cast<const Sixteen<float>*>(cosines + i);
      const Sixteen<float> s = *reinterpret_cast<const Sixteen<float>*>(sines + i);
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const float a = low[i + j], b = high[i + j], x = low[i + j + 1], y = high[i + j + 1];
        low.set_two(i + j, a * c[j] - b * s[j], x * c[j + 1] - y * s[j + 1]);
        high.set_two(i + j, b * c[j] + a * s[j], y * c[j + 1] + x * s[j + 1]);
      }
    }
  }
};

// Units for any strides and addresses: one pair, or one element to copy.
template <class T>
struct Single {
  using Item = T;
  static constexpr int kPairs = 1, kRest = 1;
  T low, high;

  __device__ void load(const T* at, int apart) { low = at[0], high = at[apart]; }
  __device__ void store(T* at, int apart) const { at[0] = low, at[apart] = high; }
  __device__ void rotate(const float* c, const float* s) {
    const float a = float(low), b = float(high);
    low = T(a * *c - b * *s), high = T(b * *c + a * *s);
  }
};

__device__ inline float table_value(const void* table, int64_t at, Element element) {
  if (element == Element::kFloat) return static_cast<const float*>(table)[at];
  const uint16_t bits = static_cast<const uint16_t*>(table)[at];
  return element == Element::kFloat16 ? opk::bits::half_to_float(bits)
                                      : opk::bits::to_float(uint32_t{bits} << 16);
}

__device__ inline void find_angle(const Work& work, int given, int pair, float* c, float* s) {
  const int64_t position = given < 0 ? 0 : given;
  if (!work.cos) {
    opkiln::cos_sin(static_cast<uint64_t>(position) * work.frequencies.turns[pair], c, s);
  } else if (position >= work.table_positions) {
    opkiln::device::trap();
  } else {
    *c = table_value(work.cos, position * work.cos_row + pair, work.angles);
    *s = table_value(work.sin, position * work.sin_row + pair, work.angles);
  }
}

// A token's block in the cache, and its place there. The block is -1 for padding.
__device__ inline int2 find_place(const Copy& work, int sequence, int position) {
  if (sequence < 0 || position < 0) return make_int2(-1, 0);
  const int of_sequence = position / work.block_size;
  if (sequence >= work.batch || of_sequence >= work.sequence_blocks) opkiln::device::trap();
  const int block = work.table[sequence * work.table_row + of_sequence];
  if (block < 0 || block >= work.blocks) opkiln::device::trap();
  return make_int2(block, position - of_sequence * work.block_size);
}

// The number of units per head and per token, and where this block begins.
template <class Unit>
struct Units {
  int rotated, a_head, a_token;
  int first_token, in_token;

  __device__ explicit Units(const Work& work)
      : rotated(work.pairs / Unit::kPairs),
        a_head(rotated + (work.head - 2 * work.pairs) / Unit::kRest),
        a_token((work.q.heads + 2 * work.k.heads) * a_head) {
    const int64_t start = int64_t{blockIdx.x} * kThreads;
    first_token = static_cast<int>(opkiln::device::divide(start, a_token));
    in_token = static_cast<int>(start - int64_t{first_token} * a_token);
  }
};

// The elements of a unit: from `first`, and from `first + apart`.
template <class Unit>
struct Spot {
  int token, head, first, apart;
  bool is_rotated;  // applies unless the head belongs to v

  __device__ Spot(const Work& work, const Units<Unit>& units) {
    const uint32_t at = units.in_token + threadIdx.x;
    const uint32_t more = at / static_cast<uint32_t>(units.a_token), left = at - more * units.a_token;
    token = units.first_token + static_cast<int>(more);
    head = static_cast<int>(left / static_cast<uint32_t>(units.a_head));
    const int unit = static_cast<int>(left) - head * units.a_head;
    is_rotated = unit < units.rotated;
    first = is_rotated ? unit * Unit::kPairs : 2 * work.pairs + (unit - units.rotated) * Unit::kRest;
    apart = is_rotated ? work.pairs : Unit::kRest / 2;
  }
};

template <class Unit>
__global__ void __launch_bounds__(kThreads) paged_kernel(const OPK_GRID_CONSTANT Work work) {
  opk::wait_for_previous();
  using T = typename Unit::Item;
  __shared__ int2 places[kMostTokens];
  __shared__ Angles angles;
  const Units<Unit> units(work);
  const Spot<Unit> spot(work, units);
  const bool is_there = spot.token < work.tokens;
  const int behind = units.first_token + (units.in_token + kThreads + units.a_token - 1) / units.a_token;
  const int tokens = (behind < work.tokens ? behind : work.tokens) - units.first_token;
  const int32_t *const sequences = work.sequences + units.first_token, *const positions = work.positions + units.first_token;
  // Loaded before the heads, because the angles' table lookups depend on them.
  const int rank = threadIdx.x;
  int sequence = 0, place = 0, position = 0;
  if (rank < tokens) sequence = sequences[rank], place = positions[rank];
  if (rank < tokens * work.pairs) position = positions[rank / work.pairs];
  const int key = spot.head - work.q.heads, value = key - work.k.heads;
  Unit held;
  if (is_there) {
    const Heads& from = key < 0 ? work.q : value < 0 ? work.k : work.v;
    const int head = key < 0 ? spot.head : value < 0 ? key : value;
    const T* const at = static_cast<const T*>(from.x) + spot.token * from.token + head * from.head;
    held.load(at + spot.first, spot.apart);
  }

  if (rank < tokens) places[rank] = find_place(work, sequence, place);
  for (int i = rank; i < tokens * work.pairs; i += kThreads) {
    const int token = i / work.pairs;
    find_angle(work, i == rank ? position : positions[token], i - token * work.pairs, angles.cosines + i,
               angles.sines + i);
  }
  __syncthreads();

  if (!is_there) return;
  const int token = spot.token - units.first_token;
  if (spot.is_rotated && value < 0) {
    const int angle = token * work.pairs + spot.first;
    held.rotate(angles.cosines + angle, angles.sines + angle);
  }
  if (key < 0) {
    const int64_t at = (int64_t{spot.token} * work.q.heads + spot.head) * work.head;
    held.store(static_cast<T*>(work.q_out) + at + spot.first, spot.apart);
  } else if (places[token].x >= 0) {
    const Cache& cache = value < 0 ? work.k_cache : work.v_cache;
    const int64_t at = places[token].x * cache.block + places[token].y * cache.place +
        (value < 0 ? key : value) * cache.head;
    held.store(static_cast<T*>(cache.data) + at + spot.first, spot.apart);
  }
}

// A unit is one element T, or several.
template <class T, class Unit>
__global__ void __launch_bounds__(kThreads) paged_copy_kernel(const OPK_GRID_CONSTANT Copy work) {
  opk::wait_for_previous();
  constexpr int kWidth = sizeof(Unit) / sizeof(T);
  const int a_head = work.head / kWidth, a_token = work.k.heads * a_head;
  const int64_t unit = int64_t{blockIdx.x} * kThreads + threadIdx.x, token = opkiln::device::divide(unit, a_token);
  if (token >= work.tokens) return;
  const int in_token = static_cast<int>(unit - token * a_token), head = in_token / a_head;
  const int column = (in_token - head * a_head) * kWidth;
  const auto from = [&](const Heads& heads) {
    return static_cast<const T*>(heads.x) + token * heads.token + head * heads.head + column;
  };
  const int sequence = work.sequences[token], position = work.positions[token];
  const Unit k = *reinterpret_cast<const Unit*>(from(work.k));
  const Unit v = *reinterpret_cast<const Unit*>(from(work.v));
  const int2 place = find_place(work, sequence, position);
  if (place.x < 0) return;
  const auto to = [&](const Cache& cache) {
    return static_cast<T*>(cache.data) + place.x * cache.block + place.y * cache.place + head * cache.head + column;
  };
  store_once(reinterpret_cast<Unit*>(to(work.k_cache)), k);
  store_once(reinterpret_cast<Unit*>(to(work.v_cache)), v);
}

__global__ void __launch_bounds__(kThreads) lists_kernel(const OPK_GRID_CONSTANT paged::Lists work) {
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= work.entries) return;
  const int64_t row = at / work.width;
  const int block = static_cast<int>(at - row * work.width);
  const bool is_used = int64_t{block} * work.block_size < work.lengths[row];
  work.table[at] = is_used ? reinterpret_cast<const int32_t*>(work.lists[row])[block] : -1;
}

bool is_packed(const void* data, int64_t strides, int64_t width) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && strides % width == 0;
}

template <class T>
void launch(const Work& work) {
  constexpr int64_t kWidth = Sixteen<T>::kCount;
  bool packed =
      work.pairs % kWidth == 0 && (work.head - 2 * work.pairs) % (work.pairs ? 2 * kWidth : kWidth) == 0;
  for (const Heads* each : {&work.q, &work.k, &work.v}) {
    packed = packed && (each->heads == 0 || is_packed(each->x, each->token | each->head, kWidth));
  }
  for (const Cache* each : {&work.k_cache, &work.v_cache}) {
    packed = packed && is_packed(each->data, each->block | each->place | each->head, kWidth);
  }
  const auto blocks = [](int64_t units) { return (units + kThreads - 1) / kThreads; };
  if (work.pairs == 0) {
    const int64_t units = int64_t{work.tokens} * work.k.heads * (packed ? work.head / kWidth : work.head);
    const Copy& copy = work;
    return opk::launch_overlapping(packed ? paged_copy_kernel<T, Sixteen<T>> : paged_copy_kernel<T, T>, blocks(units), kThreads, 0,
                       copy);
  }
  const int64_t a_head = packed ? work.head / (2 * kWidth) : work.head - work.pairs;
  const int64_t units = (work.q.heads + 2 * int64_t{work.k.heads}) * a_head * work.tokens;
  opk::launch_overlapping(packed ? paged_kernel<Packed<T>> : paged_kernel<Single<T>>, blocks(units), kThreads, 0, work);
}

}  // namespace

void paged::run(const Work& work) {
  switch (work.element) {
    case Element::kFloat: return launch<float>(work);
    case Element::kFloat16: return launch<opk::half>(work);
    case Element::kBFloat16: return launch<opk::bfloat16>(work);
  }
}

void paged::run(const Lists& lists) {
  opk::launch(lists_kernel, (lists.entries + kThreads - 1) / kThreads, kThreads, 0, lists);
}

OPKILN_OP(paged::listed_blocks, cuda);
OPKILN_OP(paged::paged_kv_copy, cuda);
OPKILN_OP(paged::paged_kv_rotary, cuda);
