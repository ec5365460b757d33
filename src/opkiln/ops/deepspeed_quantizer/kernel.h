// What the bindings hand to the kernels, on a device and on the CPU alike. Needs neither torch's
// headers nor CUDA's. (Not named cuda.h: hipify would take it for CUDA's own.)
#pragma once

#include <opkiln/element_type.h>

#include <cstddef>
#include <cstdint>

namespace opkiln {
namespace deepspeed_quantizer {

// Equal groups of elements: levels of four or eight bits, and a scale (and an offset) for each.
struct Groups {
  uint8_t* levels;
  float* params;  // one or two floats a group
  int64_t count, size;
  int bits;
  bool symmetric;
};

// The order of groups in memory, see reference.py.
struct Order {
  uint32_t nodes, devices, pipeline;
  uint32_t piece;  // groups in one of nodes * devices * pipeline; 0: the groups' own order
};

// A call. Quantizing reads `from` or the parts and writes `to`; dequantizing reads `to`.
struct Work {
  Groups to;
  const void* from;  // null: the sum of parts is what is quantized
  void* out;         // of dequantizing
  ElementType type;  // of `from` and `out`
  bool with_zero;    // 0 is in the range of every group
  Order order;
  Groups parts;      // of all parts together, one after the other
  int number_of_parts;
};

// Enqueue on a stream of the current device. Null, or the text of CUDA's error. They do not wait and
// allocate nothing.
const char* enqueue_quantize(const Work& work, void* stream);
const char* enqueue_dequantize(const Work& work, void* stream);

}  // namespace deepspeed_quantizer
}  // namespace opkiln
