// Residual adds. A thread has 16 bytes of each tensor. Rows that are
// not aligned for that are processed element by element.

#include <opkiln/op.h>

#include "columns.h"

#include "residuals.h"

namespace {

using opkiln::device::Sixteen;

// Loads a 16-byte vector, or zeros if the tensor is absent.
template <class T>
__device__ inline Sixteen<T> vector_of(const void* tensor, int64_t index) {
  return tensor ? static_cast<const Sixteen<T>*>(tensor)[index] : Sixteen<T>{};
}

template <class T>
__device__ inline Sixteen<T> loaded_once(const void* tensor, int64_t index) {
  return tensor ? *(static_cast<const Sixteen<T>*>(tensor) + index) : Sixteen<T>{};
}

template <class T>
__device__ inline float element_of(const void* tensor, int64_t index) {
  return tensor ? static_cast<float>(static_cast<const T*>(tensor)[index]) : 0.0f;
}

// Without attention, its scale is ignored, because it may be infinite.
__device__ inline float sum_of(const Sum& s, float hidden, float residual, float bias, float attention_bias,
                               float attention) {
  const float sum = hidden + s.scale * (residual + bias + attention_bias);
  return s.attention ? sum + s.attention_scale * attention : sum;
}

struct SumWork {
  Sum sum;
  Matrix matrix;
};

template <class T>
__global__ void __launch_bounds__(kThreads) sum_kernel(const OPK_GRID_CONSTANT SumWork w) {
  opk::wait_for_previous();
  const Sum& s = w.sum;
  const uint32_t vector = my_vector();
  if (vector >= w.matrix.vectors) {
    return;
  }
  Sixteen<T> h = loaded_once<T>(s.hidden, vector);
  const Sixteen<T> r = loaded_once<T>(s.residual, vector), a = loaded_once<T>(s.attention, vector);
  const uint32_t column = vector % w.matrix.columns;
  const Sixteen<T> bias = vector_of<T>(s.bias, column), more = vector_of<T>(s.attention_bias, column);
#pragma unroll
  for (int i = 0; i < Sixteen<T>::kCount; i += 2) {
    h.set_two(i, sum_of(s, h[i], r[i], bias[i], more[i], a[i]),
              sum_of(s, h[i + 1], r[i + 1], bias[i + 1], more[i + 1], a[i + 1]));
  }
  opkiln::device::store_once(static_cast<Sixteen<T>*>(s.out) + vector, h);
}

template <class T>
__global__ void __launch_bounds__(kThreads) sum_element_kernel(const OPK_GRID_CONSTANT Sum s) {
  opk::wait_for_previous();
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at < s.rows * s.columns) {
    const int64_t column = at % s.columns;
    static_cast<T*>(s.out)[at] =
        T(sum_of(s, element_of<T>(s.hidden, at), element_of<T>(s.residual, at), element_of<T>(s.bias, column),
                 element_of<T>(s.attention_bias, column), element_of<T>(s.attention, at)));
  }
}

struct MixWork {
  Mix mix;
  Matrix matrix;
};

template <class T>
__global__ void __launch_bounds__(kThreads) mix_kernel(const OPK_GRID_CONSTANT MixWork w) {
  opk::wait_for_previous();
  const Mix& m = w.mix;
  const uint32_t vector = my_vector(), columns = w.matrix.columns;
  if (vector >= w.matrix.vectors) {
    return;
  }
  const Sixteen<T> residual = loaded_once<T>(m.residual, vector);
  Sixteen<T> out = loaded_once<T>(m.mlp, vector);
  const uint32_t row = vector / columns, column = vector - row * columns;
  float first[Sixteen<T>::kCount], second[Sixteen<T>::kCount];
  if (m.by_row) {
    const float one = element_of<T>(m.coef, 2 * int64_t{row}), two = element_of<T>(m.coef, 2 * int64_t{row} + 1);
#pragma unroll
    for (int i = 0; i < Sixteen<T>::kCount; ++i) {
      first[i] = one, second[i] = two;
    }
  } else {
    const Sixteen<T> one = vector_of<T>(m.coef, column), two = vector_of<T>(m.coef, columns + column);
#pragma unroll
    for (int i = 0; i < Sixteen<T>::kCount; ++i) {
      first[i] = one[i], second[i] = two[i];
    }
  }
#pragma unroll
  for (int i = 0; i < Sixteen<T>::kCount; i += 2) {
    out.set_two(i, residual[i] * first[i] + out[i] * second[i],
                residual[i + 1] * first[i + 1] + out[i + 1] * second[i + 1]);
  }
  opkiln::device::store_once(static_cast<Sixteen<T>*>(m.out) + vector, out);
}

template <class T>
__global__ void __launch_bounds__(kThreads) mix_element_kernel(const OPK_GRID_CONSTANT Mix m) {
  opk::wait_for_previous();
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at < m.rows * m.columns) {
    const int64_t row = at / m.columns, column = at % m.columns;
    const float first = element_of<T>(m.coef, m.by_row ? 2 * row : column);
    const float second = element_of<T>(m.coef, m.by_row ? 2 * row + 1 : m.columns + column);
    static_cast<T*>(m.out)[at] = T(element_of<T>(m.residual, at) * first + element_of<T>(m.mlp, at) * second);
  }
}

// Launches the vector kernel if the rows of all tensors are aligned for it, otherwise the element kernel.
template <class T, class Job, class Work>
void launch_either(void (*vectors)(Work), void (*elements)(Job), const Job& job,
                   std::initializer_list<const void*> tensors) {
  constexpr int kCount = Sixteen<T>::kCount;
  bool aligned = job.columns % kCount == 0 && is_countable(job.rows * (job.columns / kCount));
  for (const void* each : tensors) aligned = aligned && is_aligned(each);
  if (aligned) {
    const Work work{job, matrix_of(job.rows, job.columns / kCount)};
    opk::launch_overlapping(vectors, blocks_of(work.matrix), kThreads, 0, work);
  } else {
    opk::launch_overlapping(elements, (job.rows * job.columns + kThreads - 1) / kThreads, kThreads, 0, job);
  }
}

template <class T>
void add_for(const Sum& s) {
  launch_either<T>(sum_kernel<T>, sum_element_kernel<T>, s,
                   {s.hidden, s.residual, s.attention, s.bias, s.attention_bias, s.out});
}

template <class T>
void mix_for(const Mix& m) {
  launch_either<T>(mix_kernel<T>, mix_element_kernel<T>, m, {m.residual, m.coef, m.mlp, m.out});
}

void add(const Sum& sum) {
  OPK_ELEMENT(sum.type, T, (float, opk::bfloat16, opk::half), add_for<T>(sum));
}

void mix(const Mix& mix) {
  OPK_ELEMENT(mix.type, T, (float, opk::bfloat16, opk::half), mix_for<T>(mix));
}

}  // namespace

OPKILN_OP(residual_add, cuda);
OPKILN_OP(moe_res_matmul, cuda);
