// Torch's current stream of a GPU, without linking to torch's CUDA library: a CPU torch does not have
// it, and libraries are built there. Needs torch's stable headers, none of CUDA's.
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
      // RTLD_NOLOAD: only where torch has it in this process already.
      if (void* const library = dlopen(name, RTLD_NOLOAD | RTLD_LAZY)) {
        if (void* const found = dlsym(library, "aoti_torch_get_current_cuda_stream")) {
          return reinterpret_cast<Getter*>(found);
        }
      }
    }
    return static_cast<Getter*>(nullptr);
  }();
  if (getter == nullptr) {
    refuse("torch's current stream cannot be had: there is no aoti_torch_get_current_cuda_stream, "
           "so this torch was built without CUDA");
  }
  void* stream = nullptr;
  if (getter(device, &stream) != 0) {
    refuse("torch gave no current stream for " + name_of(device));
  }
  return stream;
}

OPKILN_NAMESPACE_END
