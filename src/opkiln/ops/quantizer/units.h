// Units: as many elements as an access of 16 bytes moves, and their levels, in device code. No torch
// header; hipify turns this into HIP as it is.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "element.h"

namespace opkiln {
namespace quantizer {
namespace {

// Elements
//
// A thread moves a unit of elements at a time: 16 bytes of them. An element type says how many that
// is, and turns the four words of a unit into floats and back.

struct alignas(16) Sixteen {
  uint32_t at[4];
};

// An element: that many after the start of its group. What depends on the group alone is worked out
// once, and an address then takes one instruction.
struct Place {
  int64_t start;
  uint32_t at;

  template <int kBytes, class Byte>
  __device__ Byte* in(Byte* memory) const {
    return memory + start * kBytes + at * static_cast<uint32_t>(kBytes);
  }
  __device__ int64_t index() const {
    return start + at;
  }
};

struct Float {
  static constexpr int kBytes = 4, kUnit = 4;

  __device__ static void widen(const uint32_t* words, float* to) {
#pragma unroll
    for (int k = 0; k < kUnit; ++k) {
      to[k] = __uint_as_float(words[k]);
    }
  }
  __device__ static void narrow(const float* from, uint32_t* words) {
#pragma unroll
    for (int k = 0; k < kUnit; ++k) {
      words[k] = __float_as_uint(from[k]);
    }
  }
  // The greatest magnitude as an integer: these are in the floats' order, with infinity and then
  // NaN above all numbers.
  __device__ static uint32_t magnitude(const uint32_t* words) {
    uint32_t most = 0;
#pragma unroll
    for (int k = 0; k < kUnit; ++k) {
      const uint32_t bits = words[k] & 0x7fffffffu;
      most = bits > most ? bits : most;
    }
    return most;
  }
  __device__ static uint32_t greater(uint32_t a, uint32_t b) {
    return a > b ? a : b;
  }
  __device__ static float widen_magnitude(uint32_t bits) {
    return __uint_as_float(bits);
  }
};

// Two to a word, the first in its low half.
template <class Type>
struct Sixteenths {
  static constexpr int kBytes = 2, kUnit = 8;

  __device__ static void widen(const uint32_t* words, float* to) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[2 * i] = Type::low(words[i]);
      to[2 * i + 1] = Type::high(words[i]);
    }
  }
  __device__ static void narrow(const float* from, uint32_t* words) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = Type::pair(from[2 * i], from[2 * i + 1]);
    }
  }
  // Of the low and of the high halves.
  __device__ static uint32_t magnitude(const uint32_t* words) {
    constexpr uint32_t kBoth = 0x7fff7fffu;
    const uint32_t a = greater(words[0] & kBoth, words[1] & kBoth);
    return greater(a, greater(words[2] & kBoth, words[3] & kBoth));
  }
  __device__ static uint32_t greater(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint32_t out;
    asm("max.u16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
#else
    const uint32_t low = (a & 0xffffu) > (b & 0xffffu) ? a : b;
    const uint32_t high = a > b ? a : b;  // the low halves decide nothing that matters
    return (low & 0xffffu) | (high & 0xffff0000u);
#endif
  }
  __device__ static float widen_magnitude(uint32_t bits) {
    const uint32_t low = bits & 0xffffu, high = bits >> 16;
    return Type::low(low > high ? low : high);
  }
};

struct Half : Sixteenths<Half> {
  __device__ static float low(uint32_t word) {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(word)));
  }
  __device__ static float high(uint32_t word) {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(word >> 16)));
  }
  __device__ static uint32_t pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    return static_cast<uint32_t>(__half_as_ushort(__float2half_rn(low))) |
        static_cast<uint32_t>(__half_as_ushort(__float2half_rn(high))) << 16;
#endif
  }
};

struct BFloat : Sixteenths<BFloat> {
  __device__ static float low(uint32_t word) {
    return __uint_as_float(word << 16);
  }
  __device__ static float high(uint32_t word) {
    return __uint_as_float(word & 0xffff0000u);
  }
  __device__ static uint32_t pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    return one(low) | one(high) << 16;
#endif
  }

 private:
  __device__ static uint32_t one(float value) {  // rounds to nearest, ties to even; NaN stays NaN
    const uint32_t bits = __float_as_uint(value);
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return nan ? 0x7fc0u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  }
};

// A unit as it lies in memory. One of fewer elements is filled up with its first: that changes neither
// the least nor the greatest of its group.
template <class Type, bool kWhole>
__device__ void load_unit(const void* from, Place at, int count, uint32_t* words) {
  const char* const start = at.in<Type::kBytes>(static_cast<const char*>(from));
  if (kWhole) {
    const Sixteen all = *reinterpret_cast<const Sixteen*>(start);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = all.at[i];
    }
    return;
  }
  if (Type::kBytes == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = reinterpret_cast<const uint32_t*>(start)[i < count ? i : 0];
    }
  } else {
    const uint16_t* const halves = reinterpret_cast<const uint16_t*>(start);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = static_cast<uint32_t>(halves[2 * i < count ? 2 * i : 0]) |
          static_cast<uint32_t>(halves[2 * i + 1 < count ? 2 * i + 1 : 0]) << 16;
    }
  }
}

template <class Type, bool kWhole>
__device__ void store_unit(const float* values, void* to, Place at, int count) {
  uint32_t words[4];
  Type::narrow(values, words);
  char* const start = at.in<Type::kBytes>(static_cast<char*>(to));
  if (kWhole) {
    *reinterpret_cast<Sixteen*>(start) = {words[0], words[1], words[2], words[3]};
    return;
  }
#pragma unroll
  for (int k = 0; k < Type::kUnit; ++k) {
    if (k < count) {
      if (Type::kBytes == 4) {
        reinterpret_cast<uint32_t*>(start)[k] = words[k % 4];
      } else {
        reinterpret_cast<uint16_t*>(start)[k] =
            static_cast<uint16_t>(words[k / 2] >> (k % 2 * 16));
      }
    }
  }
}

// Levels

struct alignas(8) Levels {  // of a unit, the first in the lowest bits
  uint32_t low, high;       // the high word only of eight levels of eight bits
};

// The bytes that so many levels take.
template <class Index>
__device__ Index bytes_of(Index levels, int bits) {
  return bits == 8 ? levels : levels >> 1;
}

template <int kUnit, bool kWhole, class Index>
__device__ Levels load_levels(const uint8_t* from, Index at, int count, int bits) {
  const uint8_t* const start = from + bytes_of(at, bits);
  if (kWhole) {
    if (bits == 8) {
      return kUnit == 8 ? *reinterpret_cast<const Levels*>(start)
                        : Levels{*reinterpret_cast<const uint32_t*>(start), 0};
    }
    return kUnit == 8 ? Levels{*reinterpret_cast<const uint32_t*>(start), 0}
                      : Levels{*reinterpret_cast<const uint16_t*>(start), 0};
  }
  Levels out{0, 0};
  const int bytes = bits == 8 ? count : (count + 1) / 2;
  for (int i = 0; i < bytes; ++i) {
    (i < 4 ? out.low : out.high) |= static_cast<uint32_t>(start[i]) << (i % 4 * 8);
  }
  return out;
}

template <int kUnit, bool kWhole>
__device__ void store_levels(const Levels& levels, uint8_t* to, uint32_t at, int count, int bits) {
  uint8_t* const start = to + bytes_of(at, bits);
  if (kWhole) {
    if (bits == 8 && kUnit == 8) {
      *reinterpret_cast<Levels*>(start) = levels;
    } else if (bits == 4 && kUnit == 4) {
      *reinterpret_cast<uint16_t*>(start) = static_cast<uint16_t>(levels.low);
    } else {
      *reinterpret_cast<uint32_t*>(start) = levels.low;
    }
    return;
  }
  const int bytes = bits == 8 ? count : (count + 1) / 2;
  for (int i = 0; i < bytes; ++i) {
    start[i] = static_cast<uint8_t>((i < 4 ? levels.low : levels.high) >> (i % 4 * 8));
  }
}

// The lowest bytes of four words.
__device__ inline uint32_t four_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// Four levels of four bits, as the low bits of a word, from floats that are kRounder more: units have
// fewer instructions for bits than for floats, so they are put together as a float. `base` is
// kRounder, and for levels from -8 less 8, whose sign is put right at the end.
__device__ inline uint32_t four_halves(const float* rounded, float base) {
  const float low = fmaf(rounded[1] - base, 16.0f, rounded[0] - base);
  const float high = fmaf(rounded[3] - base, 16.0f, rounded[2] - base);
  return __float_as_uint(fmaf(high, 256.0f, low) + 0x1p23f);
}

// From floats whose low bits they are (see kRounder).
template <int kUnit, bool kSymmetric>
__device__ Levels pack(const float* rounded, int bits, int count, uint32_t keep) {
  Levels out{0, 0};
  if (bits == 8) {
    uint32_t q[kUnit];
#pragma unroll
    for (int k = 0; k < kUnit; ++k) {
      q[k] = __float_as_uint(rounded[k]);
    }
    out.low = four_bytes(q[0], q[1], q[2], q[3]);
    if (kUnit == 8) {
      out.high = four_bytes(q[kUnit - 4], q[kUnit - 3], q[kUnit - 2], q[kUnit - 1]);
    }
  } else {
    constexpr float base = kSymmetric ? kRounder - 8.0f : kRounder;
    out.low = four_halves(rounded, base);
    const uint32_t next = kUnit == 8 ? four_halves(rounded + kUnit - 4, base) : 0u;
    out.low = __byte_perm(out.low, next, 0x5410) ^ (kSymmetric ? 0x88888888u : 0u);
    if (count < kUnit) {  // the half of a byte that no element has
      out.low &= (1u << (4 * count)) - 1;
    }
  }
  out.low &= keep;
  out.high &= keep;
  return out;
}

// As floats: each becomes the low bits of one near 2^23, less that. Halves of bytes stay where they
// are in their word, and are multiples of a power of 16 until the multiplication, which is exact.
template <int kUnit>
__device__ void unpack(Levels levels, const Format& format, float* to) {
  constexpr float kBase = 0x1p23f;
  constexpr uint32_t kBits = 0x4b000000u;  // of kBase
  if (format.bits == 8) {
    const uint32_t flip = format.symmetric ? 0x80808080u : 0u;
    const float base = format.symmetric ? kBase + 128.0f : kBase;
    levels.low ^= flip;
    levels.high ^= flip;
#pragma unroll
    for (int k = 0; k < kUnit; ++k) {
      const uint32_t word = k < 4 ? levels.low : levels.high;
      to[k] = __uint_as_float(__byte_perm(word, kBits, 0x7540u + k % 4)) - base;
    }
  } else {
    const uint32_t low = levels.low ^ (format.symmetric ? 0x88888888u : 0u);
    const uint32_t high = low >> 16;
    const float bias = format.symmetric ? 8.0f : 0.0f;
#pragma unroll
    for (int k = 0; k < kUnit; ++k) {
      constexpr float kParts[4] = {1.0f, 0x1p-4f, 0x1p-8f, 0x1p-12f};
      const uint32_t word = k < 4 ? low : high;
      const float part = kParts[k % 4];
      const float whole = __uint_as_float((word & 15u << (4 * (k % 4))) | kBits);
      to[k] = fmaf(whole, part, -(kBase * part + bias));
    }
  }
}

}  // namespace
}  // namespace quantizer
}  // namespace opkiln
