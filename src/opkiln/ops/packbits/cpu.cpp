// Signs to bits and back on host memory. Loops are plain, for the compiler to vectorize.

#include "cpu.h"

#include <algorithm>

namespace {

using namespace opkiln;
using packbits::Signs;

constexpr int64_t kBytes = 64;  // at a time: 512 elements, whose signs stay in the cache

// Eight bytes of 0 or 1, the first in the lowest, to the bits of one, the first in the highest: bit i
// of the factor's byte i moves each to its place in the product's top byte, and nothing carries.
uint8_t gathered(const uint8_t* signs) {
  uint64_t word = 0;
  for (int k = 0; k < 8; ++k) {
    word |= static_cast<uint64_t>(signs[k]) << (8 * k);
  }
  return static_cast<uint8_t>((word * 0x8040201008040201u) >> 56);
}

template <class Bits>
void pack(const Signs& signs, int64_t first, int64_t last) {
  constexpr int kShift = sizeof(Bits) * 8 - 1;
  const Bits* const elements = static_cast<const Bits*>(signs.elements);
  for (int64_t at = first; at < last; at += kBytes) {
    const int64_t bytes = std::min(last - at, kBytes);
    const int64_t count = std::min(bytes * 8, signs.numel - at * 8);
    uint8_t positive[kBytes * 8];
    for (int64_t i = 0; i < count; ++i) {
      positive[i] = static_cast<uint8_t>(static_cast<Bits>(~elements[at * 8 + i]) >> kShift);
    }
    std::fill(positive + count, positive + bytes * 8, uint8_t{0});
    for (int64_t i = 0; i < bytes; ++i) {
      signs.bytes[at + i] = gathered(positive + 8 * i);
    }
  }
}

template <class Bits>
void unpack(const Signs& signs, int64_t first, int64_t last) {
  constexpr int kShift = sizeof(Bits) * 8 - 1;
  const Bits one = static_cast<Bits>(signs.one);
  Bits* const elements = static_cast<Bits*>(signs.elements);
  for (int64_t at = first; at < last; ++at) {
    const Bits negative = static_cast<Bits>(~signs.bytes[at]);
    const int64_t count = std::min<int64_t>(8, signs.numel - at * 8);
    Bits eight[8];
    for (int k = 0; k < 8; ++k) {
      eight[k] = static_cast<Bits>(one | static_cast<Bits>(negative >> (7 - k) & 1) << kShift);
    }
    std::memcpy(elements + at * 8, eight, static_cast<std::size_t>(count) * sizeof(Bits));
  }
}

}  // namespace

OPKILN_NAMESPACE_BEGIN

void pack_bytes(const Signs& signs, int64_t first, int64_t last) {
  return signs.wide ? pack<uint32_t>(signs, first, last) : pack<uint16_t>(signs, first, last);
}

void unpack_bytes(const Signs& signs, int64_t first, int64_t last) {
  return signs.wide ? unpack<uint32_t>(signs, first, last) : unpack<uint16_t>(signs, first, last);
}

OPKILN_NAMESPACE_END
