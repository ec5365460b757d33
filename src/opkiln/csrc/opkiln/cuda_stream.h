// Torch's current stream of a GPU, without linking to torch's CUDA library: libraries are also built
// with a CPU torch, which does not have it. Needs torch's stable headers, but not CUDA's.
#pragma once

#include <dlfcn.h>

#include <cstdint>

#include "tensors.h"

OPKILN_NAMESPACE_BEGIN

// The handle (a cudaStream_t, or a hipStream_t on ROCm). The device must be current.
inline void* current_stream(int32_t device) {
  using Getter = int32_t(int32_t, void**);  // a name and a signature of torch's stable C interface
  static Getter* const getter = [] {
    for (const char* name : {"libtorch_cuda.so", "libtorch_hip.so"}) {
      // RTLD_NOLOAD: only if torch has already loaded it in this process.
      if (void* const library = dlopen(name, RTLD_NOLOAD | RTLD_LAZY)) {
        if (void* const found = dlsym(library, "aoti_torch_get_current_cuda_stream")) {
          return reinterpret_cast<Getter*>(found);
        }
      }
    }
    return static_cast<Getter*>(nullptr);
  }();
  if (getter == nullptr) {
    refuse("torch's current stream is not available: aoti_torch_get_current_cuda_stream is missing, "
           "so this torch was built without CUDA");
  }
  void* stream = nullptr;
  if (getter(device, &stream) != 0) {
    refuse("torch returned no current stream for " + name_of(device));
  }
  return stream;
}

OPKILN_NAMESPACE_END
