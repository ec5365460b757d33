// The arithmetic of groups and elements, as in reference.py: in fp32, with each
// operation rounded separately (the build disables contraction). Compiled for
// devices by nvcc and hipcc, and for the host by any C++ compiler.
#pragma once

#include <opkiln/random_bits.h>

#include "work.h"

namespace opkiln {
namespace quantizer {
namespace {  // libraries for several instruction sets in one process must not share a copy

OPK_HOST_DEVICE inline float as_float(uint32_t bits) {
  return opk::bits::to_float(bits);
}

OPK_HOST_DEVICE inline uint32_t as_bits(float value) {
  return opk::bits::of_float(value);
}

OPK_HOST_DEVICE inline float infinity() {
  return as_float(0x7f800000u);
}

constexpr float kLeastScale = 0x1p-126f;
constexpr float kGreatest = 0x1.fffffep127f;

// Floats near this number are whole numbers: adding it rounds to
// nearest, ties to even, and leaves the result in the low bits.
constexpr float kRounder = 0x1.8p23f;

// How a group is scaled; see reference.py. kFull is also symmetric,
// and its code serves the symmetric scheme with an infinite ceiling.
enum class Scheme { kAsymmetric, kSymmetric, kFull };

// How the elements of a group are scaled.
struct Level {
  float scale, inverse, offset;
  float ceiling;  // for the full scheme, which clamps: the greatest level plus kRounder
  float shift;    // added to levels while they are rounded stochastically
  uint32_t keep;  // a mask for levels: 0 if the group is not finite, and so has none

  OPK_HOST_DEVICE static Level of(float spread, float offset, float top, bool stochastic) {
    const bool finite = spread <= kGreatest;  // false for NaN
    const float scale = spread * (1.0f / top);
    const float nan = as_float(0x7fc00000u);
    Level out;
    out.scale = !finite ? nan : scale > kLeastScale ? scale : kLeastScale;
    out.inverse = 1.0f / out.scale;
    if (stochastic && spread * out.inverse > top) {
      out.inverse *= 1.0f - 0x1p-21f;  // otherwise the greatest element could round beyond the top
    }
    out.offset = finite ? offset : nan;
    out.shift = top > 128.0f ? 128.0f : 0.0f;
    out.keep = finite ? ~0u : 0u;
    return out;
  }

  OPK_HOST_DEVICE static Level symmetric(float greatest_magnitude, int bits, bool stochastic,
                                            bool full) {
    const float top = bits == 8 ? 127.0f : 7.0f;
    Level out = of(greatest_magnitude, 0.0f, full ? top + 1.0f : top, stochastic);
    out.ceiling = full ? kRounder + top : infinity();
    return out;
  }

  OPK_HOST_DEVICE static Level asymmetric(float least, float greatest, int bits,
                                             bool stochastic) {
    const float low = least + 0.0f;  // turns negative zero into zero
    Level out = of(greatest - low, low, bits == 8 ? 255.0f : 15.0f, stochastic);
    out.ceiling = infinity();
    return out;
  }

  // The element in units of the scale.
  template <bool kSymmetric>
  OPK_HOST_DEVICE float divide_by_scale(float x) const {
    return (kSymmetric ? x : x - offset) * inverse;
  }

  // The level of a scaled element, plus kRounder. Only the full scheme can exceed its range: in the others
  // the greatest quotient is off by just a few units in its last place.
  template <Scheme kScheme>
  OPK_HOST_DEVICE float nearest(float y) const {
    return clamp<kScheme>(y + kRounder);
  }

  // Rounds up with a probability equal to the distance from the level below. `u` is random,
  // from 128 to 129 - 2^-16: floats up to 256 are multiples of 2^-16, and the random bits
  // are their low bits. Levels that would exceed 256 are shifted.
  template <Scheme kScheme>
  OPK_HOST_DEVICE float stochastic(float y, float u) const {
    const float t = y - shift + u;
    const float back = kRounder - 128.0f + shift;
#if defined(__CUDA_ARCH__)
    return clamp<kScheme>(__fadd_rd(t, back));
#else
    return clamp<kScheme>(__builtin_floorf(t) + back);
#endif
  }

  template <Scheme kScheme>
  OPK_HOST_DEVICE float clamp(float rounded) const {
    return kScheme == Scheme::kFull && !(rounded < ceiling) ? ceiling : rounded;
  }

  // Converts a level back to a value.
  template <bool kSymmetric>
  OPK_HOST_DEVICE float back(float level) const {
    const float product = level * scale;
    return kSymmetric ? product : product + offset;
  }
};

OPK_HOST_DEVICE inline uint64_t offset_of(const Random& random) {
  return random.offset_at == nullptr ? random.offset : static_cast<uint64_t>(*random.offset_at);
}

}  // namespace
}  // namespace quantizer
}  // namespace opkiln
