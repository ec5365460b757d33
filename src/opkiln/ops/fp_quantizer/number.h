// The number formats, and conversions of single numbers. Host, devices and reference.py give the same bits.
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

constexpr int kRounds = 7;  // of Philox: passes its authors' tests, with 0.7 times the work of ten
using Keys = RandomKeys<kRounds>;

// kInfinity is also the mask of fp32's exponent
constexpr uint32_t kInfinity = 0x7f800000u, kNan = 0x7fc00000u;
constexpr float kLeastScale = 0x1p-126f;  // fp32's least normal number, whose inverse is finite

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

// A format: its bits, its mantissa bits, and its largest number with the code of that number.
template <int kAllBits, int kMantissaBits, int kLargestNumber, uint32_t kCodeOfLargest>
struct Format {
  static constexpr int kBits = kAllBits, kMantissa = kMantissaBits;
  static constexpr int kBias = (1 << (kBits - 2 - kMantissa)) - 1;
  static constexpr int kCut = 23 - kMantissa;  // bits of fp32's mantissa that the format lacks
  static constexpr uint32_t kLeast = (128u - kBias) << 23;  // the least normal number, as fp32 bits
  static constexpr float kLargest = kLargestNumber;
  static constexpr uint32_t kLargestCode = kCodeOfLargest;
  static constexpr uint32_t kMagnitude = (1u << (kBits - 1)) - 1;  // mask of all bits except the sign
  // Shifting a code's magnitude to fp32's position gives a float that is too small by this factor,
  // the difference of the biases. Subnormals are subnormal in both.
  static constexpr float kRebias = power_of_two(127 - kBias);
  static constexpr float kUnbias = power_of_two(kBias - 127);
};

using E4M3 = Format<8, 3, 448, 0x7e>;
using E5M2 = Format<8, 2, 57344, 0x7b>;
using E3M2 = Format<6, 2, 28, 0x1f>;
using E4M7 = Format<12, 7, 510, 0x7ff>;
using E2M1 = Format<4, 1, 6, 0x7>;

// Calls body with the format of these bits. Returns false if there is none.
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

// A group's scale, from the bits of its largest magnitude.
template <class F>
OPK_HOST_DEVICE static inline float scale_of(uint32_t absmax) {
  if (absmax >= kInfinity) {
    return float_of(kNan);
  }
  const float scale = float_of(absmax) / F::kLargest;
  return scale < kLeastScale ? kLeastScale : scale;
}

// The sign of a value, at the format's sign bit.
template <class F>
OPK_HOST_DEVICE static inline uint32_t sign_of(float value) {
  return bits_of(value) >> 31 << (F::kBits - 1);
}

// The code of the nearest number, ties to even. The value may exceed the largest number by at most fp32's
// rounding error. Adding a power of two drops the bits below the format's last bit, with fp32's rounding.
template <class F>
OPK_HOST_DEVICE static inline uint32_t nearest(float value) {
  const uint32_t magnitude = bits_of(value) & 0x7fffffffu;
  uint32_t exponent = magnitude & kInfinity;
  exponent = exponent < F::kLeast ? F::kLeast : exponent;
  const uint32_t magic = exponent + (static_cast<uint32_t>(F::kCut) << 23);
  const uint32_t rounded = bits_of(float_of(magnitude) + float_of(magic));
  return (rounded - magic + ((exponent - F::kLeast) >> F::kCut)) | sign_of<F>(value);
}

// A magnitude as a code with kCut fractional bits: a number between two of the format's has a code at the
// same relative position. Bits below fp32's precision are dropped.
template <class F>
OPK_HOST_DEVICE static inline uint32_t exact_code(uint32_t magnitude) {
  if (magnitude >= F::kLeast) {
    return magnitude - F::kLeast + (1u << 23);
  }
  const uint32_t shift = (F::kLeast - (magnitude & kInfinity)) >> 23;
  const uint32_t significand = (magnitude & 0x7fffffu) | (magnitude >= (1u << 23) ? 1u << 23 : 0u);
  return shift > 31 ? 0 : significand >> shift;
}

// The code of one of the two numbers around the value, chosen by 16 random bits.
template <class F>
OPK_HOST_DEVICE static inline uint32_t stochastic(float value, uint32_t random) {
  const uint32_t exact = exact_code<F>(bits_of(value) & 0x7fffffffu);
  const uint32_t chosen = (exact + (random << (7 - F::kMantissa))) >> F::kCut;
  return (chosen > F::kLargestCode ? F::kLargestCode : chosen) | sign_of<F>(value);
}

// Decodes a number. Bits above the code are ignored.
template <class F>
OPK_HOST_DEVICE static inline float number_of(uint32_t code) {
  const uint32_t magnitude = code & F::kMagnitude;
  const uint32_t sign = (code << (32 - F::kBits)) & 0x80000000u;
#if defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__)
  float value = float_of(magnitude << F::kCut) * F::kRebias;
#else
  // Avoids fp32's subnormals, which the host may flush to zero. The
  // format's subnormals are the difference of two normal numbers.
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
