// What the binding hands to the kernels. Needs no torch header, so the two compile side by side.
#pragma once

#include <opkiln/streams.h>

OPKILN_NAMESPACE_BEGIN

struct Quantizing {
  Stream input;
  uint8_t* codes;
  float* scales;
  int64_t numel, group_size, bits, mantissa_bits;
  bool stochastic;
  uint64_t seed, offset;
};

struct Dequantizing {
  const uint8_t* codes;
  const float* scales;
  Stream output;
  int64_t group_size, bits, mantissa_bits;
};

// The groups [low, high).
void quantize_groups(const Quantizing& work, int64_t low, int64_t high);

// `count` elements from `source` on, to the output from `target` on.
void dequantize_range(const Dequantizing& work, int64_t source, int64_t target, int64_t count);

OPKILN_NAMESPACE_END
