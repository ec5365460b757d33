// Shared by the CPU kernels of both directions: blocks of rows as floats, products of blocks, and scores.
//
// Rows of buffers are padded to multiples of 16 floats, and everything past a
// tensor's last row or column is zero. So vector loops have no remainder.
#pragma once

#include <opkiln/arguments.h>
#include <opkiln/floats.h>
#include <opkiln/vec_exp.h>

#include "work.h"

namespace sparse __attribute__((visibility("hidden"))) {

using opkiln::as_float;
using opkiln::Vec;

constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;
constexpr float kMinusInfinity = -__builtin_inff();

inline int64_t round_up_to_16(int64_t count) { return (count + 15) / 16 * 16; }

// A zeroed array of floats.
class Buffer {
 public:
  explicit Buffer(int64_t count) : data_(new float[static_cast<size_t>(count)]()) {}
  Buffer(const Buffer&) = delete;
  ~Buffer() { delete[] data_; }
  operator float*() const { return data_; }

 private:
  float* data_;
};

// The blocks of one head of a tensor, [tokens, columns].
template <class T>
struct Head {
  T* data;
  int64_t stride, step;  // strides of a token and of a column
  int64_t tokens, columns, block;

  int64_t rows(int64_t number) const {
    const int64_t left = tokens - number * block;
    return left < block ? left : block;
  }
  T* row(int64_t number, int64_t i) const { return data + (number * block + i) * stride; }

  // Loads a block as rows of `wide` floats.
  void load(int64_t number, float* to, int64_t wide) const {
    for (int64_t i = 0; i < block; ++i) {
      float* const out = to + i * wide;
      int64_t j = 0;
      if (i < rows(number)) {
        const T* const from = row(number, i);
        if (step == 1) {
          for (; j + Vec::kLanes <= columns; j += Vec::kLanes) Vec::load(from + j).store(out + j);
        }
        for (; j < columns; ++j) out[j] = as_float(from[j * step]);
      }
      for (; j < wide; ++j) out[j] = 0;
    }
  }

  // The same, transposed: [wide, block].
  void load_transposed(int64_t number, float* to, int64_t wide) const {
    for (int64_t j = 0; j < wide * block; ++j) to[j] = 0;
    for (int64_t i = 0; i < rows(number); ++i) {
      const T* const from = row(number, i);
      for (int64_t j = 0; j < columns; ++j) to[j * block + i] = as_float(from[j * step]);
    }
  }

  // Rounds and stores a block. Row i is multiplied by factors[i], or by `factor`.
  void store(int64_t number, const float* from, int64_t wide, float factor, const float* factors = nullptr) const {
    for (int64_t i = 0; i < rows(number); ++i) {
      const float by = factors ? factors[i] : factor;
      T* const to = row(number, i);
      const float* const in = from + i * wide;
      int64_t j = 0;
      if (step == 1) {
        for (; j + Vec::kLanes <= columns; j += Vec::kLanes) (Vec::load(in + j) * Vec::all(by)).store(to + j);
      }
      for (; j < columns; ++j) opkiln::set_from(in[j] * by, to + j * step);
    }
  }
};

template <class T>
Head<T> head_of(T* data, const Tensor& x, int64_t batch, int64_t head, int64_t block) {
  return {data + batch * x.stride(0) + head * x.stride(1), x.stride(2), x.stride(3), x.size(2), x.size(3), block};
}

// sums[rows, columns] += left * right[inner, columns]. left(i, k) is at left[i *
// down + k * across], so `left` may be transposed. 4 rows and some vectors at a time
// stay in registers. columns must be a multiple of 16, rows of 4.
inline void add_product(float* sums, const float* left, int64_t down, int64_t across, const float* right, int64_t rows,
                        int64_t columns, int64_t inner) {
  constexpr int kRows = 4, kVectors = Vec::kLanes == 4 ? 4 : Vec::kLanes == 8 ? 2 : 1;
  for (int64_t i = 0; i < rows; i += kRows) {
    for (int64_t j = 0; j < columns; j += kVectors * Vec::kLanes) {
      Vec sum[kRows][kVectors];
      for (int r = 0; r < kRows; ++r) {
        for (int n = 0; n < kVectors; ++n) sum[r][n] = Vec::load(sums + (i + r) * columns + j + n * Vec::kLanes);
      }
      const float* a = left + i * down;
      for (int64_t k = 0; k < inner; ++k, a += across) {
        Vec b[kVectors];
        for (int n = 0; n < kVectors; ++n) b[n] = Vec::load(right + k * columns + j + n * Vec::kLanes);
        for (int r = 0; r < kRows; ++r) {
          const Vec by = Vec::all(a[r * down]);
          for (int n = 0; n < kVectors; ++n) sum[r][n] = multiply_add(by, b[n], sum[r][n]);
        }
      }
      for (int r = 0; r < kRows; ++r) {
        for (int n = 0; n < kVectors; ++n) sum[r][n].store(sums + (i + r) * columns + j + n * Vec::kLanes);
      }
    }
  }
}

// The visibility rules and biases of one head. Scores are exponents of 2.
template <class T>
struct Seen {
  const float* key_bias;
  const T* mask;
  const Rules& rules;
  int64_t tokens, block;

  Seen(const Rules& given, int64_t batch, int64_t head, int64_t count, int64_t size)
      : key_bias(given.key_bias ? given.key_bias + batch * count : nullptr),
        mask(static_cast<const T*>(given.mask)), rules(given), tokens(count), block(size) {
    if (mask) mask += batch * rules.mask_strides.batch + head * rules.mask_strides.head;
  }

  // Turns the products of a block of queries and a block of keys, [block, block], into scores.
  void finish(float* scores, int64_t queries, int64_t keys) const {
    const float scale = rules.scale * kLog2E;
    for (int64_t i = 0; i < block; ++i) {
      float* const row = scores + i * block;
      const int64_t query = queries * block + i, first = keys * block;
      for (int64_t j = 0; j < block; ++j) row[j] *= scale;
      if (query >= tokens) continue;
      const int64_t end = tokens - first < block ? tokens - first : block;
      if (key_bias) {
        for (int64_t j = 0; j < end; ++j) row[j] += key_bias[first + j] * kLog2E;
      }
      if (mask) {
        const T* const added = mask + query * rules.mask_strides.token + first;
        for (int64_t j = 0; j < end; ++j) {
          const float found = as_float(added[j]);
          row[j] += (!rules.multiply ? found : found == 0 ? kMinusInfinity : 0) * kLog2E;
        }
      }
      const int64_t low = query - rules.most - first, high = query - rules.least - first;
      for (int64_t j = 0; j < low && j < block; ++j) row[j] = kMinusInfinity;
      for (int64_t j = high < -1 ? 0 : high + 1; j < end; ++j) row[j] = kMinusInfinity;
      for (int64_t j = end; j < block; ++j) row[j] = kMinusInfinity;
    }
  }
};

}  // namespace sparse
