// The kernels that quantize. A group that is aligned to 16 bytes is read once: threads hold it in registers
// between finding its extent and rounding. Other groups, and those too large for a block or cluster of
// blocks, are read a second time, from the cache. hipify turns this file into HIP unchanged.
#pragma once

#include <opkiln/whole_groups.h>

#include "sources.h"

namespace opkiln {
namespace quantizer {
namespace {

constexpr unsigned kMostThreads = 1024;
// units of a group that a thread holds, for groups that are not in whole_groups.h
constexpr uint32_t kAnyUnits = 4;

template <Scheme kScheme>
constexpr bool is_symmetric = kScheme != Scheme::kAsymmetric;

// What to compute from a group's elements. AnyMode reads it from the call at run time;
// LevelsMode fixes it at compile time, so that no unit has to check again.
struct AnyMode {
  static constexpr bool kFixed = false, kAtRandom = false;
  bool levels, stochastic;
  int bits;

  __device__ explicit AnyMode(const Work& work)
      : levels(work.to.values != nullptr),
        stochastic(work.random.stochastic),
        bits(work.format.bits) {}
};

template <int kBits, bool kStochastic>
struct LevelsMode {
  static constexpr bool kFixed = true, kAtRandom = kStochastic;
  static constexpr bool levels = true, stochastic = kStochastic;
  static constexpr int bits = kBits;

  __device__ explicit LevelsMode(const Work&) {}
};

// A group's position and size. A team without a group gets an empty
// one: another team may be writing in place where it would read.
struct Span {
  bool is_there;
  int64_t group, start;
  uint32_t limit;

  __device__ Span(const Launch& l, int64_t index) {
    is_there = l.first + index < l.last;
    group = is_there ? l.first + index : l.last - 1;
    start = group * l.work.format.group_size;
    const int64_t left = is_there ? l.work.numel - start : 0;
    limit = static_cast<uint32_t>(left < l.work.format.group_size ? left
                                                                  : l.work.format.group_size);
  }
  template <uint32_t kUnit>
  __device__ int count(uint32_t at) const {
    return static_cast<int>(limit - at > kUnit ? kUnit : limit - at);
  }
};

// Where a thread writes units, which are counted from element `start`.
struct Target {
  int64_t start;
  uint64_t offset;     // of the random words
  uint8_t* levels;     // the position of the levels from `start` on
  uint32_t bits_of_u;  // see random_number

  __device__ Target(const Work& work, int64_t first, int64_t lies_at, uint64_t random_offset)
      : start(first),
        offset(random_offset),
        levels(work.to.values + bytes_of(lies_at, work.format.bits)),
        bits_of_u(0x43000000u) {
#if defined(__CUDA_ARCH__)
    asm("" : "+r"(bits_of_u));  // kept in a register; a constant would be loaded each time
#endif
  }

  // The random words of the element at `at`.
  __device__ RandomWords random_at(uint32_t at, const RandomKeys<kRounds>& keys) const {
    return random_words(static_cast<uint64_t>(start + at) / kRandomElements, offset, keys);
  }
  // 128 plus sixteen_bits() below its point, for element k of the four that share a word.
  __device__ float random_number(uint32_t word, unsigned k) const {
    const unsigned bytes = k % 4 | (k + 1) % 4 << 4;
    return __uint_as_float(__byte_perm(word, bits_of_u, 0x7600 | bytes));
  }
};

// Rounds a unit and writes its levels if requested. Replaces the words by the dequantized elements or the
// errors if those are requested. Returns whether they are to be stored.
template <class Source, Scheme kScheme, bool kWhole>
__device__ bool emit(const Launch& l, const AnyMode& mode, const Target& target, uint32_t at,
                     int count, uint32_t* words, const Level& level) {
  using Type = typename Source::Type;
  constexpr bool kSymmetric = is_symmetric<kScheme>;
  constexpr int kUnit = Type::kUnit;
  const Work& work = l.work;
  float values[kUnit], rounded[kUnit];
  Type::widen(words, values);
  if (mode.stochastic) {
    const RandomWords random = target.random_at(at, l.keys);
    const auto first = static_cast<unsigned>(target.start + at) % kRandomElements / 4;
    uint32_t mine[kUnit / 4];
#pragma unroll
    for (unsigned i = 0; i < kUnit / 4; ++i) {
      mine[i] = random.at[i];
#pragma unroll
      for (unsigned k = i + 1; k < 4; ++k) {
        mine[i] = first + i == k ? random.at[k] : mine[i];
      }
    }
#pragma unroll
    for (int k = 0; k < kUnit; ++k) {
      rounded[k] = level.stochastic<kScheme>(level.divide_by_scale<kSymmetric>(values[k]),
                                             target.random_number(mine[k / 4], k));
    }
  } else {
#pragma unroll
    for (int k = 0; k < kUnit; ++k) {
      rounded[k] = level.nearest<kScheme>(level.divide_by_scale<kSymmetric>(values[k]));
    }
  }
  if (mode.levels) {
    const Levels levels = pack<kUnit, kSymmetric>(rounded, mode.bits, count, level.keep);
    store_levels<kUnit, kWhole>(levels, target.levels, at, count, mode.bits);
    if (!Source::kFeedback || work.error == nullptr) {
      return false;
    }
  }
#pragma unroll
  for (int k = 0; k < kUnit; ++k) {
    const float back = level.back<kSymmetric>(rounded[k] - kRounder);
    values[k] = Source::kFeedback ? values[k] - back : back;
  }
  Type::narrow(values, words);
  return true;
}

template <class Source>
__device__ void* output_of(const Work& work) {
  return Source::kFeedback ? static_cast<void*>(work.error) : work.out;
}

template <bool kSymmetric>
__device__ void store_level(const Work& work, int64_t place, const Level& level) {
  if (work.to.values != nullptr) {
    work.to.scales[place] = level.scale;
    if (!kSymmetric) {
      work.to.offsets[place] = level.offset;
    }
  }
}

// Rounds the 16 elements that start at `at`, and writes their levels.
template <class Type, Scheme kScheme, class Mode, class Held>
__device__ void emit_chunk(const Launch& l, const Target& target, uint32_t at, const Held* held,
                           const Level& level) {
  constexpr bool kSymmetric = is_symmetric<kScheme>;
  constexpr int kWords = Mode::bits / 2, kParts = 8 / Type::kUnit;
  RandomWords random{};
  if (Mode::stochastic) {
    random = target.random_at(at, l.keys);
  }
  uint32_t words[kWords];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float values[8];
#pragma unroll
    for (int c = 0; c < kParts; ++c) {
      Type::widen(held[half * kParts + c].words, values + c * Type::kUnit);
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const float scaled = level.divide_by_scale<kSymmetric>(values[k]);
      const float u = target.random_number(random.at[2 * half + k / 4], k);
      values[k] = Mode::stochastic ? level.stochastic<kScheme>(scaled, u)
                                   : level.nearest<kScheme>(scaled);
    }
    const Levels levels = pack<8, kSymmetric>(values, Mode::bits, 8, level.keep);
    words[half * kWords / 2] = levels.low;
    if (Mode::bits == 8) {
      words[half * kWords / 2 + 1] = levels.high;
    }
  }
  uint8_t* const to = target.levels + bytes_of(at, Mode::bits);
  if constexpr (Mode::bits == 8) {
    *reinterpret_cast<Sixteen*>(to) = {words[0], words[1], words[2], words[3]};
  } else {
    *reinterpret_cast<Levels*>(to) = {words[0], words[1]};
  }
}

// Stores two consecutive units of a thread. Pairs of threads swap units, so
// that each access of a pair covers 32 consecutive bytes. (Memory is written in
// such pieces; writes of half a piece reach 60 to 80% of the speed.)
template <class Type>
__device__ void store_pair(void* to, Place at, uint32_t (&first)[4], uint32_t (&second)[4]) {
  const bool odd = threadIdx.x % 2 != 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t other = exchange(odd ? first[i] : second[i], 1);
    (odd ? first[i] : second[i]) = other;
  }
  // Now the pair has the first thread's two units in `first`, and the second thread's in `second`.
  const int64_t mine = at.start + at.at;
  char* const start = static_cast<char*>(to) + (odd ? mine - 16 + Type::kUnit : mine) * Type::kBytes;
  *reinterpret_cast<Sixteen*>(start) = {first[0], first[1], first[2], first[3]};
  *reinterpret_cast<Sixteen*>(start + 16 * Type::kBytes) = {second[0], second[1], second[2],
                                                            second[3]};
}

// Rounds the 16 elements that start at `at`, in any mode.
template <class Source, Scheme kScheme, class Held>
__device__ void emit_parts(const Launch& l, const AnyMode& mode, const Target& target, uint32_t at,
                           Held* held, const Level& level) {
  using Type = typename Source::Type;
  constexpr int kUnit = Type::kUnit;
#pragma unroll
  for (int c = 0; c < kChunkElements / kUnit; c += 2) {
    const uint32_t here = at + c * kUnit, next = here + kUnit;
    uint32_t(&one)[4] = held[c].words;
    uint32_t(&two)[4] = held[c + 1].words;
    const bool wanted = emit<Source, kScheme, true>(l, mode, target, here, kUnit, one, level);
    emit<Source, kScheme, true>(l, mode, target, next, kUnit, two, level);
    if (wanted) {
      store_pair<Type>(output_of<Source>(l.work), {target.start, here}, one, two);
    }
  }
}

// Whether the scheme is the full one. Sources with feedback have no
// separate kernels for the symmetric scheme.
template <class Source, Scheme kScheme>
__device__ bool is_full(const Launch& l) {
  return kScheme == Scheme::kFull && (!Source::kFeedback || l.work.format.full);
}

// Blocks per multiprocessor, which limits the registers. With more,
// quantizing 16-bit elements was 1% slower on an H200.
template <class Source, class Mode>
constexpr int kBlocksPerProcessor = Mode::kFixed && Source::Type::kBytes == 2 ? 6 : 4;

// Groups in the layout of whole_groups.h.
template <class Source, Scheme kScheme, class Mode>
__global__ void __launch_bounds__(kGroupThreads, (kBlocksPerProcessor<Source, Mode>))
quantize_groups_kernel(const OPK_GRID_CONSTANT typename Source::Parameters parameters) {
  constexpr bool kSymmetric = is_symmetric<kScheme>;
  __shared__ Shared<Extent<typename Source::Type, kSymmetric>> shared;
  using Type = typename Source::Type;
  constexpr int kUnit = Type::kUnit, kParts = kChunkElements / kUnit;
  const Launch& l = Source::launch(parameters);
  const Mode mode(l.work);
  const bool full = is_full<Source, kScheme>(l);
  const unsigned lane = threadIdx.x % kWarp, log2_chunks = l.log2_chunks;
  begin_groups(log2_chunks, shared);
  const int64_t first = first_chunk();
  const int64_t start = (first - lane) * kChunkElements;
  const auto at = [&](int k) { return (k * kWarp + lane) * kChunkElements; };

  typename Source::Held held[kChunksPerThread][kParts];
#pragma unroll
  for (int k = 0; k < kChunksPerThread; ++k) {
#pragma unroll
    for (int c = 0; c < kParts; ++c) {
      Source::template load<true>(parameters, {start, at(k) + c * kUnit}, kUnit, held[k][c]);
    }
  }
  const uint64_t offset = mode.stochastic ? offset_of(l.work.random) : 0;
  Extent<Type, kSymmetric> extents[kChunksPerThread];
#pragma unroll
  for (int k = 0; k < kChunksPerThread; ++k) {
    extents[k] = Extent<Type, kSymmetric>::none();
#pragma unroll
    for (int c = 0; c < kParts; ++c) {
      extents[k].add(held[k][c].words);
    }
  }
  reduce_groups(extents, log2_chunks, shared);

  Level level = extents[0].level(mode.bits, mode.stochastic, full);
#pragma unroll
  for (int k = 0; k < kChunksPerThread; ++k) {
    if (k > 0 && log2_chunks <= 5) {
      level = extents[k].level(mode.bits, mode.stochastic, full);
    }
    const int64_t chunk = first + k * kWarp, group = chunk >> log2_chunks;
    const int64_t place = place_of(group, l.work.order);
    const Target target(l.work, start, start + (place - group) * l.work.format.group_size, offset);
    if constexpr (Mode::kFixed) {
      emit_chunk<Type, kScheme, Mode>(l, target, at(k), held[k], level);
    } else {
      emit_parts<Source, kScheme>(l, mode, target, at(k), held[k], level);
    }
    if (chunk == group << log2_chunks) {
      store_level<kSymmetric>(l.work, place, level);
    }
  }
}

template <class Source>
__device__ void load_any(const typename Source::Parameters& parameters, Place at, int count,
                         typename Source::Held& held) {
  if (Source::launch(parameters).aligned && count == Source::Type::kUnit) {
    Source::template load<true>(parameters, at, count, held);
  } else {
    Source::template load<false>(parameters, at, count, held);
  }
}

// The other groups. If units are aligned and the team's registers can hold the group, it is read once, and
// every thread loads: one without a unit of its own repeats the last.
template <class Source, Scheme kScheme>
__global__ void __launch_bounds__(kMostThreads)
quantize_any_kernel(const OPK_GRID_CONSTANT typename Source::Parameters parameters) {
  constexpr bool kSymmetric = is_symmetric<kScheme>;
  __shared__ Extent<typename Source::Type, kSymmetric> shared[kMostThreads / kWarp];
  using Type = typename Source::Type;
  constexpr uint32_t kUnit = Type::kUnit;
  const Launch& l = Source::launch(parameters);
  const AnyMode mode(l.work);
  const Team team(l.log2_team);
  const Span span(l, static_cast<int64_t>(blockIdx.x) * team.count + team.index);
  const uint32_t stride = team.size * kUnit, mine = team.lane * kUnit;
  const bool is_held =
      l.aligned && span.is_there && span.limit % kUnit == 0 && span.limit <= kAnyUnits * stride;
  auto extent = Extent<Type, kSymmetric>::none();
  typename Source::Held held[kAnyUnits];
  if (is_held) {
#pragma unroll
    for (uint32_t j = 0; j < kAnyUnits; ++j) {
      const uint32_t at = mine + j * stride, last = span.limit - kUnit;
      Source::template load<true>(parameters, {span.start, at < last ? at : last}, kUnit, held[j]);
    }
#pragma unroll
    for (uint32_t j = 0; j < kAnyUnits; ++j) {
      extent.add(held[j].words);
    }
  } else {
    for (uint32_t at = mine; at < span.limit; at += stride) {
      load_any<Source>(parameters, {span.start, at}, span.count<kUnit>(at), held[0]);
      extent.add(held[0].words);
    }
  }
  extent = reduce_team(extent, team, shared);
  if (!span.is_there) {
    return;
  }
  const Level level = extent.level(mode.bits, mode.stochastic, is_full<Source, kScheme>(l));
  const int64_t place = place_of(span.group, l.work.order);
  const uint64_t offset = mode.stochastic ? offset_of(l.work.random) : 0;
  const Target target(l.work, span.start, place * l.work.format.group_size, offset);
  void* const to = output_of<Source>(l.work);
  if (is_held) {
#pragma unroll
    for (uint32_t j = 0; j < kAnyUnits; ++j) {
      const uint32_t at = mine + j * stride;
      if (at < span.limit &&
          emit<Source, kScheme, true>(l, mode, target, at, kUnit, held[j].words, level)) {
        store_unit<Type, true>(held[j].words, to, {span.start, at}, kUnit);
      }
    }
  } else {
    for (uint32_t at = mine; at < span.limit; at += stride) {
      const int count = span.count<kUnit>(at);
      load_any<Source>(parameters, {span.start, at}, count, held[0]);
      if (emit<Source, kScheme, false>(l, mode, target, at, count, held[0].words, level)) {
        store_unit<Type, false>(held[0].words, to, {span.start, at}, count);
      }
    }
  }
  if (team.lane == 0) {
    store_level<kSymmetric>(l.work, place, level);
  }
}

}  // namespace
}  // namespace quantizer
}  // namespace opkiln
