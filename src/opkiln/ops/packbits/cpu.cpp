// Packs signs into bits, and unpacks them, on host memory. The loops
// are plain, so that the compiler vectorizes them.

#include "signs.h"

namespace {

constexpr int64_t kBytes = 64;  // bytes at a time: the signs of 512 elements stay in the cache

// Packs eight bytes of 0 or 1 into one byte, the first into the highest bit. Bit i of the factor's byte i
// moves each bit to its place in the product's top byte, without carries.
uint8_t pack_signs(const uint8_t* signs) {
  uint64_t word = 0;
  for (int k = 0; k < 8; ++k) {
    word |= static_cast<uint64_t>(signs[k]) << (8 * k);
  }
  return static_cast<uint8_t>((word * 0x8040201008040201u) >> 56);
}

template <class Bits>
void pack_bytes(const Signs& signs, int64_t first, int64_t last) {
  constexpr int kShift = sizeof(Bits) * 8 - 1;
  const Bits* const elements = static_cast<const Bits*>(signs.elements);
  for (int64_t at = first; at < last; at += kBytes) {
    const int64_t left = signs.numel - at * 8;
    const int64_t bytes = last - at < kBytes ? last - at : kBytes;
    const int64_t count = left < bytes * 8 ? left : bytes * 8;
    uint8_t positive[kBytes * 8];
    for (int64_t i = 0; i < count; ++i) {
      positive[i] = static_cast<uint8_t>(static_cast<Bits>(~elements[at * 8 + i]) >> kShift);
    }
    for (int64_t i = count; i < bytes * 8; ++i) {
      positive[i] = 0;
    }
    for (int64_t i = 0; i < bytes; ++i) {
      signs.bytes[at + i] = pack_signs(positive + 8 * i);
    }
  }
}

template <class Bits>
void unpack_bytes(const Signs& signs, int64_t first, int64_t last) {
  constexpr int kShift = sizeof(Bits) * 8 - 1;
  const Bits one = static_cast<Bits>(signs.one);
  Bits* const elements = static_cast<Bits*>(signs.elements);
  for (int64_t at = first; at < last; ++at) {
    const Bits negative = static_cast<Bits>(~signs.bytes[at]);
    const int64_t left = signs.numel - at * 8;
    Bits eight[8];
    for (int k = 0; k < 8; ++k) {
      eight[k] = static_cast<Bits>(one | static_cast<Bits>(negative >> (7 - k) & 1) << kShift);
    }
    __builtin_memcpy(elements + at * 8, eight, (left < 8 ? left : 8) * sizeof(Bits));
  }
}

// Runs the body in torch's thread pool. Small tensors stay on the calling thread.
void parallel_bytes(const Signs& signs, void (*body)(const Signs&, int64_t, int64_t)) {
  opk::parallel_for(0, (signs.numel + 7) / 8, opk::kGrainBytes / 32,
                    [&](int64_t first, int64_t last) { body(signs, first, last); });
}

void pack(const Signs& signs) {
  parallel_bytes(signs, signs.wide ? pack_bytes<uint32_t> : pack_bytes<uint16_t>);
}

void unpack(const Signs& signs) {
  parallel_bytes(signs, signs.wide ? unpack_bytes<uint32_t> : unpack_bytes<uint16_t>);
}

}  // namespace

OPKILN_OP(packbits, cpu);
OPKILN_OP(unpackbits, cpu);
