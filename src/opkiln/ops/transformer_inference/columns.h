// The 16-byte vectors of a matrix, one per thread. For CUDA, HIP and the emulator.
#pragma once

#include <opkiln/op.h>
#include <opkiln/sixteen_bytes.h>

namespace {

// Small blocks, and one vector per thread: loads in flight are close
// to each other, and blocks are replaced quickly.
constexpr int kThreads = 128;

// A matrix of 16-byte vectors.
struct Matrix {
  uint32_t vectors;  // in all
  uint32_t columns;  // vectors in a row
};

// Whether there can be a thread for each vector.
inline bool is_countable(int64_t vectors) { return vectors < int64_t{0xffffffff} - kThreads; }

inline Matrix matrix_of(int64_t rows, int64_t vectors_of_row) {
  return {static_cast<uint32_t>(rows * vectors_of_row), static_cast<uint32_t>(vectors_of_row)};
}

inline int64_t blocks_of(const Matrix& matrix) { return (int64_t{matrix.vectors} + kThreads - 1) / kThreads; }

// This thread's vector. The last threads may have none.
__device__ inline uint32_t my_vector() { return blockIdx.x * kThreads + threadIdx.x; }

}  // namespace
