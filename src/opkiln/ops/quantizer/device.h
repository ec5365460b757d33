// The kernels. A whole group at an address that allows accesses of 16 bytes is read once: its team of
// threads holds it in registers between finding its extent and rounding. Other groups, which are few
// or rare, are read a second time, from the cache. No torch header; hipify turns this into HIP as it
// is.
#pragma once

#include <opkiln/group_reduce.h>
#include <opkiln/launch.h>

#include "sources.h"

namespace opkiln {
namespace quantizer {
namespace {

constexpr unsigned kMostThreads = 1024;

// The extent of a group, or of as much of it as a thread has seen.
template <class Type, bool kSymmetric>
struct Extent;

template <class Type>
struct Extent<Type, true> {
  uint32_t most;  // magnitude

  __device__ static Extent none() {
    return {0};
  }
  __device__ void add(const uint32_t* words) {
    absorb({Type::magnitude(words)});
  }
  __device__ Extent exchanged(unsigned bits) const {
    return {exchange(most, bits)};
  }
  __device__ void absorb(const Extent& other) {
    most = Type::greater(most, other.most);
  }
  __device__ Level level(int bits, bool stochastic) const {
    return Level::symmetric(Type::widen_magnitude(most), bits, stochastic);
  }
};

template <class Type>
struct Extent<Type, false> {
  float least, greatest;

  __device__ static Extent none() {
    return {kInfinity, -kInfinity};
  }
  __device__ void add(const uint32_t* words) {
    float values[Type::kUnit];
    Type::widen(words, values);
    float odd = 0;
#pragma unroll
    for (int k = 0; k < Type::kUnit; ++k) {
      least = fminf(least, values[k]);
      greatest = fmaxf(greatest, values[k]);
      odd = fmaf(values[k], 0.0f, odd);  // NaN as soon as an element is not finite
    }
    greatest = odd == 0 ? greatest : kInfinity;  // fminf and fmaxf pass over NaN
  }
  __device__ Extent exchanged(unsigned bits) const {
    return {exchange(least, bits), exchange(greatest, bits)};
  }
  __device__ void absorb(const Extent& other) {
    least = fminf(least, other.least);
    greatest = fmaxf(greatest, other.greatest);
  }
  __device__ Level level(int bits, bool stochastic) const {
    return Level::asymmetric(least, greatest, bits, stochastic);
  }
};

// What is made of a group's elements. Asked of the call as the kernel runs, or fixed when it is
// compiled: then no unit asks again.
struct AnyMode {
  bool levels, stochastic;
  int bits;

  __device__ explicit AnyMode(const Work& work)
      : levels(work.to.values != nullptr),
        stochastic(work.random.stochastic),
        bits(work.format.bits) {}
};

template <int kBits, bool kStochastic>
struct LevelsMode {
  static constexpr bool levels = true, stochastic = kStochastic;
  static constexpr int bits = kBits;

  __device__ explicit LevelsMode(const Work&) {}
};

// A group: where it starts, and how many elements it has; none where there is no such group.
template <bool kWhole>
struct Span {
  int64_t group, start;
  int limit;

  __device__ Span(const Launch& l, int64_t index)
      : group(l.first + index), start(group * l.work.format.group_size), limit(0) {
    if (group < l.last) {
      const int64_t left = l.work.numel - start;
      limit = kWhole || left > l.work.format.group_size ? l.work.format.group_size
                                                        : static_cast<int>(left);
    }
  }
  __device__ Place place(int at) const {
    return {start, static_cast<uint32_t>(at)};
  }
  template <int kUnit>
  __device__ int count(int at) const {
    return kWhole || limit - at > kUnit ? kUnit : limit - at;
  }
};

// What a thread needs of a group to write its units.
struct Target {
  int64_t start;       // of the group
  uint64_t chunk;      // that it starts with: random words are counted in chunks
  uint64_t offset;     // of random words
  uint8_t* levels;     // where those of the group lie
  uint32_t bits_of_u;  // see emit

  template <class Span>
  __device__ Target(const Work& work, const Span& span, int64_t place, uint64_t random_offset)
      : start(span.start),
        chunk(static_cast<uint64_t>(span.start) / kChunk),
        offset(random_offset),
        levels(work.to.values + bytes_of(place * work.format.group_size, work.format.bits)),
        bits_of_u(0x43000000u) {
#if defined(__CUDA_ARCH__)
    asm("" : "+r"(bits_of_u));  // kept in a register: as a constant it is moved there each time
#endif
  }
};

// Rounds a unit and writes what is wanted of it.
template <class Source, bool kSymmetric, bool kWhole, class Mode>
__device__ void emit(const Launch& l, const Mode& mode, const Target& target, int at, int count,
                     const uint32_t* words, const Level& level) {
  using Type = typename Source::Type;
  constexpr int kUnit = Type::kUnit;
  const Work& work = l.work;
  float values[kUnit], rounded[kUnit];
  Type::widen(words, values);
  if (mode.stochastic) {
    RandomWords random =
        random_words(target.chunk + static_cast<unsigned>(at) / kChunk, target.offset, l.keys);
    if (kUnit < kChunk && at % kChunk != 0) {
      random.at[0] = random.at[2];
      random.at[1] = random.at[3];
    }
#pragma unroll
    for (int k = 0; k < kUnit; ++k) {
      // 128 and 16 bits below its point.
      const uint32_t u =
          __byte_perm(random.at[k / 2], target.bits_of_u, k % 2 == 0 ? 0x7610 : 0x7632);
      rounded[k] =
          level.stochastic<kSymmetric>(level.scaled<kSymmetric>(values[k]), __uint_as_float(u));
    }
  } else {
#pragma unroll
    for (int k = 0; k < kUnit; ++k) {
      rounded[k] = level.nearest(level.scaled<kSymmetric>(values[k]));
    }
  }
  if (mode.levels) {
    const Levels levels = pack<kUnit, kSymmetric>(rounded, mode.bits, count, level.keep);
    store_levels<kUnit, kWhole>(levels, target.levels, at, count, mode.bits);
    if (!Source::kFeedback || work.error == nullptr) {
      return;
    }
  }
#pragma unroll
  for (int k = 0; k < kUnit; ++k) {
    const float back = level.back<kSymmetric>(rounded[k] - kRounder);
    values[k] = Source::kFeedback ? values[k] - back : back;
  }
  void* const to = Source::kFeedback ? static_cast<void*>(work.error) : work.out;
  store_unit<Type, kWhole>(values, to, {target.start, static_cast<uint32_t>(at)}, count);
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

// A team takes kGroups groups at a time, of which each thread holds kUnits units: several independent
// accesses of 16 bytes are in flight in every thread. All loads come first.
template <class Source, int kGroups, int kUnits, bool kSymmetric, class Mode>
__global__ void __launch_bounds__(kMostThreads)
quantize_kernel(const OPKILN_GRID_CONSTANT typename Source::Parameters parameters) {
  __shared__ Extent<typename Source::Type, kSymmetric> shared[kMostThreads / kWarp];
  using Type = typename Source::Type;
  constexpr int kUnit = Type::kUnit;
  const Launch& l = Source::launch(parameters);
  const Mode mode(l.work);
  const Team team(l.log2_team);
  typename Source::Held held[kGroups][kUnits];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kGroups * team.count + team.index;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const Span<true> span(l, first + static_cast<int64_t>(g) * team.count);
#pragma unroll
    for (int c = 0; c < kUnits; ++c) {
      const int at = static_cast<int>(team.lane + c * team.size) * kUnit;
      if (at < span.limit) {
        Source::template load<true>(parameters, span.place(at), kUnit, held[g][c]);
      }
    }
  }
  const uint64_t offset = mode.stochastic ? offset_of(l.work.random) : 0;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const Span<true> span(l, first + static_cast<int64_t>(g) * team.count);
    auto extent = Extent<Type, kSymmetric>::none();
#pragma unroll
    for (int c = 0; c < kUnits; ++c) {
      if (static_cast<int>(team.lane + c * team.size) * kUnit < span.limit) {
        extent.add(held[g][c].words);
      }
    }
    extent = reduce_team(extent, team, shared);
    if (span.limit == 0) {
      continue;
    }
    const Level level = extent.level(mode.bits, mode.stochastic);
    const int64_t place = place_of(span.group, l.work.order);
    const Target target(l.work, span, place, offset);
#pragma unroll
    for (int c = 0; c < kUnits; ++c) {
      const int at = static_cast<int>(team.lane + c * team.size) * kUnit;
      if (at < span.limit) {
        emit<Source, kSymmetric, true>(l, mode, target, at, kUnit, held[g][c].words, level);
      }
    }
    if (team.lane == 0) {
      store_level<kSymmetric>(l.work, place, level);
    }
  }
}

// Any group at any address, read twice.
template <class Source, bool kSymmetric>
__global__ void __launch_bounds__(kMostThreads)
quantize_any_kernel(const OPKILN_GRID_CONSTANT typename Source::Parameters parameters) {
  __shared__ Extent<typename Source::Type, kSymmetric> shared[kMostThreads / kWarp];
  using Type = typename Source::Type;
  constexpr int kUnit = Type::kUnit;
  const Launch& l = Source::launch(parameters);
  const AnyMode mode(l.work);
  const Team team(l.log2_team);
  const Span<false> span(l, static_cast<int64_t>(blockIdx.x) * team.count + team.index);
  const int stride = static_cast<int>(team.size) * kUnit;
  auto extent = Extent<Type, kSymmetric>::none();
  typename Source::Held held;
  for (int at = static_cast<int>(team.lane) * kUnit; at < span.limit; at += stride) {
    Source::template load<false>(parameters, span.place(at), span.template count<kUnit>(at), held);
    extent.add(held.words);
  }
  extent = reduce_team(extent, team, shared);
  if (span.limit == 0) {
    return;
  }
  const Level level = extent.level(mode.bits, mode.stochastic);
  const int64_t place = place_of(span.group, l.work.order);
  const uint64_t offset = mode.stochastic ? offset_of(l.work.random) : 0;
  const Target target(l.work, span, place, offset);
  for (int at = static_cast<int>(team.lane) * kUnit; at < span.limit; at += stride) {
    const int count = span.template count<kUnit>(at);
    Source::template load<false>(parameters, span.place(at), count, held);
    emit<Source, kSymmetric, false>(l, mode, target, at, count, held.words, level);
  }
  if (team.lane == 0) {
    store_level<kSymmetric>(l.work, place, level);
  }
}

template <class Type, int kGroups, int kUnits, bool kWhole>
__global__ void __launch_bounds__(kMostThreads)
dequantize_kernel(const OPKILN_GRID_CONSTANT Launch l) {
  constexpr int kUnit = Type::kUnit;
  const Team team(l.log2_team);
  const Work& work = l.work;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kGroups * team.count + team.index;
  const int stride = static_cast<int>(team.size) * kUnit;
  for (int base = static_cast<int>(team.lane) * kUnit; base < work.format.group_size;
       base += stride * kUnits) {
    Levels levels[kGroups][kUnits];
    float scale[kGroups], offset[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const Span<kWhole> span(l, first + static_cast<int64_t>(g) * team.count);
      if (span.limit == 0) {
        continue;
      }
      const int64_t place = place_of(span.group, work.order);
      const uint8_t* const from =
          work.to.values + bytes_of(place * work.format.group_size, work.format.bits);
      scale[g] = work.to.scales[place];
      offset[g] = work.format.symmetric ? 0.0f : work.to.offsets[place];
#pragma unroll
      for (int c = 0; c < kUnits; ++c) {
        const int at = base + c * stride;
        if (at < span.limit) {
          levels[g][c] = load_levels<kUnit, kWhole>(from, static_cast<uint32_t>(at),
                                                    span.template count<kUnit>(at),
                                                    work.format.bits);
        }
      }
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const Span<kWhole> span(l, first + static_cast<int64_t>(g) * team.count);
#pragma unroll
      for (int c = 0; c < kUnits; ++c) {
        const int at = base + c * stride;
        if (at < span.limit) {
          float values[kUnit];
          unpack<kUnit>(levels[g][c], work.format, values);
#pragma unroll
          for (int k = 0; k < kUnit; ++k) {
            const float product = values[k] * scale[g];
            values[k] = work.format.symmetric ? product : product + offset[g];
          }
          store_unit<Type, kWhole>(values, work.out, span.place(at),
                                   span.template count<kUnit>(at));
        }
      }
    }
  }
}

}  // namespace
}  // namespace quantizer
}  // namespace opkiln
