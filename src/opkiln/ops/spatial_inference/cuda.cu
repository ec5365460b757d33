// Biases and residuals: a thread adds four vectors of 16 bytes, so that four to eight loads are in flight.
// No warp intrinsics: hipify turns this file into HIP as it is.

#include <opkiln/op.h>

#include "work.h"

namespace {

constexpr int kThreads = 256;
constexpr int kTurns = 4;
constexpr int64_t kVectors = kThreads * kTurns;  // of a block

// In fp32, except for fp64.
template <class T>
struct Wide {
  using type = float;
};
template <>
struct Wide<double> {
  using type = double;
};

template <class T>
constexpr int kWidth = 16 / sizeof(T);

template <class T>
struct alignas(16) Vector {
  T at[kWidth<T>];
};

// Rounds to nearest, ties to even.
template <class T>
__device__ inline T narrow(typename Wide<T>::type value) {
  return static_cast<T>(value);
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <>
__device__ inline opk::bfloat16 narrow<opk::bfloat16>(float value) {
  opk::bfloat16 out;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
  return out;
}
#endif

template <class T>
__device__ inline T sum(T x, T bias, T other, T other_bias, bool residual, bool residual_bias) {
  using W = typename Wide<T>::type;
  const W first = static_cast<W>(x) + static_cast<W>(bias);
  if (!residual) return narrow<T>(first);
  const W second = static_cast<W>(other);
  return narrow<T>(first + (residual_bias ? second + static_cast<W>(other_bias) : second));
}

// For channels that come last in whole vectors, and pointers that are multiples of 16.
template <class T>
__global__ void __launch_bounds__(kThreads) whole_kernel(const OPK_GRID_CONSTANT Work l) {
  const int64_t vectors = l.numel / kWidth<T>;
  const uint32_t columns = static_cast<uint32_t>(l.channels / kWidth<T>);
  const int64_t first = blockIdx.x * kVectors + threadIdx.x;
  const Vector<T>* const x = static_cast<const Vector<T>*>(l.x);
  const Vector<T>* const other = static_cast<const Vector<T>*>(l.other);
  const Vector<T>* const bias = static_cast<const Vector<T>*>(l.bias);
  const Vector<T>* const other_bias = static_cast<const Vector<T>*>(l.other_bias);
  Vector<T> one[kTurns], two[kTurns];
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    if (first + t * kThreads < vectors) one[t] = x[first + t * kThreads];
  }
  if (other != nullptr) {
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      if (first + t * kThreads < vectors) two[t] = other[first + t * kThreads];
    }
  }
  // A remainder of 64 bits takes four times as long.
  uint32_t column = vectors <= 0xffffffff ? static_cast<uint32_t>(first) % columns
                                          : static_cast<uint32_t>(first % columns);
  const uint32_t step = kThreads % columns;
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    if (first + t * kThreads < vectors) {
      const Vector<T> b = bias[column];
      Vector<T> ob = b, out;
      if (other_bias != nullptr) ob = other_bias[column];
#pragma unroll
      for (int k = 0; k < kWidth<T>; ++k) {
        out.at[k] = sum(one[t].at[k], b.at[k], two[t].at[k], ob.at[k], other != nullptr,
                        other_bias != nullptr);
      }
      static_cast<Vector<T>*>(l.out)[first + t * kThreads] = out;
    }
    column += step;
    column = column >= columns ? column - columns : column;
  }
}

// For anything else: a thread has as many neighbouring elements as a vector, and keeps count of channels.
template <class T>
__global__ void __launch_bounds__(kThreads) any_kernel(const OPK_GRID_CONSTANT Work l) {
  const int64_t first = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWidth<T>;
  int64_t place = first % l.inner, channel = first / l.inner % l.channels;
#pragma unroll
  for (int k = 0; k < kWidth<T>; ++k) {
    const int64_t i = first + k;
    if (i >= l.numel) return;
    const T x = static_cast<const T*>(l.x)[i], bias = static_cast<const T*>(l.bias)[channel];
    const T other = l.other ? static_cast<const T*>(l.other)[i] : x;
    const T other_bias = l.other_bias ? static_cast<const T*>(l.other_bias)[channel] : x;
    static_cast<T*>(l.out)[i] =
        sum(x, bias, other, other_bias, l.other != nullptr, l.other_bias != nullptr);
    if (++place == l.inner) {
      place = 0;
      channel = channel + 1 == l.channels ? 0 : channel + 1;
    }
  }
}

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

void add(const Work& work, opk::DType dtype) {
  const bool aligned = is_aligned(work.x) && is_aligned(work.bias) && is_aligned(work.other) &&
      is_aligned(work.other_bias) && is_aligned(work.out);
  OPK_DISPATCH(dtype, T, (float, opk::bfloat16, opk::half, double), {
    const int64_t vectors = (work.numel + kWidth<T> - 1) / kWidth<T>;
    if (aligned && work.inner == 1 && work.channels % kWidth<T> == 0) {
      opk::launch(whole_kernel<T>, (vectors + kVectors - 1) / kVectors, kThreads, 0, work);
    } else {
      opk::launch(any_kernel<T>, (vectors + kThreads - 1) / kThreads, kThreads, 0, work);
    }
  });
}

}  // namespace

OPKILN_OP(spatial_bias_add, cuda);
