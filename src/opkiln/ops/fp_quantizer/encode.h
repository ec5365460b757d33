// Encodes 16 values at a time in device code. Uses the GPU's conversion
// instructions where they exist; all variants give the same bits as number.h.
#pragma once

#include "number.h"

namespace opkiln {
namespace fp_quantizer {

constexpr int kChunk = 16;

// A product that the compiler does not contract with a following addition.
__device__ inline float product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

// The larger magnitudes of two pairs of halves, with NaN above all.
// The sign bits of the result are undefined.
template <bool kBFloat16>
__device__ inline uint32_t larger_halves(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t out;
  if constexpr (kBFloat16) {
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  }
  return out;
#else
  a &= 0x7fff7fffu;
  b &= 0x7fff7fffu;
  return max(a & 0xffffu, b & 0xffffu) | max(a & 0xffff0000u, b & 0xffff0000u);
#endif
}

// Joins four 24-bit parts.
__device__ inline void join(const uint32_t (&parts)[4], uint32_t* words) {
  words[0] = parts[0] | parts[1] << 24;
  words[1] = parts[1] >> 8 | parts[2] << 16;
  words[2] = parts[2] >> 16 | parts[3] << 8;
}

// Packs 16 twelve-bit codes, from the low bits of half a word each.
__device__ inline void pack_twelves(const uint32_t (&twos)[8], uint32_t (&words)[6]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t closed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t two = twos[4 * half + i];  // the second code moves down by four bits
      closed[i] = two - (two >> 16) * 0xf000u;  // the second moves down by four bits
    }
    join(closed, words + 3 * half);
  }
}

// Joins the low halves of two words.
__device__ inline uint32_t low_halves(uint32_t low, uint32_t high) {
  return __byte_perm(low, high, 0x5410);
}

// Packs 16 codes of up to eight bits, from the low bits of a byte each.
template <class F>
__device__ inline void pack_bytes(const uint32_t (&fours)[4], uint32_t (&words)[F::kBits / 2]) {
  if constexpr (F::kBits == 8) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = fours[i];
    }
  } else if constexpr (F::kBits == 6) {
    uint32_t closed[4];  // 24 bits each
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t pairs = (fours[i] & 0x003f003fu) | ((fours[i] >> 2) & 0x0fc00fc0u);
      closed[i] = (pairs & 0xfffu) | ((pairs >> 4) & 0xfff000u);
    }
    join(closed, words);
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t low = fours[2 * i], high = fours[2 * i + 1];
      words[i] = __byte_perm(low | low >> 4, high | high >> 4, 0x6420);
    }
  }
}

// Equals scale_of, without a division. The quotient is corrected by the remainder of its product, which
// rounds it as the division would. (This holds for these divisors, whose inverses are known.)
template <class F>
__device__ inline float scale_for(uint32_t absmax) {
#if defined(__CUDA_ARCH__)
  constexpr float kInverse = 1.0f / F::kLargest;
  const float value = float_of(absmax), quotient = product(value, kInverse);
  const float scale = fmaf(fmaf(-quotient, F::kLargest, value), kInverse, quotient);
  return absmax >= kInfinity ? float_of(kNan) : fmaxf(scale, kLeastScale);
#else
  return scale_of<F>(absmax);
#endif
}

__device__ inline float inverse_of(float scale) {
#if defined(__CUDA_ARCH__)
  return __frcp_rn(scale);
#else
  return 1.0f / scale;
#endif
}

template <class F>
struct Nearest {
  __device__ static void encode(const float (&values)[kChunk], uint32_t (&words)[F::kBits / 2]) {
    if constexpr (F::kBits == 12) {
      uint32_t twos[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        twos[i] = low_halves(nearest<F>(values[2 * i]), nearest<F>(values[2 * i + 1]));
      }
      pack_twelves(twos, words);
    } else {
      uint32_t fours[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        fours[i] = nearest<F>(values[4 * i]) | nearest<F>(values[4 * i + 1]) << 8 |
            nearest<F>(values[4 * i + 2]) << 16 | nearest<F>(values[4 * i + 3]) << 24;
      }
      pack_bytes<F>(fours, words);
    }
  }
};

#if defined(__CUDA_ARCH__)

// Normal numbers are rounded as to bfloat16, which has the same mantissa. Subnormals are rounded
// where a float's last bit is worth as much as theirs. Magnitudes are clamped at the least
// normal number, whose code is 128, once from below and once from above. So the sum of both
// codes is 128 too large, which is corrected for two codes at a time.
template <>
struct Nearest<E4M7> {
  __device__ static void encode(const float (&v)[kChunk], uint32_t (&words)[6]) {
    constexpr float kLeast = 0x1p-6f, kUnits = 0x1p10f;  // kUnits: bits 0x44800000, steps of 2^-13
    uint32_t twos[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float a = v[2 * i], b = v[2 * i + 1];
      uint32_t normal;
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
          : "=r"(normal)
          : "f"(fmaxf(fabsf(b), kLeast)), "f"(fmaxf(fabsf(a), kLeast)));
      const uint32_t subnormal = low_halves(bits_of(fminf(fabsf(a), kLeast) + kUnits),
                                            bits_of(fminf(fabsf(b), kLeast) + kUnits));
      const uint32_t signs = __byte_perm(bits_of(a), bits_of(b), 0x7632) >> 4 & 0x08000800u;
      twos[i] = (normal + subnormal - 0x3c803c80u) | signs;  // 0x3c80: kLeast as bfloat16
    }
    pack_twelves(twos, words);
  }
};

#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890

__device__ inline uint32_t e4m3_pair(float low, float high) {
  uint16_t out;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
  return out;
}
__device__ inline uint32_t e5m2_pair(float low, float high) {
  uint16_t out;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
  return out;
}

template <>
struct Nearest<E4M3> {
  __device__ static void encode(const float (&v)[kChunk], uint32_t (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = e4m3_pair(v[4 * i], v[4 * i + 1]) | e4m3_pair(v[4 * i + 2], v[4 * i + 3]) << 16;
    }
  }
};

template <>
struct Nearest<E5M2> {
  __device__ static void encode(const float (&v)[kChunk], uint32_t (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = e5m2_pair(v[4 * i], v[4 * i + 1]) | e5m2_pair(v[4 * i + 2], v[4 * i + 3]) << 16;
    }
  }
};

// e5m2 has the same mantissa. After the exponent is shifted by 12, the least normal
// numbers agree, and so do all codes except for the position of the sign. (The
// product rounds only values far below those that become 0 anyway.)
template <>
struct Nearest<E3M2> {
  __device__ static void encode(const float (&v)[kChunk], uint32_t (&words)[3]) {
    uint32_t fours[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float low[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        low[k] = product(v[4 * i + k], 0x1p-12f);
      }
      const uint32_t bytes = e5m2_pair(low[0], low[1]) | e5m2_pair(low[2], low[3]) << 16;
      fours[i] = (bytes & 0x1f1f1f1fu) | ((bytes >> 2) & 0x20202020u);
    }
    pack_bytes<E3M2>(fours, words);
  }
};

#endif

// The codes of e2m1 as a function of the magnitude form three straight lines: 4 steps up to 2, 2
// steps up to 4, 1 step up to 6. Three clamped, exact parts of the magnitude are added to a number
// whose last bit is worth 1, which gives the code, rounded ties to even. This uses the GPU's
// plentiful float instructions instead of the scarcer integer ones.
template <>
struct Nearest<E2M1> {
  __device__ static void encode(const float (&v)[kChunk], uint32_t (&words)[2]) {
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      uint32_t magnitudes = 0, signs = 0;  // four bits per value, the first value lowest
#pragma unroll
      for (int i = 7; i >= 0; --i) {
        const float value = v[8 * w + i], magnitude = fabsf(value);
        float sum = fmaf(__saturatef(magnitude * 0.5f), 4.0f, 0x1p23f);
        sum = fmaf(__saturatef(fmaf(magnitude, 0.5f, -1.0f)), 2.0f, sum);
        sum = sum + __saturatef(fmaf(magnitude, 0.5f, -2.0f));
        magnitudes = magnitudes * 16 + bits_of(sum);
        signs = __funnelshift_l(bits_of(value), signs, 4);
      }
      // Removes the sums' exponents, 0x4b000000, of which the last two still affect the word.
      words[w] = (magnitudes - 0xfb000000u) | (signs & 0x88888888u);
    }
  }
};

template <class F>
__device__ inline void encode_nearest(const float (&values)[kChunk],
                                      uint32_t (&words)[F::kBits / 2]) {
  Nearest<F>::encode(values, words);
}

// Equals exact_code, for the magnitude of a value.
template <class F>
__device__ inline uint32_t exact_code_of(float value) {
#if defined(__CUDA_ARCH__)
  // After this product, fp32 is subnormal exactly where the format is. Nothing is rounded.
  return bits_of(__fmul_rz(fabsf(value), F::kUnbias));
#else
  return exact_code<F>(bits_of(value) & 0x7fffffffu);
#endif
}

// The highest bytes of four words, the first word's lowest.
__device__ inline uint32_t highest_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0073), __byte_perm(c, d, 0x0073), 0x5410);
}

// `signs` are the highest bytes of the values, four per word. `index` counts 16 values and selects
// their random bits. A value's 16 random bits are added below the last bit of its code. For
// formats of up to eight bits, the code is then in the highest byte.
template <class F>
__device__ inline void encode_stochastic(const float (&values)[kChunk], const uint32_t (&signs)[4],
                                         uint64_t index, uint64_t offset, const Keys& keys,
                                         uint32_t (&words)[F::kBits / 2]) {
  uint32_t chosen[kChunk];
  const RandomWords random = random_words(index, offset, keys);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const uint32_t byte = i % 4, next = (i + 1) % 4, word = random.at[i / 4];
    if constexpr (F::kBits <= 8) {
      const uint32_t bits = __byte_perm(word, 0, 0x4004 | next << 8 | byte << 4);
      chosen[i] = exact_code_of<F>(values[i]) * (2u << F::kMantissa) + bits;
    } else {
      // The largest number has no room to add random bits, but fp32 may have rounded a value above it.
      const float value = fminf(fabsf(values[i]), F::kLargest);
      const uint32_t bits = __byte_perm(word, 0, 0x4400 | next << 4 | byte);
      chosen[i] = (exact_code_of<F>(value) + bits) >> F::kCut;
    }
  }
  if constexpr (F::kBits <= 8) {
    uint32_t fours[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      fours[i] = highest_bytes(chosen[4 * i], chosen[4 * i + 1], chosen[4 * i + 2],
                               chosen[4 * i + 3]) |
          ((signs[i] >> (8 - F::kBits)) & (0x01010101u << (F::kBits - 1)));
    }
    pack_bytes<F>(fours, words);
  } else {
    uint32_t twos[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      // The signs of a pair are in neighbouring bytes.
      const uint32_t pair = __byte_perm(signs[i / 2], 0, i % 2 == 0 ? 0x1404 : 0x3424);
      twos[i] = low_halves(chosen[2 * i], chosen[2 * i + 1]) | (pair >> 4 & 0x08000800u);
    }
    pack_twelves(twos, words);
  }
}

}  // namespace fp_quantizer
}  // namespace opkiln
