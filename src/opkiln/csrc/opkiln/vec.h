// One vector register of floats, and the three storage types that a kernel reads and writes.
//
// Kernels are written once, with `Vec`; the target's macros choose its implementation. Every conversion to a
// narrower type rounds to nearest, ties to even, keeps subnormals and turns NaN into a quiet NaN. So all
// instruction sets give the same bits. Includes no torch header.
#pragma once

#include <cstdint>
#include <cstring>

#include "element_type.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define OPKILN_AVX512
#define OPKILN_ISA avx512
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define OPKILN_AVX2
#define OPKILN_ISA avx2
#elif defined(__aarch64__) && defined(__ARM_NEON)
#define OPKILN_NEON
#define OPKILN_ISA neon
#else
#define OPKILN_ISA portable
#endif

// The instruction set is part of every symbol, and all symbols are hidden: two variants of an op may be
// loaded in one process, and they must not share inline functions.
#define OPKILN_NAMESPACE_BEGIN \
  namespace opkiln {           \
  inline namespace [[gnu::visibility("hidden")]] OPKILN_ISA {
#define OPKILN_NAMESPACE_END \
  }                          \
  }

OPKILN_NAMESPACE_BEGIN

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

using Type = ElementType;

// Prefetches what a loop reads some iterations later. The hardware's prefetchers stop at page boundaries.
// Prefetching a kilobyte ahead made four streams of fp32 5 to 8% faster on a Xeon. (Non-temporal stores made
// them 60% slower, because the lines had just been read.)
inline void prefetch_ahead(const void* at) {
  __builtin_prefetch(static_cast<const char*>(at) + 1024);
}

// Must follow non-temporal stores. Otherwise other threads may see them late and in any order.
inline void settle_stores() {
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#endif
}

// 1.5 * 2^23 and the bias of exponents. Adding it rounds a small number to a whole one, in the low bits of
// the sum, which shifted left by 23 are 2 to that power. AVX-512 has instructions for both.
constexpr float kExponents = 12583039.0f;

inline float widen(BFloat16 value) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(value.bits) << 16);
}

inline BFloat16 narrow_bfloat16(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return {0x7fc0};
  }
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

inline float widen(Float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude < 0x0400u) {  // zero or subnormal: magnitude * 2^-24 is exact
    const float scaled = static_cast<float>(magnitude) * 0x1p-24f;
    return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, scaled) | sign);
  }
  // Exponent 31 (infinity, NaN) maps to 255. The others shift by the difference of the biases.
  const uint32_t rebias = magnitude >= 0x7c00u ? (255u - 31u) << 23 : (127u - 15u) << 23;
  return __builtin_bit_cast(float, ((magnitude << 13) + rebias) | sign);
}

inline Float16 narrow_float16(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return {static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x1ffu))};
  }
  if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    return {static_cast<uint16_t>(sign | 0x7c00u)};
  }
  if (magnitude < 0x38800000u) {  // below 2^-14: in units of 2^-24, the last bit of 0.5
    const float units = __builtin_bit_cast(float, magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (__builtin_bit_cast(uint32_t, units) - 0x3f000000u))};
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<uint16_t>(sign | ((rounded - ((127u - 15u) << 23)) >> 13))};
}

OPKILN_NAMESPACE_END

#if defined(OPKILN_AVX512)
#include "vec_avx512.h"
#elif defined(OPKILN_AVX2)
#include "vec_avx2.h"
#elif defined(OPKILN_NEON)
#include "vec_neon.h"
#else
#include "vec_portable.h"
#endif
