// Host memory made known to the driver: it locks the pages, and devices reach them without a copy.
// Only nvcc's and HIP's libraries have the runtime that is called here. (NVRTC is tried for a file that
// includes op.h itself.)

#include "memory.h"

namespace {

const char* text_of(cudaError_t error) {
  if (error == cudaSuccess) {
    return nullptr;
  }
  (void)cudaGetLastError();  // or the next launch would report it as its own
  return cudaGetErrorString(error);
}

const char* lock(void* memory, size_t bytes) {
  return text_of(cudaHostRegister(memory, bytes, cudaHostRegisterPortable));
}

const char* unlock(void* memory, size_t) {
  return text_of(cudaHostUnregister(memory));
}

}  // namespace

// The first tensor is the host's, so the device is not current yet.
void lock_pages_(Tensor& memory, const Tensor& device) {
  const opk::DeviceGuard guard(device);
  call_on(memory, "lock", lock);
}

void unlock_pages_(Tensor& memory, const Tensor& device) {
  const opk::DeviceGuard guard(device);
  call_on(memory, "unlock", unlock);
}

OPKILN_OP(lock_pages_, cuda);
OPKILN_OP(unlock_pages_, cuda);
