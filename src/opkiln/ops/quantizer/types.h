// The element types in device code: how many elements form a unit, which is one 16-byte access, and how a
// unit's four words convert to floats and back. hipify turns this file into HIP unchanged.
#pragma once

#include <opkiln/group_reduce.h>

#include "element.h"

namespace opkiln {
namespace quantizer {
namespace {

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
  // The greatest magnitude, as an integer. Integers order like the
  // floats, with infinity and then NaN above all numbers.
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

  // The least and greatest element of a group, or of the part that a thread has seen.
  struct Range {
    float least, greatest;

    __device__ static Range none() {
      return {infinity(), -infinity()};
    }
    __device__ void add(const uint32_t* words) {
      float odd = 0;
#pragma unroll
      for (int k = 0; k < kUnit; ++k) {
        const float value = __uint_as_float(words[k]);
        least = fminf(least, value);
        greatest = fmaxf(greatest, value);
        odd = fmaf(value, 0.0f, odd);  // becomes NaN if an element is not finite
      }
      greatest = odd == 0 ? greatest : infinity();  // fminf and fmaxf ignore NaN
    }
    __device__ Range exchanged(unsigned bits) const {
      return {exchange(least, bits), exchange(greatest, bits)};
    }
    __device__ void absorb(const Range& other) {
      least = fminf(least, other.least);
      greatest = fmaxf(greatest, other.greatest);
    }
    __device__ float lowest() const {
      return least;
    }
    __device__ float highest() const {
      return greatest;
    }
  };
};

// Two elements per word, the first in the low half.
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
  // The greatest magnitudes of the low and of the high halves.
  __device__ static uint32_t magnitude(const uint32_t* words) {
    constexpr uint32_t kBoth = 0x7fff7fffu;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    return Type::larger(Type::larger(words[0], words[1]), Type::larger(words[2], words[3])) & kBoth;
#else
    const uint32_t a = greater(words[0] & kBoth, words[1] & kBoth);
    return greater(a, greater(words[2] & kBoth, words[3] & kBoth));
#endif
  }
  __device__ static uint32_t greater(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint32_t out;
    asm("max.u16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
#else
    const uint32_t low = (a & 0xffffu) > (b & 0xffffu) ? a : b;
    // a tie of the high halves may compare the low halves, which changes nothing
    const uint32_t high = a > b ? a : b;
    return (low & 0xffffu) | (high & 0xffff0000u);
#endif
  }
  __device__ static float widen_magnitude(uint32_t bits) {
    const uint32_t low = bits & 0xffffu, high = bits >> 16;
    return Type::low(low > high ? low : high);
  }

  // The least and greatest element of a group, or of the part that a thread has seen,
  // separately for low and high halves. NaN wins over all numbers.
  struct Range {
    uint32_t least, greatest;

    __device__ static Range none() {
      constexpr uint32_t kBoth = Type::kInfinityBits * 0x10001u;
      return {kBoth, kBoth | 0x80008000u};
    }
    __device__ void add(const uint32_t* words) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        absorb({words[i], words[i]});
      }
    }
    __device__ Range exchanged(unsigned bits) const {
      return {exchange(least, bits), exchange(greatest, bits)};
    }
    __device__ void absorb(const Range& other) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
      least = Type::lesser(least, other.least);
      greatest = Type::greater_number(greatest, other.greatest);
#else
      least = outer<false>(least, other.least);
      greatest = outer<true>(greatest, other.greatest);
#endif
    }
    // As floats. Infinity and NaN survive the caller's subtraction.
    __device__ float lowest() const {
      return Type::low(outer<false>(least, least >> 16));
    }
    __device__ float highest() const {
      return Type::low(outer<true>(greatest, greatest >> 16));
    }

   private:
    template <bool kGreater>
    __device__ static bool goes_before(float a, float b) {
      return (kGreater ? a > b : a < b) || a != a;
    }
    template <bool kGreater>
    __device__ static uint32_t outer(uint32_t a, uint32_t b) {
      const uint32_t low = goes_before<kGreater>(Type::low(a), Type::low(b)) ? a : b;
      const uint32_t high = goes_before<kGreater>(Type::high(a), Type::high(b)) ? a : b;
      return (low & 0xffffu) | (high & 0xffff0000u);
    }
  };
};

struct Half : Sixteenths<Half> {
  static constexpr uint32_t kInfinityBits = 0x7c00u;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  __device__ static uint32_t lesser(uint32_t a, uint32_t b) {
    uint32_t out;
    asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
  }
  __device__ static uint32_t greater_number(uint32_t a, uint32_t b) {
    uint32_t out;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
  }
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // The larger magnitudes, with NaN above all. The sign bits are undefined.
  __device__ static uint32_t larger(uint32_t a, uint32_t b) {
    uint32_t out;
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
  }
#endif
  __device__ static float low(uint32_t word) {
    return opk::bits::half_to_float(static_cast<uint16_t>(word));
  }
  __device__ static float high(uint32_t word) {
    return opk::bits::half_to_float(static_cast<uint16_t>(word >> 16));
  }
  __device__ static uint32_t pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    return uint32_t{opk::bits::float_to_half(low)} |
        uint32_t{opk::bits::float_to_half(high)} << 16;
#endif
  }
};

struct BFloat : Sixteenths<BFloat> {
  static constexpr uint32_t kInfinityBits = 0x7f80u;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  __device__ static uint32_t lesser(uint32_t a, uint32_t b) {
    uint32_t out;
    asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
  }
  __device__ static uint32_t greater_number(uint32_t a, uint32_t b) {
    uint32_t out;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
  }
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __device__ static uint32_t larger(uint32_t a, uint32_t b) {
    uint32_t out;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
  }
#endif
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

// The extent of a group, or of the part that a thread has seen.
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
  __device__ Level level(int bits, bool stochastic, bool full) const {
    return Level::symmetric(Type::widen_magnitude(most), bits, stochastic, full);
  }
};

template <class Type>
struct Extent<Type, false> {
  typename Type::Range range;

  __device__ static Extent none() {
    return {Type::Range::none()};
  }
  __device__ void add(const uint32_t* words) {
    range.add(words);
  }
  __device__ Extent exchanged(unsigned bits) const {
    return {range.exchanged(bits)};
  }
  __device__ void absorb(const Extent& other) {
    range.absorb(other.range);
  }
  __device__ Level level(int bits, bool stochastic, bool) const {
    return Level::asymmetric(range.lowest(), range.highest(), bits, stochastic);
  }
};

}  // namespace
}  // namespace quantizer
}  // namespace opkiln
