// Registers host memory with the driver, which locks the pages and lets devices access them
// without a copy. Only libraries built with nvcc or hipcc contain the runtime functions called
// here. (NVRTC is tried only for files that include op.h themselves.)

#include "memory.h"

namespace {

const char* text_of(cudaError_t error) {
  if (error == cudaSuccess) {
    return nullptr;
  }
  (void)cudaGetLastError();  // otherwise the next launch would report it
  return cudaGetErrorString(error);
}

const char* lock(void* memory, size_t bytes) {
  return text_of(cudaHostRegister(memory, bytes, cudaHostRegisterPortable));
}

const char* unlock(void* memory, size_t) {
  return text_of(cudaHostUnregister(memory));
}

}  // namespace

// The first tensor is on the host, so the device is not current yet.
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
