// What the bindings hand to the kernels, on a device and on the CPU alike. Needs neither torch's
// headers nor CUDA's. (Not named cuda.h: hipify would take it for CUDA's own.)
#pragma once

#include <cstdint>

namespace opkiln {
namespace packbits {

// The elements and their signs; which of the two is read, the function says.
struct Signs {
  void* elements;
  uint8_t* bytes;
  int64_t numel;
  bool wide;     // elements of 4 bytes, not 2
  uint32_t one;  // the bits of 1 in an element
};

// Enqueue on a stream of the current device. Null, or the text of CUDA's error.
const char* enqueue_pack(const Signs& signs, void* stream);
const char* enqueue_unpack(const Signs& signs, void* stream);

}  // namespace packbits
}  // namespace opkiln
