// What the binding calls. No header of CUDA's and none of torch's: both compilers read this.
#pragma once

#include <cstdint>

namespace cuda_op {

// out[i] = gelu(x[i] + bias[i % columns]), enqueued on the stream (a cudaStream_t or hipStream_t).
// Gives what is wrong in words, or nullptr.
const char* bias_gelu(const float* x, const float* bias, float* out, int64_t count,
                      int64_t columns, void* stream);

}  // namespace cuda_op
