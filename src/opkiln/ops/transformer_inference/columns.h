// The vectors of a matrix, one for each thread. For CUDA, HIP and the emulator.
#pragma once

#include <opkiln/op.h>
#include <opkiln/sixteen_bytes.h>

namespace {

// Few threads of a block and one vector of each: so all loads that are in flight are neighbours, and blocks end
// and begin often.
constexpr int kThreads = 128;

// A matrix of vectors of 16 bytes.
struct Matrix {
  uint32_t vectors;  // in all
  uint32_t columns;  // vectors in a row
};

// Whether each of so many vectors can have a thread.
inline bool is_countable(int64_t vectors) { return vectors < int64_t{0xffffffff} - kThreads; }

inline Matrix matrix_of(int64_t rows, int64_t vectors_of_row) {
  return {static_cast<uint32_t>(rows * vectors_of_row), static_cast<uint32_t>(vectors_of_row)};
}

inline int64_t blocks_of(const Matrix& matrix) { return (int64_t{matrix.vectors} + kThreads - 1) / kThreads; }

// The vector of this thread. Behind the last one there may be threads without any.
__device__ inline uint32_t my_vector() { return blockIdx.x * kThreads + threadIdx.x; }

}  // namespace
