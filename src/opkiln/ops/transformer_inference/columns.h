// Walks of a thread over the vectors of a matrix, with their columns. For CUDA, HIP and the emulator.
#pragma once

#include <opkiln/op.h>
#include <opkiln/sixteen_bytes.h>

namespace {

constexpr int kThreads = 256;
constexpr int kTurns = 1;  // vectors of a thread: as many accesses to each tensor are in flight
constexpr int64_t kFewBlocks = 256;  // do not fill a large GPU: then a thread has one vector

// The vectors of 16 bytes that a block of kThreads threads processes are neighbours. So are those of its
// threads in each turn.
struct Matrix {
  uint32_t vectors;  // in all
  uint32_t block;    // of a block
  uint32_t columns;  // vectors in a row
  uint32_t step_rows, step_columns;  // kThreads vectors further
};

// Whether walks can go over so many vectors.
inline bool can_walk(int64_t vectors) { return vectors < int64_t{0xffffffff} - kThreads * kTurns; }

inline Matrix matrix_of(int64_t rows, int64_t vectors_of_row) {
  const uint32_t columns = static_cast<uint32_t>(vectors_of_row);
  const bool few = rows * vectors_of_row <= kFewBlocks * kThreads * kTurns;
  return {static_cast<uint32_t>(rows) * columns, static_cast<uint32_t>(few ? kThreads : kThreads * kTurns),
          columns, kThreads / columns, kThreads % columns};
}

inline int64_t blocks_of(const Matrix& matrix) {
  return (int64_t{matrix.vectors} + matrix.block - 1) / matrix.block;
}

// Calls body(turn, vector, row, column) for each vector of this thread. One division serves all turns.
template <class Body>
__device__ inline void walk(const Matrix& m, const Body& body) {
  const uint32_t begin = blockIdx.x * m.block;
  const uint32_t end = m.vectors - begin < m.block ? m.vectors : begin + m.block;
  uint32_t vector = begin + threadIdx.x;
  uint32_t row = vector / m.columns, column = vector % m.columns;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    if (vector < end) {
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
