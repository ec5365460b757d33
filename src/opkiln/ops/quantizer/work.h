// The parameters of a call, shared by devices and the CPU.
#pragma once

#include <opkiln/element_type.h>
#include <opkiln/group_order.h>

namespace opkiln {
namespace quantizer {

constexpr int kRounds = 7;  // of Philox: three fewer than usual, which would make a GPU's kernels slower
constexpr int kChunk = 8;   // group sizes are multiples of this
constexpr int64_t kSmallestGroup = 16, kLargestGroup = 65536;
constexpr int kMostParts = 128;  // the most in one reduction: this many fit into a launch's parameters

struct Format {
  int bits;  // 4 or 8
  int group_size;
  bool symmetric;
  bool full;  // symmetric levels go down to -2^(bits - 1); only quantizing uses this
};

// Levels with their scales, and with offsets unless the format is symmetric.
struct Quantized {
  uint8_t* values;
  float* scales;
  float* offsets;
};

struct Random {
  bool stochastic;
  uint64_t seed, offset;
  const int64_t* offset_at;  // null, or read by the kernel in place of `offset`
};

// The parameters of a call. Quantizing reads `from`; dequantizing reads `to`.
struct Work {
  int64_t numel;
  ElementType type;  // the type of `from` and `out`
  const void* from;  // null: the sum of the parts is quantized
  float* error;      // null, or added to the input, and receives the rounding error
  void* out;         // the output of fake quantizing and of dequantizing
  Quantized to;      // null values: fake quantizing
  Format format;
  GroupOrder order;
  Random random;
};

struct Parts {
  int count;
  Format format;
  float factor;  // multiplies the sum
  Quantized at[kMostParts];
};

inline int64_t groups_of(int64_t numel, const Format& format) {
  return (numel + format.group_size - 1) / format.group_size;
}

}  // namespace quantizer
}  // namespace opkiln
