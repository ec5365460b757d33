// Chunks of 16 elements in a thread's registers, and their codes. Device code.
#pragma once

#include <opkiln/group_reduce.h>

#include "encode.h"

namespace opkiln {
namespace fp_quantizer {
namespace {

struct alignas(16) Vector {
  uint32_t at[4];
};

// Element types, which convert a chunk's words to floats. As integers, the bits of magnitudes have
// the order of the floats, with infinity and NaN above all numbers.
struct Float {
  using Storage = uint32_t;
  static constexpr int kWords = 16;

  __device__ static uint32_t magnitude(const uint32_t (&words)[kWords]) {
    uint32_t most = 0;
#pragma unroll
    for (uint32_t word : words) {
      most = max(most, word & 0x7fffffffu);
    }
    return most;
  }
  __device__ static uint32_t widen_magnitude(uint32_t bits) {
    return bits;
  }
  __device__ static float element(const uint32_t (&words)[kWords], int i) {
    return float_of(words[i]);
  }
  // The highest bytes of the elements, which contain the signs, four per word.
  __device__ static void sign_bytes(const uint32_t (&words)[kWords], uint32_t (&out)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[i] = highest_bytes(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
    }
  }
};

// Two elements per word, the first in the low half.
template <class Type>
struct Sixteenths {
  using Storage = uint16_t;
  static constexpr int kWords = 8;

  __device__ static uint32_t magnitude(const uint32_t (&words)[kWords]) {
    uint32_t most = 0;
#pragma unroll
    for (uint32_t word : words) {
      most = larger_halves<Type::kBFloat16>(most, word);
    }
    return max(most & 0x7fffu, (most >> 16) & 0x7fffu);
  }
  __device__ static void sign_bytes(const uint32_t (&words)[kWords], uint32_t (&out)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[i] = __byte_perm(words[2 * i], words[2 * i + 1], 0x7531);
    }
  }
};

struct BFloat : Sixteenths<BFloat> {
  static constexpr bool kBFloat16 = true;

  __device__ static uint32_t widen_magnitude(uint32_t bits) {
    return bits << 16;
  }
  __device__ static float element(const uint32_t (&words)[kWords], int i) {
    return float_of(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
  }
};

struct Half : Sixteenths<Half> {
  static constexpr bool kBFloat16 = false;

  __device__ static float number(uint32_t bits) {
    return opk::bits::half_to_float(static_cast<uint16_t>(bits));
  }
  __device__ static uint32_t widen_magnitude(uint32_t bits) {
    return bits_of(number(bits));
  }
  __device__ static float element(const uint32_t (&words)[kWords], int i) {
    return number(i % 2 == 0 ? words[i / 2] & 0xffffu : words[i / 2] >> 16);
  }
};

// The largest magnitude of a group, or of the part that a thread has seen.
struct Magnitude {
  uint32_t bits;

  __device__ Magnitude exchanged(unsigned lanes) const {
    return {exchange(bits, lanes)};
  }
  __device__ void absorb(const Magnitude& other) {
    bits = max(bits, other.bits);
  }
};

template <class Type>
struct Chunk {
  uint32_t words[Type::kWords];

  // Loads all 16 elements from an address that is aligned to 16 bytes.
  __device__ void load(const void* input, int64_t start) {
    const auto* const from = reinterpret_cast<const Vector*>(
        static_cast<const typename Type::Storage*>(input) + start);
#pragma unroll
    for (int i = 0; i < Type::kWords / 4; ++i) {
      const Vector part = from[i];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        words[4 * i + k] = part.at[k];
      }
    }
  }

  // Loads the first `count` elements from any address, and fills up with zeros.
  __device__ void load_part(const void* input, int64_t start, int count) {
    const auto* const from = static_cast<const typename Type::Storage*>(input) + start;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const uint32_t bits = i < count ? from[i] : 0;
      if (Type::kWords == kChunk) {
        words[i % Type::kWords] = bits;
      } else {
        words[i / 2] = i % 2 == 0 ? bits : words[i / 2] | bits << 16;
      }
    }
  }

  __device__ Magnitude magnitude() const {
    return {Type::magnitude(words)};
  }
};

// How the elements of a group are scaled.
template <class F>
struct Scale {
  float scale, inverse;
  bool is_nan;

  __device__ explicit Scale(uint32_t absmax)
      : scale(scale_for<F>(absmax)), inverse(inverse_of(scale)), is_nan(absmax >= kInfinity) {}
};

template <class F>
struct Codes {
  static constexpr int kWords = F::kBits / 2;
  static constexpr int kBytes = kWords * 4;
  uint32_t words[kWords];
};

// `index` is the chunk's index, which selects its random bits.
template <class F, class Type>
__device__ Codes<F> encode(const Chunk<Type>& chunk, const Scale<F>& scale, bool stochastic,
                           int64_t index, uint64_t offset, const Keys& keys) {
  float values[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    values[i] = product(Type::element(chunk.words, i), scale.inverse);
  }
  Codes<F> codes;
  if (stochastic) {
    uint32_t signs[4];
    Type::sign_bytes(chunk.words, signs);
    encode_stochastic<F>(values, signs, static_cast<uint64_t>(index), offset, keys, codes.words);
  } else {
    encode_nearest<F>(values, codes.words);
  }
#pragma unroll
  for (uint32_t& word : codes.words) {
    word = scale.is_nan ? 0 : word;
  }
  return codes;
}

}  // namespace
}  // namespace fp_quantizer
}  // namespace opkiln
