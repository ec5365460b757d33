// What the binding calls. No header of CUDA's and none of torch's: both compilers read this.
#pragma once

#include <cstdint>

namespace kernels {

// out[i] = x[i] + scale * y[i], enqueued on the stream (a cudaStream_t or hipStream_t).
// Gives what is wrong in words, or nullptr.
const char* scaled_add(const float* x, const float* y, float scale, float* out, int64_t count,
                       void* stream);

}  // namespace kernels
