// Pages that are never swapped out, for a machine without a GPU; the registration.

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "memory.h"

namespace {

using namespace opkiln;

void lock_pages(Tensor memory, Tensor /*device*/) {
  check_memory(memory);
  const auto bytes = static_cast<std::size_t>(memory.numel());
  const bool failed = bytes != 0 && mlock(memory.mutable_data_ptr(), bytes) != 0;
  check_done("lock", memory, failed ? std::strerror(errno) : nullptr);
}

void unlock_pages(Tensor memory, Tensor /*device*/) {
  check_memory(memory);
  const auto bytes = static_cast<std::size_t>(memory.numel());
  const bool failed = bytes != 0 && munlock(memory.mutable_data_ptr(), bytes) != 0;
  check_done("unlock", memory, failed ? std::strerror(errno) : nullptr);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(opkiln, CPU, m) {
  m.impl("lock_pages_", TORCH_BOX(&lock_pages));
  m.impl("unlock_pages_", TORCH_BOX(&unlock_pages));
}
