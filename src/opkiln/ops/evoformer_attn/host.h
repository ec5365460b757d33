// Parts of the CPU kernels: small matrix products on vectors, and the scores of a block of queries.
//
// A unit of work is a head of a row, widened to fp32 in buffers that stay in the cache. Only the scores of a
// block of queries exist at a time, so memory grows with the length, not with its square.
#pragma once

#include <opkiln/arguments.h>
#include <opkiln/floats.h>
#include <opkiln/vec_exp.h>

#include "call.h"

OPKILN_NAMESPACE_BEGIN
namespace evoformer {

using ::evoformer::Sizes;
using ::evoformer::Strides;

constexpr int64_t kQueries = 16;  // queries whose scores are computed together
constexpr int64_t kColumns = 16;  // rows in buffers are padded to a multiple of this
constexpr float kMinusInfinity = -__builtin_inff();

inline int64_t pad_count(int64_t count) { return (count + kColumns - 1) / kColumns * kColumns; }

inline void clear(float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] = 0;
}

// A thread's scratch memory.
class Buffer {
 public:
  explicit Buffer(int64_t count) : values_(new float[static_cast<size_t>(count)]), next_(values_) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { delete[] values_; }
  float* take(int64_t count) {
    float* const out = next_;
    next_ += count;
    clear(out, count);
    return out;
  }

 private:
  float *values_, *next_;
};

// A matrix in a buffer: element (i, j) is at[i * row + j * column].
struct Matrix {
  float* at;
  int64_t row, column = 1;
  Matrix transpose() const { return {at, column, row}; }
};

template <int kRows, bool kAdd>
inline void multiply_rows(const Matrix& a, const Matrix& b, const Matrix& c, int64_t columns, int64_t depth) {
  constexpr int kVecs = kColumns / Vec::kLanes;
  for (int64_t first = 0; first < columns; first += kColumns) {
    Vec sum[kRows][kVecs];
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kVecs; ++i) {
        sum[r][i] = kAdd ? Vec::load(c.at + r * c.row + first + i * Vec::kLanes) : Vec::all(0);
      }
    }
    for (int64_t k = 0; k < depth; ++k) {
      Vec right[kVecs];
      for (int i = 0; i < kVecs; ++i) right[i] = Vec::load(b.at + k * b.row + first + i * Vec::kLanes);
      for (int r = 0; r < kRows; ++r) {
        const Vec left = Vec::all(a.at[r * a.row + k * a.column]);
        for (int i = 0; i < kVecs; ++i) sum[r][i] = multiply_add(left, right[i], sum[r][i]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kVecs; ++i) sum[r][i].store(c.at + r * c.row + first + i * Vec::kLanes);
    }
  }
}

// c = a * b, or c += a * b. c has `rows` rows, and its columns are a multiple of kColumns.
template <bool kAdd>
void multiply(const Matrix& a, const Matrix& b, const Matrix& c, int64_t rows, int64_t columns, int64_t depth) {
  // sums that fit into the registers, and enough of them to hide latency
  constexpr int kRows = Vec::kLanes == 16 ? 8 : 4;
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows) {
    multiply_rows<kRows, kAdd>({a.at + r * a.row, a.row, a.column}, b, {c.at + r * c.row, c.row}, columns, depth);
  }
  for (; r < rows; ++r) {
    multiply_rows<1, kAdd>({a.at + r * a.row, a.row, a.column}, b, {c.at + r * c.row, c.row}, columns, depth);
  }
}

// A head of a row in a tensor [batch, row, place, head, element].
template <class T>
struct Head {
  const T* at;
  int64_t place;
  Head(const void* data, const Strides& strides, int64_t batch, int64_t row, int64_t head)
      : at(static_cast<const T*>(data) + batch * strides.batch + row * strides.row + head * strides.head),
        place(strides.place) {}

  void load_rows(const Matrix& to, int64_t first, int64_t count, int64_t elements) const {
    for (int64_t i = 0; i < count; ++i) load_floats(at + (first + i) * place, to.at + i * to.row, elements);
  }
  void load_columns(const Matrix& to, int64_t count, int64_t elements) const {
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t d = 0; d < elements; ++d) to.at[d * to.row + i] = as_float(at[i * place + d]);
    }
  }
};

// The mask of a row, times log2(e); minus infinity past its end.
template <class T>
void load_mask(const void* mask, int64_t row, int64_t length, float* to) {
  if (mask) {
    load_floats(static_cast<const T*>(mask) + row * length, to, length);
    for (int64_t i = 0; i < length; ++i) to[i] *= static_cast<float>(::evoformer::kLog2E);
  }
  for (int64_t i = length; i < pad_count(length); ++i) to[i] = kMinusInfinity;
}

// Turns a query's products with keys into scores, times log2(e), in
// place. `bias` is scratch memory for a row.
template <class T>
void add_biases(float* scores, const T* pair, const float* mask, float scale, int64_t length, float* bias) {
  if (pair) load_floats(pair, bias, length);
  const Vec factor = Vec::all(scale * static_cast<float>(::evoformer::kLog2E));
  const Vec log2e = Vec::all(static_cast<float>(::evoformer::kLog2E));
  for (int64_t i = 0; i < pad_count(length); i += Vec::kLanes) {
    Vec sum = Vec::load(mask + i);
    if (pair) sum = multiply_add(Vec::load(bias + i), log2e, sum);
    multiply_add(Vec::load(scores + i), factor, sum).store(scores + i);
  }
}

}  // namespace evoformer
OPKILN_NAMESPACE_END
