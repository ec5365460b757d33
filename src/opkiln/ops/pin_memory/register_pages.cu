// Host memory made known to the driver: it locks the pages, and devices reach them without a copy.

#include <cuda_runtime.h>

#include "register_pages.h"

namespace opkiln {

const char* register_pages(void* memory, std::size_t bytes) {
  const cudaError_t error = cudaHostRegister(memory, bytes, cudaHostRegisterPortable);
  if (error == cudaSuccess) {
    return nullptr;
  }
  cudaGetLastError();  // or the next launch would report it as its own
  return cudaGetErrorString(error);
}

const char* unregister_pages(void* memory) {
  const cudaError_t error = cudaHostUnregister(memory);
  if (error == cudaSuccess) {
    return nullptr;
  }
  cudaGetLastError();
  return cudaGetErrorString(error);
}

}  // namespace opkiln
