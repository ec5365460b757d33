// Walks of a thread over the vectors of a matrix, with their columns. For CUDA, HIP and the emulator.
#pragma once

#include <opkiln/op.h>
#include <opkiln/sixteen_bytes.h>

namespace {

constexpr int kThreads = 256;
constexpr int kTurns = 4;  // vectors of a thread: as many accesses to each tensor are in flight

// The vectors of 16 bytes that a block of kThreads threads processes are neighbours. So are those of its
// threads in each turn.
struct Matrix {
  uint32_t vectors;  // in all
  uint32_t columns;  // vectors in a row
  uint32_t step_rows, step_columns;  // kThreads vectors further
};

// Whether walks can go over so many vectors.
inline bool can_walk(int64_t vectors) { return vectors < int64_t{0xffffffff} - kThreads * kTurns; }

inline Matrix matrix_of(int64_t rows, int64_t vectors_of_row) {
  const uint32_t columns = static_cast<uint32_t>(vectors_of_row);
  return {static_cast<uint32_t>(rows) * columns, columns, kThreads / columns, kThreads % columns};
}

inline int64_t blocks_of(const Matrix& matrix) {
  return (int64_t{matrix.vectors} + kThreads * kTurns - 1) / (kThreads * kTurns);
}

// Calls body(turn, vector, row, column) for each vector of this thread. One division serves all turns.
template <class Body>
__device__ inline void walk(const Matrix& m, const Body& body) {
  uint32_t vector = blockIdx.x * (kThreads * kTurns) + threadIdx.x;
  uint32_t row = vector / m.columns, column = vector % m.columns;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    if (vector < m.vectors) {
      body(turn, vector, row, column);
    }
    vector += kThreads;
    row += m.step_rows;
    column += m.step_columns;
    if (column >= m.columns) {
      column -= m.columns;
      ++row;
    }
  }
}

}  // namespace
