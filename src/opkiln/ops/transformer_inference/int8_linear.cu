// Linear layers with int8 weights on a GPU. Few rows of x are multiplied with the int8 weights directly,
// which reads memory once, one byte per weight. If x has 16 bits, tensor cores do it
// (opkiln/few_rows.h). multiply_kernel is for fp32, for group sizes that these do not support, and for
// GPUs without them. For more rows, the weights are dequantized and torch multiplies.

#include <opkiln/op.h>

#if !defined(__HIPCC__)
#include <opkiln/few_rows.h>
#endif
#include <opkiln/group_reduce.h>
#include <opkiln/sixteen_bytes.h>

#include "int8_linear.h"

namespace {

using int8_linear::Few;
using int8_linear::Weights;
using opkiln::device::Sixteen;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

struct alignas(16) Bytes {
  uint32_t words[4];
};

// Converts four signed bytes to floats. Each byte becomes the low digits of a
// float near 2^23, which is faster than a conversion instruction.
__device__ inline void widen_four(uint32_t bytes, float* values) {
  const uint32_t shifted = bytes ^ 0x80808080u;  // 0 to 255
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[i] = __uint_as_float(__byte_perm(shifted, 0x4b000000u, 0x7650u | static_cast<uint32_t>(i))) - 8388736.0f;
  }
}

// The division of a product with kRows rows of x. A warp has kOutputs rows of
// weights. Each thread loads kLoads times sixteen weights of each row before it
// uses the first. x is in shared memory, kChunk columns at a time.
template <int kRows>
struct Shape {
  static constexpr int kOutputs = kRows <= 2 ? 2 : kRows == 4 ? 4 : 3;  // more would not fit into registers
  static constexpr int kLoads = kRows <= 2 ? 4 : 1;
  static constexpr int kChunk = kLoads * 512;
};

template <class T>
struct alignas(4 * sizeof(T)) Four {
  T at[4];
};

template <class T>
__device__ inline float4 four_of(const void* x, int64_t at) {
  const Four<T> found = *reinterpret_cast<const Four<T>*>(static_cast<const T*>(x) + at);
  return {float(found.at[0]), float(found.at[1]), float(found.at[2]), float(found.at[3])};
}

// Loads x as floats into shared memory, so that the arithmetic is compiled once for all dtypes. A thread
// needs sixteen neighbours, which are stored in four places, so that a warp's accesses hit different banks.
template <int kRows>
__device__ inline void stage(const Few& few, int64_t column, float4* shared) {
  constexpr int kFours = Shape<kRows>::kChunk / 4;
#pragma unroll 2
  for (int i = threadIdx.x; i < kRows * kFours; i += kThreads) {
    const int row = i / kFours, four = i % kFours;
    const int64_t at = column + 4 * four;
    float4 values = {0, 0, 0, 0};
    if (row < few.rows && at < few.weights.columns) {
      const int64_t from = row * few.weights.columns + at;
      values = few.type == opkiln::ElementType::kFloat     ? four_of<float>(few.x, from)
               : few.type == opkiln::ElementType::kFloat16 ? four_of<opk::half>(few.x, from)
                                                           : four_of<opk::bfloat16>(few.x, from);
    }
    shared[row * kFours + four / 128 * 128 + four % 4 * 32 + four / 4 % 32] = values;
  }
}

__device__ inline void store_one(const Few& few, int row, int64_t output, float value) {
  const int64_t at = row * few.weights.rows + output;
  switch (few.type) {
    case opkiln::ElementType::kFloat:
      static_cast<float*>(few.out)[at] = value + (few.bias ? static_cast<const float*>(few.bias)[output] : 0.0f);
      return;
    case opkiln::ElementType::kFloat16:
      static_cast<opk::half*>(few.out)[at] =
          opk::half(value + (few.bias ? float(static_cast<const opk::half*>(few.bias)[output]) : 0.0f));
      return;
    case opkiln::ElementType::kBFloat16:
      static_cast<opk::bfloat16*>(few.out)[at] =
          opk::bfloat16(value + (few.bias ? float(static_cast<const opk::bfloat16*>(few.bias)[output]) : 0.0f));
      return;
  }
}

template <int kRows>
__global__ void __launch_bounds__(kThreads, 2) multiply_kernel(const OPK_GRID_CONSTANT Few few) {
  opk::wait_for_previous();
  using Form = Shape<kRows>;
  __shared__ float4 shared[kRows * Form::kChunk / 4];
  const Weights& weights = few.weights;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + warp) * Form::kOutputs;
  // Groups are whole rows or powers of two, so the loop needs no division.
  const bool of_rows = weights.group % weights.columns == 0;
  float scales_of_rows[Form::kOutputs], sums[Form::kOutputs][kRows] = {};
#pragma unroll
  for (int o = 0; o < Form::kOutputs; ++o) {
    const bool there = of_rows && first + o < weights.rows;
    scales_of_rows[o] = there ? weights.scales[(first + o) * weights.columns / weights.group] : 0.0f;
  }
  for (int64_t column = 0; column < weights.columns; column += Form::kChunk) {
    Bytes bytes[Form::kOutputs][Form::kLoads];
    float scales[Form::kOutputs][Form::kLoads];
#pragma unroll
    for (int o = 0; o < Form::kOutputs; ++o) {
#pragma unroll
      for (int k = 0; k < Form::kLoads; ++k) {
        const int64_t at = column + k * 512 + lane * 16;
        const bool there = first + o < weights.rows && at < weights.columns;
        const int64_t element = (first + o) * weights.columns + at;
        if (there) bytes[o][k] = *reinterpret_cast<const Bytes*>(weights.data + element);
        scales[o][k] = scales_of_rows[o];
        if (there && !of_rows) scales[o][k] = weights.scales[element >> weights.shift];
      }
    }
    __syncthreads();  // the last chunk is no longer used
    stage<kRows>(few, column, shared);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < Form::kLoads; ++k) {
      if (column + k * 512 + lane * 16 >= weights.columns) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float w[Form::kOutputs][4];
#pragma unroll
        for (int o = 0; o < Form::kOutputs; ++o) {
          widen_four(first + o < weights.rows ? bytes[o][k].words[j] : 0x80808080u, w[o]);
#pragma unroll
          for (int i = 0; i < 4; ++i) w[o][i] *= scales[o][k];
        }
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
          const float4 x = shared[row * (Form::kChunk / 4) + k * 128 + j * 32 + lane];
#pragma unroll
          for (int o = 0; o < Form::kOutputs; ++o) {
            sums[o][row] += w[o][0] * x.x + w[o][1] * x.y + w[o][2] * x.z + w[o][3] * x.w;
          }
        }
      }
    }
  }
#pragma unroll
  for (int o = 0; o < Form::kOutputs; ++o) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      float sum = sums[o][row];
#pragma unroll
      for (unsigned bits = 1; bits < 32; bits *= 2) sum += opkiln::exchange(sum, bits);
      if (lane == 0 && row < few.rows && first + o < weights.rows) store_one(few, row, first + o, sum);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(const Weights weights, T* out, int64_t numel,
                                                              bool packed) {
  opk::wait_for_previous();
  constexpr int kCount = Sixteen<T>::kCount;
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 16;
  if (at >= numel) return;
  if (!packed) {
    for (int64_t i = at; i < at + 16 && i < numel; ++i) {
      out[i] = T(static_cast<float>(weights.data[i]) * weights.scales[int8_linear::group_of(weights, i)]);
    }
    return;
  }
  const Bytes bytes = *reinterpret_cast<const Bytes*>(weights.data + at);
  const float scale = weights.scales[int8_linear::group_of(weights, at)];
  float values[16];
#pragma unroll
  for (int j = 0; j < 4; ++j) widen_four(bytes.words[j], values + 4 * j);
#pragma unroll
  for (int k = 0; k < 16; k += kCount) {
    Sixteen<T> pack;
#pragma unroll
    for (int i = 0; i < kCount; i += 2) pack.set_two(i, values[k + i] * scale, values[k + i + 1] * scale);
    *reinterpret_cast<Sixteen<T>*>(out + at + k) = pack;
  }
}

template <class T>
void launch_dequantize(const Weights& weights, void* out) {
  const int64_t numel = weights.rows * weights.columns;
  const size_t addresses = reinterpret_cast<size_t>(weights.data) | reinterpret_cast<size_t>(out);
  const bool packed = addresses % 16 == 0 && numel % 16 == 0 && weights.group % 16 == 0;
  opk::launch_overlapping(dequantize_kernel<T>, (numel + 16 * kThreads - 1) / (16 * kThreads), kThreads, 0, weights,
              static_cast<T*>(out), numel, packed);
}

template <int kRows>
void launch_multiply(const Few& few) {
  constexpr int64_t kBlock = kWarps * Shape<kRows>::kOutputs;
  opk::launch_overlapping(multiply_kernel<kRows>, (few.weights.rows + kBlock - 1) / kBlock, kThreads, 0, few);
}

// Returns false if multiply_kernel does not support this product.
bool launch_plain(const Few& few) {
  const int64_t group = few.weights.group;
  const bool divides = few.weights.shift >= 0 || group % few.weights.columns == 0;
  if (few.rows > 8 || group % 16 != 0 || !divides) return false;
  if (few.rows == 1) {
    launch_multiply<1>(few);
  } else if (few.rows == 2) {
    launch_multiply<2>(few);
  } else if (few.rows <= 4) {
    launch_multiply<4>(few);
  } else {
    launch_multiply<8>(few);
  }
  return true;
}

#if defined(__HIPCC__)
template <class T>
bool launch_on_tensor_cores(const Few&) {
  return false;
}
#else
// Returns false if the tensor cores do not support this product.
template <class T>
bool launch_on_tensor_cores(const Few& few) {
  if constexpr (sizeof(T) == 2) {
    using Codes = opkiln::formats::Int8<T>;
    const Weights& weights = few.weights;
    const bool counted = weights.columns < int64_t{1} << 27 && weights.rows < (int64_t{1} << 31) - 32;
    if (!counted || !opkiln::few_rows::runs_here<Codes, T>()) return false;
    opkiln::few_rows::Work<T> work = {};
    work.x = static_cast<const T*>(few.x);
    work.codes = reinterpret_cast<const uint32_t*>(weights.data);
    work.bias = static_cast<const T*>(few.bias);
    work.out = static_cast<T*>(few.out);
    work.rows = few.rows;
    work.outputs = static_cast<int32_t>(weights.rows);
    work.columns = static_cast<int32_t>(weights.columns);
    work.experts = 1;
    if (!opkiln::few_rows::set_scales<Codes>(work, weights.scales, weights.group)) return false;
    opkiln::few_rows::multiply<Codes>(work);
    return true;
  } else {
    return false;
  }
}
#endif

}  // namespace

void int8_linear::dequantize(const Weights& weights, void* out, opkiln::ElementType type) {
  OPK_ELEMENT(type, T, (float, opk::bfloat16, opk::half), launch_dequantize<T>(weights, out));
}

bool int8_linear::multiply(const Few& few) {
  const size_t addresses = reinterpret_cast<size_t>(few.weights.data) | reinterpret_cast<size_t>(few.x);
  if (addresses % 16 != 0 || few.weights.columns % 16 != 0) return false;
  bool launched = false;
  OPK_ELEMENT(few.type, T, (float, opk::bfloat16, opk::half), launched = launch_on_tensor_cores<T>(few));
  return launched || launch_plain(few);
}

OPKILN_OP(int8_linear::dequantize_int8, cuda);
OPKILN_OP(int8_linear::int8_linear, cuda);
