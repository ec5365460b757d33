// The number formats, and one number at a time from and to them. The same on the host, on devices
// and in reference.py, bit for bit.
#pragma once

#include <opkiln/random_bits.h>

namespace opkiln {
namespace fp_quantizer {

OPK_HOST_DEVICE static inline uint32_t bits_of(float value) {
  return opk::bits::of_float(value);
}
OPK_HOST_DEVICE static inline float float_of(uint32_t bits) {
  return opk::bits::to_float(bits);
}

constexpr int kRounds = 7;  // of Philox; enough for its authors' tests, and 0.7 times the work of ten
using Keys = RandomKeys<kRounds>;

constexpr uint32_t kInfinity = 0x7f800000u, kNan = 0x7fc00000u;  // and kInfinity is fp32's exponent
constexpr float kLeastScale = 0x1p-126f;  // fp32's least normal number: its inverse is finite

OPK_HOST_DEVICE constexpr float power_of_two(int exponent) {
  float value = 1;
  for (; exponent > 0; --exponent) {
    value *= 2;
  }
  for (; exponent < 0; ++exponent) {
    value /= 2;
  }
  return value;
}

// So many bits, so many of them in the mantissa, and the largest number with its code.
template <int kAllBits, int kMantissaBits, int kLargestNumber, uint32_t kCodeOfLargest>
struct Format {
  static constexpr int kBits = kAllBits, kMantissa = kMantissaBits;
  static constexpr int kBias = (1 << (kBits - 2 - kMantissa)) - 1;
  static constexpr int kCut = 23 - kMantissa;  // bits of fp32's mantissa that are cut off
  static constexpr uint32_t kLeast = (128u - kBias) << 23;  // the least normal number, as fp32
  static constexpr float kLargest = kLargestNumber;
  static constexpr uint32_t kLargestCode = kCodeOfLargest;
  static constexpr uint32_t kMagnitude = (1u << (kBits - 1)) - 1;  // all but the sign
  // A float whose bits are those of a number's magnitude, shifted up to fp32's place, is this much
  // too small: by the difference of the biases. Subnormals are subnormals in both.
  static constexpr float kRebias = power_of_two(127 - kBias);
  static constexpr float kUnbias = power_of_two(kBias - 127);
};

using E4M3 = Format<8, 3, 448, 0x7e>;
using E5M2 = Format<8, 2, 57344, 0x7b>;
using E3M2 = Format<6, 2, 28, 0x1f>;
using E4M7 = Format<12, 7, 510, 0x7ff>;
using E2M1 = Format<4, 1, 6, 0x7>;

// Calls body with the format of these bits, or gives false: there is none.
template <class Body>
static inline bool with_format(int64_t bits, int64_t mantissa_bits, const Body& body) {
  const int64_t both = bits * 16 + mantissa_bits;
  if (mantissa_bits < 0 || mantissa_bits > 15) {
    return false;
  }
  switch (both) {
    case 8 * 16 + 3:
      body(E4M3{});
      return true;
    case 8 * 16 + 2:
      body(E5M2{});
      return true;
    case 6 * 16 + 2:
      body(E3M2{});
      return true;
    case 12 * 16 + 7:
      body(E4M7{});
      return true;
    case 4 * 16 + 1:
      body(E2M1{});
      return true;
    default:
      return false;
  }
}

// What a group's scale is, from the bits of its largest magnitude.
template <class F>
OPK_HOST_DEVICE static inline float scale_of(uint32_t absmax) {
  if (absmax >= kInfinity) {
    return float_of(kNan);
  }
  const float scale = float_of(absmax) / F::kLargest;
  return scale < kLeastScale ? kLeastScale : scale;
}

// The sign of a value where the format has it.
template <class F>
OPK_HOST_DEVICE static inline uint32_t sign_of(float value) {
  return bits_of(value) >> 31 << (F::kBits - 1);
}

// The code of the nearest number, ties to even, of a value whose magnitude is not above the largest
// one by more than fp32's rounding. Adding a power of two cuts a number off at the format's last
// bit, and rounds as fp32 does.
template <class F>
OPK_HOST_DEVICE static inline uint32_t nearest(float value) {
  const uint32_t magnitude = bits_of(value) & 0x7fffffffu;
  uint32_t exponent = magnitude & kInfinity;
  exponent = exponent < F::kLeast ? F::kLeast : exponent;
  const uint32_t magic = exponent + (static_cast<uint32_t>(F::kCut) << 23);
  const uint32_t rounded = bits_of(float_of(magnitude) + float_of(magic));
  return (rounded - magic + ((exponent - F::kLeast) >> F::kCut)) | sign_of<F>(value);
}

// A magnitude as a code with kCut bits after the point: numbers between two of the format's lie as
// far between their codes. What is beyond fp32's own bits is dropped.
template <class F>
OPK_HOST_DEVICE static inline uint32_t exact_code(uint32_t magnitude) {
  if (magnitude >= F::kLeast) {
    return magnitude - F::kLeast + (1u << 23);
  }
  const uint32_t shift = (F::kLeast - (magnitude & kInfinity)) >> 23;
  const uint32_t significand = (magnitude & 0x7fffffu) | (magnitude >= (1u << 23) ? 1u << 23 : 0u);
  return shift > 31 ? 0 : significand >> shift;
}

// The code of one of the two numbers that the value lies between, chosen by 16 random bits.
template <class F>
OPK_HOST_DEVICE static inline uint32_t stochastic(float value, uint32_t random) {
  const uint32_t exact = exact_code<F>(bits_of(value) & 0x7fffffffu);
  const uint32_t chosen = (exact + (random << (7 - F::kMantissa))) >> F::kCut;
  return (chosen > F::kLargestCode ? F::kLargestCode : chosen) | sign_of<F>(value);
}

// The number of a code; of the bits above it there may be any.
template <class F>
OPK_HOST_DEVICE static inline float number_of(uint32_t code) {
  const uint32_t magnitude = code & F::kMagnitude;
  const uint32_t sign = (code << (32 - F::kBits)) & 0x80000000u;
#if defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__)
  float value = float_of(magnitude << F::kCut) * F::kRebias;
#else
  // Not by way of fp32's subnormals: a host may be set to take them for 0. Those of the format are
  // the difference of two normal numbers.
  const bool subnormal = magnitude < (1u << F::kMantissa);
  float value = float_of((magnitude << F::kCut) + F::kLeast - (subnormal ? 0 : 1u << 23)) -
      (subnormal ? float_of(F::kLeast) : 0.0f);
#endif
  if (F::kBits == 8 && F::kMantissa == 3 && magnitude == 0x7f) {
    value = float_of(kNan);
  }
  if (F::kBits == 8 && F::kMantissa == 2 && magnitude >= 0x7c) {
    value = float_of(magnitude == 0x7c ? kInfinity : kNan);
  }
  return float_of(bits_of(value) | sign);
}

}  // namespace fp_quantizer
}  // namespace opkiln
