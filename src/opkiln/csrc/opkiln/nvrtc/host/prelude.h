// Precedes the .cu in the host half of an NVRTC build, which g++ compiles, as cuda_runtime.h precedes it in nvcc:
// CUDA's keywords and vector types. __global__, __device__ and the like stay in the preprocessed text, where
// opkiln/machine/nvrtc/cut.py reads and removes them.
#pragma once

#define __HOST_DEFINES_H__  // skips CUDA's own header, which would define these words as nothing
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __inline_hint__
#define __specialization_static
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__

#include <vector_types.h>
#include <vector_functions.h>
