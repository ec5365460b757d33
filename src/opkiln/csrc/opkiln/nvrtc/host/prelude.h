// Included before a .cu that g++ compiles beside NVRTC, as nvcc includes cuda_runtime.h: CUDA's words and
// its vector types. __global__, __device__ and the like stay as they are: opkiln/machine/nvrtc/cut.py reads them
// in the preprocessed text and takes them out.
#pragma once

#define __HOST_DEFINES_H__  // CUDA's own header would make nothing of these words
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
