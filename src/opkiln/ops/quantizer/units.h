// Units, the elements of one 16-byte access, and their levels, in
// device code. hipify turns this file into HIP unchanged.
#pragma once

#include <opkiln/device_element.h>

#include "types.h"

namespace opkiln {
namespace quantizer {
namespace {

// Elements

struct alignas(16) Sixteen {
  uint32_t at[4];
};

// An element, as its offset from the start of its group. Everything that depends only on the
// group is computed once, so that an address takes one instruction.
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

// Loads a unit. A short unit repeats its first element, which changes
// neither the least nor the greatest of its group.
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

// Stores a unit. kOnce selects device::store_once.
template <class Type, bool kWhole, bool kOnce = false>
__device__ void store_unit(const uint32_t (&words)[4], void* to, Place at, int count) {
  char* const start = at.in<Type::kBytes>(static_cast<char*>(to));
  if (kWhole) {
    const Sixteen all{words[0], words[1], words[2], words[3]};
    if (kOnce) {
      device::store_once(all, start);
    } else {
      *reinterpret_cast<Sixteen*>(start) = all;
    }
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

struct alignas(8) Levels {  // levels of a unit, the first in the lowest bits
  uint32_t low, high;       // the high word is used only for eight levels of eight bits
};

// The bytes of this many levels.
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

// Packs four-bit levels, the first in the lowest bits, from floats whose low bits they are. Symmetric levels
// get an offset of 8 until the end, so that none borrows from the next one's bits.
template <int kUnit, bool kSymmetric>
__device__ uint32_t pack_halves(const float* rounded) {
  uint32_t all = 0, others = 0;  // `others`: the bits that are not levels
#pragma unroll
  for (int k = kUnit - 1; k >= 0; --k) {
    all = all * 16 + __float_as_uint(rounded[k]);
    others = others * 16 + (0x4b400000u - (kSymmetric ? 8 : 0));  // kRounder
  }
  return (all - others) ^ (kSymmetric ? 0x88888888u >> (32 - 4 * kUnit) : 0u);
}

// Packs levels from floats whose low bits they are (see kRounder).
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
    out.low = pack_halves<kUnit, kSymmetric>(rounded);
    if (count < kUnit) {  // clears the half byte that no element uses
      out.low &= (1u << (4 * count)) - 1;
    }
  }
  out.low &= keep;
  out.high &= keep;
  return out;
}

// Unpacks levels to floats: each becomes the low bits of a float near 2^23, which is then subtracted. Half
// bytes stay in place in their word, as multiples of a power of 16, until the multiplication, which is exact.
template <int kUnit>
__device__ void unpack(Levels levels, const Format& format, float* to) {
  constexpr float kBase = 0x1p23f;
  constexpr uint32_t kBits = 0x4b000000u;  // the bits of kBase
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
