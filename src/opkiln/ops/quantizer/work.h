// What the op works on, on a device and on the CPU alike.
#pragma once

#include <opkiln/element_type.h>

namespace opkiln {
namespace quantizer {

constexpr int kRounds = 7;  // of Philox: three fewer than usual, which a GPU has no time for
constexpr int kChunk = 8;   // group sizes are multiples of it
constexpr int64_t kSmallestGroup = 16, kLargestGroup = 65536;
constexpr int kMostParts = 128;  // in one reduction: what fits into a launch's parameters

struct Format {
  int bits;  // 4 or 8
  int group_size;
  bool symmetric;
  bool full;  // symmetric levels down to -2^(bits - 1), which quantizing alone has to know
};

// Levels with their scales, and offsets unless the format is symmetric.
struct Quantized {
  uint8_t* values;
  float* scales;
  float* offsets;
};

// The order of groups in memory: see reference.py. Of one node and one piece it is their own.
struct Order {
  uint32_t nodes, devices, pipeline;
  uint32_t piece;  // groups in one of nodes * devices * pipeline; 0: the groups' own order
};

struct Random {
  bool stochastic;
  uint64_t seed, offset;
  const int64_t* offset_at;  // where it is not null, stands in for offset: read by the kernel
};

// A call. Quantizing reads `from`, dequantizing `to`.
struct Work {
  int64_t numel;
  ElementType type;  // of `from` and `out`
  const void* from;  // null: the sum of parts is what is quantized
  float* error;      // added to what is quantized, and receives what is left out; null: none
  void* out;         // of fake quantizing, and of dequantizing
  Quantized to;      // null values: fake quantizing
  Format format;
  Order order;
  Random random;
};

struct Parts {
  int count;
  Format format;
  float factor;  // of the sum
  Quantized at[kMostParts];
};

inline int64_t groups_of(int64_t numel, const Format& format) {
  return (numel + format.group_size - 1) / format.group_size;
}

}  // namespace quantizer
}  // namespace opkiln
