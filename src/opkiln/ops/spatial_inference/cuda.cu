// Adds biases and residuals: a thread adds one vector of 16 bytes. Many threads keep many loads in flight,
// also for small tensors. No warp intrinsics, so hipify turns this file into HIP unchanged.

#include <opkiln/op.h>
#include <opkiln/sixteen_bytes.h>

#include "work.h"

namespace {

constexpr int kThreads = 128;

// The type of sums: fp32, except for fp64 tensors.
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

// 16 bytes of elements, accessed in the type of the sums.
template <class T>
using Vector = opkiln::device::Sixteen<T>;

}  // namespace

template <>
struct alignas(16) opkiln::device::Sixteen<double> {
  static constexpr int kCount = 2;
  double words[2];

  __device__ double operator[](int i) const { return words[i]; }
  __device__ void set_two(int, double first, double second) { words[0] = first, words[1] = second; }
};

namespace {

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

template <class W>
__device__ inline W sum(W x, W bias, W other, W other_bias, bool residual, bool residual_bias) {
  if (!residual) return x + bias;
  return x + bias + (residual_bias ? other + other_bias : other);
}

// For whole vectors of channels that come last, and aligned pointers.
template <class T>
__global__ void __launch_bounds__(kThreads) whole_kernel(const OPK_GRID_CONSTANT Work l) {
  opk::wait_for_previous();
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x, vectors = l.numel / kWidth<T>;
  if (at >= vectors) return;
  const auto vector_of = [](const void* tensor, int64_t index) {
    return static_cast<const Vector<T>*>(tensor) + index;
  };
  const Vector<T> one = *vector_of(l.x, at), two = l.other ? *vector_of(l.other, at) : one;
  // A 64-bit remainder takes four times as long as a 32-bit one.
  const uint32_t columns = static_cast<uint32_t>(l.channels / kWidth<T>);
  const uint32_t column = vectors <= 0xffffffff ? static_cast<uint32_t>(at) % columns
                                                : static_cast<uint32_t>(at % columns);
  const Vector<T> bias = *vector_of(l.bias, column), other_bias = l.other_bias ? *vector_of(l.other_bias, column) : bias;
  const auto sum_at = [&](int k) {
    return sum(one[k], bias[k], two[k], other_bias[k], l.other != nullptr, l.other_bias != nullptr);
  };
  Vector<T> out;
#pragma unroll
  for (int k = 0; k < kWidth<T>; k += 2) out.set_two(k, sum_at(k), sum_at(k + 1));
  opkiln::device::store_once(static_cast<Vector<T>*>(l.out) + at, out);
}

// For everything else: a thread has as many neighbouring elements as a vector, and tracks the channel.
template <class T>
__global__ void __launch_bounds__(kThreads) any_kernel(const OPK_GRID_CONSTANT Work l) {
  opk::wait_for_previous();
  const int64_t first = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWidth<T>;
  int64_t place = first % l.inner, channel = first / l.inner % l.channels;
#pragma unroll
  for (int k = 0; k < kWidth<T>; ++k) {
    const int64_t i = first + k;
    if (i >= l.numel) return;
    using W = typename Wide<T>::type;
    const W x(static_cast<const T*>(l.x)[i]), bias(static_cast<const T*>(l.bias)[channel]);
    const W other = l.other ? static_cast<W>(static_cast<const T*>(l.other)[i]) : x;
    const W other_bias = l.other_bias ? static_cast<W>(static_cast<const T*>(l.other_bias)[channel]) : x;
    static_cast<T*>(l.out)[i] =
        narrow<T>(sum(x, bias, other, other_bias, l.other != nullptr, l.other_bias != nullptr));
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
    const bool whole = aligned && work.inner == 1 && work.channels % kWidth<T> == 0;
    opk::launch_overlapping(whole ? whole_kernel<T> : any_kernel<T>, (vectors + kThreads - 1) / kThreads, kThreads, 0, work);
  });
}

}  // namespace

OPKILN_OP(spatial_bias_add, cuda);
