// Activations with a bias, plain and gated. A thread has 16 bytes of the result. Rows
// that are not aligned for that are processed element by element.

#include <opkiln/op.h>

#include <opkiln/fast_math.h>

#include "columns.h"

#include "activations.h"

namespace {

using opkiln::device::Sixteen;

// max(x, 0); NaN stays NaN.
__device__ inline float at_least_zero(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float out;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(out) : "f"(x));
  return out;
#else
  return x < 0.0f ? 0.0f : x;
#endif
}

// gelu by erf for 16-bit elements: max(x, 0) - |x| * q, where q is the normal distribution at -|x|, computed
// as t * 2^(power - x * x * log2(e) / 2) with t = 1 / (1 + 0.34 * |x|) and a polynomial of t as power. The
// fit minimizes the relative error, which is below 5e-6 where fp16 has normal numbers, and below 3e-5 down to
// bf16's smallest normal number. erff takes twice as many instructions, which would limit the kernel.
__device__ inline float fast_erf_gelu(float x) {
  const float bounded = fminf(x, 1e18f);  // gelu(infinity) is infinity, not NaN
  const float t = opkiln::device::fast_reciprocal(1.0f + 0.34f * fabsf(bounded));
  float power = 0.338881314f;
  power = power * t - 1.12010026f;
  power = power * t + 0.884543180f;
  power = power * t + 0.294132650f;
  power = power * t + 1.48766470f;
  power = power * t - 2.88511610f;
  const float q = opkiln::device::fast_exp2(power - bounded * (bounded * (0.5f * kLog2E)));
  return at_least_zero(x) - fabsf(bounded) * t * q;
}

// tanh.approx would be faster for gelu by tanh, but its error of 5e-4 is visible even in bf16.
template <class T, Curve kCurve>
__device__ inline float curve(float x, const Activation& a) {
  if constexpr (kCurve == Curve::kClamp) {
    return x < a.low ? a.low : x;  // NaN stays NaN
  } else if constexpr (kCurve == Curve::kSigmoid) {
    const float power = opkiln::device::fast_exp2(-x * (a.slope + a.cubic * fminf(x * x, kMostSquare)));
    return x * opkiln::device::fast_reciprocal(1.0f + power);
  } else if constexpr (sizeof(T) == 2) {
    return fast_erf_gelu(x);
  } else {
    return 0.5f * x * (1.0f + erff(x * 0.707106781f));
  }
}

struct Work {
  Pointwise pointwise;
  Matrix matrix;  // the result's
};

template <class T>
__device__ inline Sixteen<T> vector_of(const void* tensor, int64_t index) {
  return static_cast<const Sixteen<T>*>(tensor)[index];
}

template <class T, Curve kCurve>
__global__ void __launch_bounds__(kThreads) activation_kernel(const OPK_GRID_CONSTANT Work w) {
  opk::wait_for_previous();
  const Pointwise& p = w.pointwise;
  const uint32_t vector = my_vector();
  if (vector >= w.matrix.vectors) {
    return;
  }
  Sixteen<T> x = *(static_cast<const Sixteen<T>*>(p.x) + vector), shift = {};
  if (p.bias) {
    shift = vector_of<T>(p.bias, vector % w.matrix.columns);
  }
#pragma unroll
  for (int i = 0; i < Sixteen<T>::kCount; i += 2) {
    x.set_two(i, curve<T, kCurve>(x[i] + shift[i], p.activation),
              curve<T, kCurve>(x[i + 1] + shift[i + 1], p.activation));
  }
  opkiln::device::store_once(static_cast<Sixteen<T>*>(p.out) + vector, x);
}

// The vectors of x from which a vector of the result is computed. `row` is x's row, or 0 for the bias.
struct Pair {
  int64_t first, second;
  __device__ Pair(bool interleaved, uint32_t row, uint32_t column, uint32_t columns)
      : first(int64_t{row} * (2 * int64_t{columns}) + (interleaved ? 2 * column : column)),
        second(first + (interleaved ? 1 : columns)) {}
};

template <class T, Curve kCurve, bool kInterleaved>
__global__ void __launch_bounds__(kThreads) gated_kernel(const OPK_GRID_CONSTANT Work w) {
  opk::wait_for_previous();
  constexpr int kCount = Sixteen<T>::kCount;
  const Pointwise& p = w.pointwise;
  const uint32_t vector = my_vector(), columns = w.matrix.columns;
  if (vector >= w.matrix.vectors) {
    return;
  }
  const uint32_t row = vector / columns, column = vector - row * columns;
  const Pair at(kInterleaved, row, column, columns);
  const Sixteen<T>* const from = static_cast<const Sixteen<T>*>(p.x);
  const Sixteen<T> x[2] = {from[at.first], from[at.second]};
  Sixteen<T> shift[2] = {};
  if (p.bias) {
    const Pair beside(kInterleaved, 0, column, columns);
    shift[0] = vector_of<T>(p.bias, beside.first);
    shift[1] = vector_of<T>(p.bias, beside.second);
  }
  float out[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    // Interleaved: elements 2i and 2i + 1 of the two vectors together.
    const int which = kInterleaved ? 2 * i / kCount : 0, of_first = kInterleaved ? 2 * i % kCount : i;
    const int other = kInterleaved ? which : 1, of_second = kInterleaved ? of_first + 1 : i;
    const float first = x[which][of_first] + shift[which][of_first];
    const float second = x[other][of_second] + shift[other][of_second];
    const float gate = p.gate_first ? first : second, value = p.gate_first ? second : first;
    out[i] = curve<T, kCurve>(gate, p.activation) * value;
  }
  Sixteen<T> result;
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    result.set_two(i, out[i], out[i + 1]);
  }
  opkiln::device::store_once(static_cast<Sixteen<T>*>(p.out) + vector, result);
}

template <class T>
__device__ inline float any_curve(float x, const Activation& a) {
  switch (a.curve) {
    case Curve::kClamp: return curve<T, Curve::kClamp>(x, a);
    case Curve::kSigmoid: return curve<T, Curve::kSigmoid>(x, a);
    default: return curve<T, Curve::kErf>(x, a);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) element_kernel(const OPK_GRID_CONSTANT Pointwise p) {
  opk::wait_for_previous();
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= p.rows * p.columns) {
    return;
  }
  const int64_t row = index / p.columns, column = index % p.columns;
  const auto at = [&](int64_t place, int64_t width) {
    const float shift = p.bias ? static_cast<float>(static_cast<const T*>(p.bias)[place]) : 0.0f;
    return static_cast<float>(static_cast<const T*>(p.x)[row * width + place]) + shift;
  };
  float out;
  if (p.halves == Halves::kNone) {
    out = any_curve<T>(at(column, p.columns), p.activation);
  } else {
    const bool split = p.halves == Halves::kSplit;
    const float first = at(split ? column : 2 * column, 2 * p.columns);
    const float second = at(split ? p.columns + column : 2 * column + 1, 2 * p.columns);
    out = any_curve<T>(p.gate_first ? first : second, p.activation) * (p.gate_first ? second : first);
  }
  static_cast<T*>(p.out)[index] = T(out);
}

template <class T, Curve kCurve>
auto kernel_for(Halves halves) {
  if constexpr (kCurve != Curve::kClamp) {
    if (halves == Halves::kSplit) return gated_kernel<T, kCurve, false>;
    if (halves == Halves::kInterleaved) return gated_kernel<T, kCurve, true>;
  }
  return activation_kernel<T, kCurve>;
}

template <class T>
void launch_for(const Pointwise& p) {
  constexpr int kCount = Sixteen<T>::kCount;
  const int64_t vectors = p.columns / kCount;
  if (p.columns % kCount != 0 || !is_aligned(p.x) || !is_aligned(p.bias) || !is_aligned(p.out) ||
      !is_countable(p.rows * vectors)) {
    const int64_t blocks = (p.rows * p.columns + kThreads - 1) / kThreads;
    return opk::launch_overlapping(element_kernel<T>, blocks, kThreads, 0, p);
  }
  const Work work{p, matrix_of(p.rows, vectors)};
  const int64_t blocks = blocks_of(work.matrix);
  switch (p.activation.curve) {
    case Curve::kClamp: return opk::launch_overlapping(kernel_for<T, Curve::kClamp>(p.halves), blocks, kThreads, 0, work);
    case Curve::kSigmoid:
      return opk::launch_overlapping(kernel_for<T, Curve::kSigmoid>(p.halves), blocks, kThreads, 0, work);
    case Curve::kErf: return opk::launch_overlapping(kernel_for<T, Curve::kErf>(p.halves), blocks, kThreads, 0, work);
  }
}

void activate(const Pointwise& work) {
  OPK_ELEMENT(work.type, T, (float, opk::bfloat16, opk::half), launch_for<T>(work));
}

}  // namespace

OPKILN_OP(bias_add, cuda);
OPKILN_OP(bias_relu, cuda);
OPKILN_OP(bias_silu, cuda);
OPKILN_OP(bias_gelu, cuda);
OPKILN_OP(gated_silu, cuda);
OPKILN_OP(gated_gelu, cuda);
