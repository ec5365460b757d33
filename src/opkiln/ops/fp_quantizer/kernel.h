// What the binding hands to the kernels. Needs neither torch's headers nor CUDA's, so that each side
// compiles without the other's.
#pragma once

#include <opkiln/element_type.h>

#include <cstdint>

namespace opkiln {
namespace fp_quantizer {

// All pointers are to device memory, `codes` and `scales` as an allocator gives them: aligned.
struct Quantize {
  const void* input;
  uint8_t* codes;
  float* scales;
  int64_t numel;
  int64_t group_size;
  int bits, mantissa_bits;
  ElementType type;
  bool stochastic;
  uint64_t seed, offset;
  const int64_t* offset_at;  // null, or: read when the kernel runs, and stands in for offset
};

// `output` as an allocator gives it: aligned.
struct Dequantize {
  const uint8_t* codes;
  const float* scales;
  void* output;
  int64_t numel;  // of the output
  int64_t group_size;
  int bits, mantissa_bits;
  ElementType type;
  const int64_t* rows;    // null: all of them, in order
  int64_t width, height;  // of what was quantized, in rows; for those that are asked for
};

// Enqueue the work on a stream of the current device. Null, or the text of CUDA's error. They do not
// wait and allocate nothing.
const char* enqueue(const Quantize& work, void* stream);
const char* enqueue(const Dequantize& work, void* stream);

}  // namespace fp_quantizer
}  // namespace opkiln
