// The kernels that dequantize. hipify turns this file into HIP unchanged.
#pragma once

#include "sources.h"

namespace opkiln {
namespace quantizer {
namespace {

constexpr unsigned kBackThreads = 128;
constexpr int kBackUnits = 2;

// The position of an element's levels in memory, and their group.
struct LevelPlace {
  int64_t group, at;

  __device__ LevelPlace(const Launch& l, int64_t element) {
    const Format& format = l.work.format;
    int64_t own;
    if (l.log2_group != 0) {
      own = element >> l.log2_group;
    } else {
      // Divides in 32 bits where possible: 64-bit division is slow.
      const int64_t chunk = element / kChunk;
      own = chunk <= 0xffffffff
          ? static_cast<uint32_t>(chunk) / static_cast<uint32_t>(format.group_size / kChunk)
          : element / format.group_size;
    }
    group = place_of(own, l.work.order);
    at = element + (group - own) * format.group_size;
  }
};

template <class Type, bool kWhole, bool kOnce>
__device__ void finish_unit(const Work& work, const Format& format, const Levels& levels,
                            float scale, float offset, int64_t start, int count) {
  float values[Type::kUnit];
  unpack<Type::kUnit>(levels, format, values);
#pragma unroll
  for (int k = 0; k < Type::kUnit; ++k) {
    const float product = values[k] * scale;
    values[k] = format.symmetric ? product : product + offset;
  }
  uint32_t words[4];
  Type::narrow(values, words);
  store_unit<Type, kWhole, kOnce>(words, work.out, {start, 0}, count);
}

// Full units, two per thread. One, four or eight units, and levels
// that a warp reads together and distributes, were slower on an H200.
template <class Type, int kBits, bool kSymmetric>
__global__ void __launch_bounds__(kBackThreads)
dequantize_kernel(const OPK_GRID_CONSTANT Launch l) {
  constexpr int kUnit = Type::kUnit;
  const Work& work = l.work;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kBackThreads * kBackUnits);
  Levels levels[kBackUnits];
  float scales[kBackUnits], offsets[kBackUnits];
#pragma unroll
  for (int j = 0; j < kBackUnits; ++j) {
    const LevelPlace place(l, (first + j * kBackThreads + threadIdx.x) * kUnit);
    levels[j] = load_levels<kUnit, true>(work.to.values, place.at, kUnit, kBits);
    scales[j] = work.to.scales[place.group];
    offsets[j] = kSymmetric ? 0.0f : work.to.offsets[place.group];
  }
  const Format format{kBits, 0, kSymmetric};
#pragma unroll
  for (int j = 0; j < kBackUnits; ++j) {
    finish_unit<Type, true, (kUnit * kBits < 64)>(
        work, format, levels[j], scales[j], offsets[j],
        (first + j * kBackThreads + threadIdx.x) * kUnit, kUnit);
  }
}

// The units from l.first on, at any alignment.
template <class Type>
__global__ void __launch_bounds__(kBackThreads)
dequantize_any_kernel(const OPK_GRID_CONSTANT Launch l) {
  constexpr int kUnit = Type::kUnit;
  const Work& work = l.work;
  const int64_t unit = l.first + static_cast<int64_t>(blockIdx.x) * kBackThreads + threadIdx.x;
  const int64_t start = unit * kUnit, left = work.numel - start;
  if (left > 0) {
    const LevelPlace place(l, start);
    const int count = left < kUnit ? static_cast<int>(left) : kUnit;
    const Levels levels =
        load_levels<kUnit, false>(work.to.values, place.at, count, work.format.bits);
    const float offset = work.format.symmetric ? 0.0f : work.to.offsets[place.group];
    finish_unit<Type, false, false>(work, work.format, levels, work.to.scales[place.group], offset,
                                    start, count);
  }
}

}  // namespace
}  // namespace quantizer
}  // namespace opkiln
