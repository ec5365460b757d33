// The sources of quantizing: a tensor, or values that must be computed first. Device code.
#pragma once

#include "units.h"

namespace opkiln {
namespace quantizer {

// A launch: the call, and how its groups are distributed over threads.
struct Launch {
  Work work;
  int64_t first, last;  // groups
  unsigned log2_team;    // threads per group
  unsigned log2_chunks;  // chunks per group, for whole_groups.h
  unsigned log2_group;   // elements per group, for dequantizing; 0: not a power of two
  bool aligned;  // elements are aligned to 16 bytes, and levels to a unit
  RandomKeys<kRounds> keys;  // derived from the seed
};

struct Reduction {
  Launch launch;
  Parts parts;
};
static_assert(sizeof(Reduction) <= 4096, "launches with parts need more than older GPUs take");

namespace {

// Sources. Each loads a unit at a time, in the form in which a thread holds it.

// A tensor.
template <class T>
struct TensorSource {
  using Type = T;
  using Parameters = Launch;
  static constexpr bool kFeedback = false;

  struct Held {
    uint32_t words[4];
  };

  __device__ static const Launch& launch(const Launch& parameters) {
    return parameters;
  }
  template <bool kWhole>
  __device__ static void load(const Launch& l, Place at, int count, Held& held) {
    load_unit<T, kWhole>(l.work.from, at, count, held.words);
  }
};

// Values that are computed in fp32: a tensor or a sum of parts, plus the error of earlier rounding.
struct FloatSource {
  using Type = Float;
  using Parameters = Reduction;
  using Held = TensorSource<Float>::Held;
  static constexpr bool kFeedback = true;
  static constexpr int kUnit = Float::kUnit;

  __device__ static const Launch& launch(const Reduction& parameters) {
    return parameters.launch;
  }

  template <class T, bool kWhole>
  __device__ static void load_narrow(const Launch& l, Place at, int count, float* values) {
    const uint16_t* const from = at.in<1>(static_cast<const uint16_t*>(l.work.from));
    if (kWhole) {
      const uint2 words = *reinterpret_cast<const uint2*>(from);
      values[0] = T::low(words.x);
      values[1] = T::high(words.x);
      values[2] = T::low(words.y);
      values[3] = T::high(words.y);
      return;
    }
#pragma unroll
    for (int k = 0; k < kUnit; ++k) {
      values[k] = T::low(from[k < count ? k : 0]);
    }
  }

  template <bool kWhole>
  __device__ static void load_parts(const Reduction& r, int64_t at, int count, float* values) {
    const Parts& parts = r.parts;
    // 32-bit division, because 64-bit division is slow. reduce_parts() checks that chunk indices fit.
    const uint32_t group = static_cast<uint32_t>(at / kChunk) /
        static_cast<uint32_t>(parts.format.group_size / kChunk);
#pragma unroll 2
    for (int i = 0; i < parts.count; ++i) {
      const Quantized& part = parts.at[i];
      const float scale = part.scales[group];
      const float offset = parts.format.symmetric ? 0.0f : part.offsets[group];
      float levels[kUnit];
      unpack<kUnit>(load_levels<kUnit, kWhole>(part.values, at, count, parts.format.bits),
                    parts.format, levels);
#pragma unroll
      for (int k = 0; k < kUnit; ++k) {
        const float product = levels[k] * scale;
        const float value = parts.format.symmetric ? product : product + offset;
        values[k] = i == 0 ? value : values[k] + value;
      }
    }
#pragma unroll
    for (int k = 0; k < kUnit; ++k) {
      values[k] *= parts.factor;
    }
  }

  template <bool kWhole>
  __device__ static void load(const Reduction& r, Place at, int count, Held& held) {
    const Work& work = r.launch.work;
    float values[kUnit];
    if (work.from == nullptr) {
      load_parts<kWhole>(r, at.index(), count, values);
    } else if (work.type == ElementType::kFloat) {
      uint32_t words[4];
      load_unit<Float, kWhole>(work.from, at, count, words);
      Float::widen(words, values);
    } else if (work.type == ElementType::kFloat16) {
      load_narrow<Half, kWhole>(r.launch, at, count, values);
    } else {
      load_narrow<BFloat, kWhole>(r.launch, at, count, values);
    }
    if (work.error != nullptr) {
      uint32_t words[4];
      load_unit<Float, kWhole>(work.error, at, count, words);
#pragma unroll
      for (int k = 0; k < kUnit; ++k) {
        values[k] += __uint_as_float(words[k]);
      }
    }
    // The missing elements of parts are levels of 0. Repeats the first element here, as load_unit does.
#pragma unroll
    for (int k = 1; k < kUnit; ++k) {
      values[k] = kWhole || k < count ? values[k] : values[0];
    }
    Float::narrow(values, held.words);
  }
};

}  // namespace
}  // namespace quantizer
}  // namespace opkiln
