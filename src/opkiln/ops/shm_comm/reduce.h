// Combines a range of several ranks' elements, in the order of the ranks, with one rounding. The order does
// not depend on who computes or when, so all ranks get the same bits.
#pragma once

#include <opkiln/vec.h>

namespace {

enum class Reduce : uint32_t { kSum, kMean, kProduct, kMax, kMin };
constexpr const char* kReduceNames[] = {"sum", "mean", "product", "max", "min"};

struct Add {
  static float of(float a, float b) { return a + b; }
};
struct Multiply {
  static float of(float a, float b) { return a * b; }
};
struct Larger {  // NaN if either is NaN
  static float of(float a, float b) { return (b > a) | (b != b) ? b : a; }
};
struct Smaller {
  static float of(float a, float b) { return (b < a) | (b != b) ? b : a; }
};

constexpr int64_t kBlock = 512;  // in floats; a block stays in the L1 cache

// The elements of a block as floats: the original memory, or widened into `wide`.
inline const float* widen_block(const float* from, int64_t, float*) { return from; }
template <class T>
const float* widen_block(const T* from, int64_t count, float* wide) {
  using opkiln::Vec;
  int64_t i = 0;
  for (; i + Vec::kLanes <= count; i += Vec::kLanes) Vec::load(from + i).store(wide + i);
  for (; i < count; ++i) wide[i] = opkiln::widen(from[i]);
  return wide;
}

inline void narrow(const float* from, int64_t count, float* to) {
  __builtin_memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
}
template <class T>
void narrow(const float* from, int64_t count, T* to) {
  using opkiln::Vec;
  int64_t i = 0;
  for (; i + Vec::kLanes <= count; i += Vec::kLanes) Vec::load(from + i).store(to + i);
  if (i < count) {
    float rest[Vec::kLanes] = {};
    T rounded[Vec::kLanes];
    __builtin_memcpy(rest, from + i, static_cast<size_t>(count - i) * sizeof(float));
    Vec::load(rest).store(rounded);
    __builtin_memcpy(to + i, rounded, static_cast<size_t>(count - i) * sizeof(T));
  }
}

// Combines sources[0][i], sources[1][i], ... into out[i], and also
// into `also` unless it is null. `out` may be one of the sources.
template <class Pair, class T>
void combine(const T* const* sources, int64_t size, int64_t count, bool mean, T* out, T* also) {
  alignas(64) float sum[kBlock], wide[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t length = count - begin < kBlock ? count - begin : kBlock;
    const float* left = widen_block(sources[0] + begin, length, sum);
    for (int64_t r = 1; r < size; ++r) {
      const float* const right = widen_block(sources[r] + begin, length, wide);
      for (int64_t i = 0; i < length; ++i) sum[i] = Pair::of(left[i], right[i]);
      left = sum;
    }
    if (mean) {
      const float ranks = static_cast<float>(size);
      for (int64_t i = 0; i < length; ++i) sum[i] = left[i] / ranks;
      left = sum;
    }
    narrow(left, length, out + begin);
    if (also != nullptr) {
      __builtin_memcpy(also + begin, out + begin, static_cast<size_t>(length) * sizeof(T));
    }
  }
}

template <class T>
void combine(Reduce how, const T* const* sources, int64_t size, int64_t count, T* out, T* also) {
  switch (how) {
    case Reduce::kSum: return combine<Add>(sources, size, count, false, out, also);
    case Reduce::kMean: return combine<Add>(sources, size, count, true, out, also);
    case Reduce::kProduct: return combine<Multiply>(sources, size, count, false, out, also);
    case Reduce::kMax: return combine<Larger>(sources, size, count, false, out, also);
    case Reduce::kMin: return combine<Smaller>(sources, size, count, false, out, also);
  }
}

}  // namespace
