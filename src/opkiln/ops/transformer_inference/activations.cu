// Activations with a bias, plain and gated. A thread has several accesses of 16 bytes in flight. Rows that
// cannot be accessed so are processed by elements.

#include <opkiln/op.h>

#include "columns.h"

#include "activations.h"

namespace {

using opkiln::device::Sixteen;

// The hardware's own functions, right within 2^-22. What is too small for a normal number is 0; both are
// used only where that makes no difference.
__device__ inline float fast_exp2(float x) {
#if defined(__CUDA_ARCH__)
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
#else
  return exp2f(x);
#endif
}

__device__ inline float fast_reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
#else
  return 1.0f / x;
#endif
}

// gelu by erf for 16-bit elements, with a relative error below 1e-5: the fit of vec_exp.h with fewer
// coefficients. erff takes twice as many instructions, and the kernel would wait for them.
__device__ inline float fast_erf_gelu(float x) {
  const float bounded = x > 1e18f ? 1e18f : x;  // gelu(infinity) is infinity, not NaN
  const float z = fabsf(bounded) * 0.707106781f;
  const float t = fast_reciprocal(1.0f + 0.5f * z);
  float power = 0.330074704f;
  power = power * t - 1.02314628f;
  power = power * t + 0.684549061f;
  power = power * t + 0.367083926f;
  power = power * t + 1.46868309f;
  power = power * t - 1.82723351f;
  const float tail = t * fast_exp2(power - z * z * kLog2E);
  return (x < 0.0f ? 0.0f : x) - 0.5f * fabsf(bounded) * tail;
}

// tanh.approx would be faster for gelu by tanh, but its error of 5e-4 is seen even in bf16.
template <class T, Curve kCurve>
__device__ inline float curve(float x, const Activation& a) {
  if constexpr (kCurve == Curve::kClamp) {
    return x < a.low ? a.low : x;  // NaN stays NaN
  } else if constexpr (kCurve == Curve::kSigmoid) {
    return x * fast_reciprocal(1.0f + fast_exp2(-x * (a.slope + a.cubic * fminf(x * x, kMostSquare))));
  } else if constexpr (sizeof(T) == 2) {
    return fast_erf_gelu(x);
  } else {
    return 0.5f * x * (1.0f + erff(x * 0.707106781f));
  }
}

struct Work {
  Pointwise pointwise;
  Matrix matrix;  // of the result
};

template <class T>
__device__ inline Sixteen<T> vector_of(const void* tensor, int64_t index) {
  return static_cast<const Sixteen<T>*>(tensor)[index];
}

template <class T, Curve kCurve>
__global__ void __launch_bounds__(kThreads) activation_kernel(const OPK_GRID_CONSTANT Work w) {
  opk::wait_for_previous();
  const Pointwise& p = w.pointwise;
  Sixteen<T> x[kTurns];
  walk(w.matrix, [&](int turn, uint32_t vector, uint32_t, uint32_t) { x[turn] = vector_of<T>(p.x, vector); });
  walk(w.matrix, [&](int turn, uint32_t vector, uint32_t, uint32_t column) {
    Sixteen<T> shift = {};
    if (p.bias) {
      shift = vector_of<T>(p.bias, column);
    }
#pragma unroll
    for (int i = 0; i < Sixteen<T>::kCount; i += 2) {
      x[turn].set_two(i, curve<T, kCurve>(x[turn][i] + shift[i], p.activation),
                      curve<T, kCurve>(x[turn][i + 1] + shift[i + 1], p.activation));
    }
    static_cast<Sixteen<T>*>(p.out)[vector] = x[turn];
  });
}

// The vectors of x that a vector of the result is made of. `row` is one of x, or 0 for the bias.
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
  Sixteen<T> x[kTurns][2];
  walk(w.matrix, [&](int turn, uint32_t, uint32_t row, uint32_t column) {
    const Pair at(kInterleaved, row, column, w.matrix.columns);
    x[turn][0] = vector_of<T>(p.x, at.first);
    x[turn][1] = vector_of<T>(p.x, at.second);
  });
  walk(w.matrix, [&](int turn, uint32_t vector, uint32_t, uint32_t column) {
    Sixteen<T> shift[2] = {};
    if (p.bias) {
      const Pair at(kInterleaved, 0, column, w.matrix.columns);
      shift[0] = vector_of<T>(p.bias, at.first);
      shift[1] = vector_of<T>(p.bias, at.second);
    }
    float out[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      // Interleaved: the elements 2i and 2i + 1 of two vectors.
      const int which = kInterleaved ? 2 * i / kCount : 0, at = kInterleaved ? 2 * i % kCount : i;
      const int other = kInterleaved ? which : 1, beside = kInterleaved ? at + 1 : i;
      const float first = x[turn][which][at] + shift[which][at];
      const float second = x[turn][other][beside] + shift[other][beside];
      const float gate = p.gate_first ? first : second, value = p.gate_first ? second : first;
      out[i] = curve<T, kCurve>(gate, p.activation) * value;
    }
    Sixteen<T> result;
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      result.set_two(i, out[i], out[i + 1]);
    }
    static_cast<Sixteen<T>*>(p.out)[vector] = result;
  });
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
      !can_walk(p.rows * vectors)) {
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
