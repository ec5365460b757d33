// Locks pages with mlock, for machines without a GPU.

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "memory.h"

namespace {

const char* lock(void* memory, size_t bytes) {
  return mlock(memory, bytes) == 0 ? nullptr : strerror(errno);
}

const char* unlock(void* memory, size_t bytes) {
  return munlock(memory, bytes) == 0 ? nullptr : strerror(errno);
}

}  // namespace

void lock_pages_(Tensor& memory, const Tensor& /*device*/) {
  call_on(memory, "lock", lock);
}

void unlock_pages_(Tensor& memory, const Tensor& /*device*/) {
  call_on(memory, "unlock", unlock);
}

OPKILN_OP(lock_pages_, cpu);
OPKILN_OP(unlock_pages_, cpu);
