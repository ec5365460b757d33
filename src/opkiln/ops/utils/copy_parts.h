// What the bindings hand to the kernel. Needs neither torch's headers nor CUDA's.
#pragma once

#include <cstddef>
#include <cstdint>

namespace opkiln {

struct Part {
  const std::byte* from;
  std::byte* to;
  int64_t bytes;
};

// Enqueues the copies, in one launch or few, on a stream of the current device. Null, or the text of
// CUDA's error. Does not wait, allocates nothing.
const char* enqueue_copies(const Part* parts, std::size_t count, void* stream);

}  // namespace opkiln
