// Decodes weights to pairs of 16-bit numbers for tensor cores. All
// numbers are exact: scales are applied to the sums.
//
// A format is a template on the element type of x:
//   kWords, kCount: words of a row that a thread loads at a time (whole 16 bytes), and the codes in them
//   kFactor:        the factor that the numbers still need
//   eight():        decodes the codes 8 i to 8 i + 7 of these words to four pairs
//   ordered():      puts eight columns of x into the order of the pairs
#pragma once

#include "warp_matrix.h"

namespace opkiln {
namespace formats {

using device::narrow_two;

template <class Element>
constexpr bool kHalf = opk::dtype_of<Element> == opk::DType::float16;

OPK_HOST_DEVICE constexpr uint32_t both_halves(uint32_t bits) {
  return bits | bits << 16;
}

// a * b + c, on two numbers at once.
template <class Element>
__device__ inline uint32_t multiply_add_two(uint32_t a, uint32_t b, uint32_t c) {
#if defined(__CUDA_ARCH__)
  uint32_t out;
  if constexpr (kHalf<Element>) {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  }
  return out;
#else
  const auto number = [](uint32_t bits) {
    const uint16_t low = static_cast<uint16_t>(bits);
    return kHalf<Element> ? opk::bits::half_to_float(low) : opk::bits::to_float(uint32_t{low} << 16);
  };
  return narrow_two<Element>(number(a) * number(b) + number(c),
                         number(a >> 16) * number(b >> 16) + number(c >> 16));
#endif
}

template <class Element>
constexpr uint32_t kMinusOne = both_halves(kHalf<Element> ? 0xbc00 : 0xbf80);

// Numbers of x's own type: nothing to decode.
template <class Element>
struct Plain {
  static constexpr int kWords = 4, kCount = 8;
  static constexpr float kFactor = 1;

  __device__ static void eight(const uint32_t (&words)[kWords], int, uint32_t (&pairs)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = words[i];
  }
  __device__ static void reorder(uint32_t (&)[4]) {}
};

// In fp16, a byte below the exponent of 2^10 means 1024 + byte. bf16 has only seven
// bits below the exponent of 2^7, and the eighth is the exponent's last bit. So byte
// and sign are split: 128 + (byte without sign), minus 128 or 256.
template <class Element>
struct Int8 {
  static constexpr int kWords = 4, kCount = 16;
  static constexpr float kFactor = 1;

  __device__ static uint32_t pair(uint32_t bytes, uint32_t which) {
    if constexpr (kHalf<Element>) {
      const uint32_t shifted = __byte_perm(bytes, 0x64646464u, which);
      // minus 1152: the bytes are 0 to 255 here
      return multiply_add_two<Element>(shifted, both_halves(0x3c00), both_halves(0xe480));
    } else {
      const uint32_t spread = __byte_perm(bytes, 0x43434343u, which);
      return multiply_add_two<Element>(spread & both_halves(0xff80), kMinusOne<Element>, spread & both_halves(0xff7f));
    }
  }
  __device__ static void eight(const uint32_t (&words)[kWords], int i, uint32_t (&pairs)[4]) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint32_t bytes = kHalf<Element> ? words[2 * i + k] ^ 0x80808080u : words[2 * i + k];
      pairs[2 * k] = pair(bytes, 0x4140);
      pairs[2 * k + 1] = pair(bytes, 0x4342);
    }
  }
  __device__ static void reorder(uint32_t (&)[4]) {}
};

// Like Int8: four bits with the sign bit flipped are 0 to 15.
template <class Element>
struct Int4 {
  static constexpr int kWords = 4, kCount = 32;
  static constexpr float kFactor = 1;

  __device__ static void eight(const uint32_t (&words)[kWords], int i, uint32_t (&pairs)[4]) {
    constexpr uint32_t kBase = both_halves(kHalf<Element> ? 0x6400 : 0x4300);   // 1024, 128
    constexpr uint32_t kShift = both_halves(kHalf<Element> ? 0x6408 : 0x4308);  // 1032, 136
    const uint32_t even = words[i] ^ 0x88888888u, odd = even >> 4;
#pragma unroll
    for (uint32_t k = 0; k < 4; ++k) {
      const uint32_t spread = __byte_perm(even, odd, k | (k + 4) << 8);  // bytes 1 and 3 are cleared below
      pairs[k] = multiply_add_two<Element>(kShift, kMinusOne<Element>, (spread & both_halves(0xf)) | kBase);
    }
  }
  __device__ static void reorder(uint32_t (&)[4]) {}
};

// Reads the bits of a narrow float as those of a wide one with another exponent bias: the number times a
// power of two. fp16 applies the power to the sum, as part of the scale. In bf16 the number would be close to
// fp32's smallest, where sums lose digits, so it is multiplied at once.
template <class Element, int kExponent>
struct Moved {
  static constexpr int kPower = (kHalf<Element> ? 15 : 127) - ((1 << (kExponent - 1)) - 1);
  static constexpr float kFactor = kHalf<Element> ? static_cast<float>(1 << (kHalf<Element> ? kPower : 0)) : 1.0f;

  __device__ static uint32_t pair(uint32_t bits) {
    if constexpr (kHalf<Element>) {
      return bits;
    } else {
      return multiply_add_two<Element>(bits, both_halves(uint32_t{kPower + 127} << 7), both_halves(0x8000));
    }
  }
};

// 8 bits: sign, kExponent bits of exponent, then mantissa. NaN and
// infinity are not decoded: quantizers never write them.
template <class Element, int kExponent>
struct Fp8 : Moved<Element, kExponent> {
  static constexpr int kWords = 4, kCount = 16;
  // How far the exponent's highest bit moves down from bit 14.
  static constexpr int kDown = (kHalf<Element> ? 5 : 8) - kExponent;
  static constexpr uint32_t kBits = both_halves((0x7f00u >> kDown) & 0x7fffu);

  __device__ static void eight(const uint32_t (&words)[kWords], int i, uint32_t (&pairs)[4]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      // into the upper bytes
      const uint32_t spread = __byte_perm(words[2 * i + k / 2], 0, k % 2 == 0 ? 0x1404 : 0x3424);
      if constexpr (kDown == 0) {
        pairs[k] = spread;
      } else {
        pairs[k] = Moved<Element, kExponent>::pair((spread & both_halves(0x8000)) | ((spread >> kDown) & kBits));
      }
    }
  }
  __device__ static void reorder(uint32_t (&)[4]) {}
};

template <class Element>
using E4M3 = Fp8<Element, 4>;
template <class Element>
using E5M2 = Fp8<Element, 5>;

// 6 bits: sign, 3 bits of exponent, 2 of mantissa. Codes 0 to 3 fill three bytes, codes 4 to 7 the next
// three. Codes k and k + 4 are at the same place in their bytes, so they form a pair.
template <class Element>
struct E3M2 : Moved<Element, 3> {
  static constexpr int kWords = 12, kCount = 64;
  static constexpr int kTop = kHalf<Element> ? 12 : 9;  // where the exponent's highest bit belongs

  // `kFrom`: the sign's position in each half of `bits`.
  template <int kFrom>
  __device__ static uint32_t place(uint32_t bits) {
    constexpr int kShift = kTop - (kFrom - 1);
    const uint32_t sign = bits << (15 - kFrom), rest = kShift >= 0 ? bits << (kShift & 31) : bits >> (-kShift & 31);
    return Moved<Element, 3>::pair((sign & both_halves(0x8000)) | (rest & both_halves(0x1fu << (kTop - 4))));
  }
  __device__ static void eight(const uint32_t (&words)[kWords], int i, uint32_t (&pairs)[4]) {
    const int first = 3 * i / 2;  // six bytes: from its first byte, or from its third
    const uint32_t low = __byte_perm(words[first], words[first + 1], i % 2 == 0 ? 0x4310 : 0x6532);
    const uint32_t high = __byte_perm(words[first], words[first + 1], i % 2 == 0 ? 0x5421 : 0x7643);
    pairs[0] = place<5>(low);
    pairs[1] = place<11>(low);
    pairs[2] = place<9>(high);
    pairs[3] = place<15>(high);
  }
  __device__ static void reorder(uint32_t (&x)[4]) {
    const uint32_t from[4] = {x[0], x[1], x[2], x[3]};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      x[2 * k] = __byte_perm(from[k], from[k + 2], 0x5410);
      x[2 * k + 1] = __byte_perm(from[k], from[k + 2], 0x7632);
    }
  }
};

}  // namespace formats
}  // namespace opkiln
