// Random bits as a function of an element's position: Philox4x32 (Salmon et al., 2011). The bits are the same
// on the host, on devices and in pure PyTorch (ops/quantizer/reference.py). Each thread computes the bits of
// its own elements, so nothing is stored and the order does not matter.
#pragma once

#include "op/types.h"

namespace opkiln {

struct RandomWords {
  uint32_t at[4];
};

// Internal linkage: libraries for several instruction sets in one
// process must not share a copy of these functions.

constexpr int kRandomRounds = 10;  // the authors' tests pass from seven on

OPK_HOST_DEVICE static inline void random_round(uint32_t& c0, uint32_t& c1, uint32_t& c2,
                                                   uint32_t& c3, uint32_t k0, uint32_t k1) {
  const uint64_t p0 = static_cast<uint64_t>(c0) * 0xD2511F53u;
  const uint64_t p1 = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
  c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
  c1 = static_cast<uint32_t>(p1);
  c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
  c3 = static_cast<uint32_t>(p0);
}

OPK_HOST_DEVICE static inline void next_random_key(uint32_t& k0, uint32_t& k1) {
  k0 += 0x9E3779B9u;
  k1 += 0xBB67AE85u;
}

// The keys of all rounds, computed once.
template <int kRounds = kRandomRounds>
struct RandomKeys {
  uint32_t at[2 * kRounds];
};

template <int kRounds = kRandomRounds>
OPK_HOST_DEVICE static inline RandomKeys<kRounds> random_keys(uint64_t key) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  RandomKeys<kRounds> keys;
  for (int round = 0; round < kRounds; ++round) {
    keys.at[2 * round] = k0;
    keys.at[2 * round + 1] = k1;
    next_random_key(k0, k1);
  }
  return keys;
}

// The words for a 128-bit counter, given as two halves. Device code should take the keys from the parameters
// of the launch, where instructions read them without a register.
template <int kRounds>
OPK_HOST_DEVICE static inline RandomWords random_words(uint64_t low, uint64_t high,
                                                          const RandomKeys<kRounds>& keys) {
  uint32_t c0 = static_cast<uint32_t>(low), c1 = static_cast<uint32_t>(low >> 32);
  uint32_t c2 = static_cast<uint32_t>(high), c3 = static_cast<uint32_t>(high >> 32);
  for (int round = 0; round < kRounds; ++round) {
    random_round(c0, c1, c2, c3, keys.at[2 * round], keys.at[2 * round + 1]);
  }
  return {{c0, c1, c2, c3}};
}

// The same, from the key itself.
OPK_HOST_DEVICE static inline RandomWords random_words(uint64_t low, uint64_t high,
                                                          uint64_t key) {
  return random_words(low, high, random_keys<>(key));
}

// Elements per call: four per word.
constexpr int kRandomElements = 16;

// 16 bits for the element with this `index`, 0 to 15: its word, rotated by 0 to 3 bytes. The upper eight bits
// are this element's alone. The lower eight are a neighbour's upper eight, and they decide one time in 256.
// This is half the work of separate bits per element.
OPK_HOST_DEVICE static inline uint32_t sixteen_bits(const RandomWords& words, int index) {
  const uint32_t word = words.at[index >> 2];
  const int shift = 8 * (index & 3);
  return (word >> shift | word << (-shift & 31)) & 0xffffu;
}

}  // namespace opkiln
