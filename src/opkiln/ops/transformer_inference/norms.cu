// Norms of rows, in three ways. Aligned rows of up to 32 KiB are read once, into the registers of a
// part of a warp, a warp, or a block. Longer rows are kept in shared memory as far as they fit.
// Unaligned rows are read element by element, again in each step.

#include <opkiln/op.h>

#include <opkiln/group_reduce.h>
#include <opkiln/sixteen_bytes.h>

#include "norms.h"

namespace {

using opkiln::device::Sixteen;

constexpr int kVectors = 4;         // 16-byte loads that a thread has in flight for a long row
constexpr int kFewVectors = 2;      // the same for short rows, or few rows
constexpr int kShortVectors = 128;  // the most in a short row
constexpr int kShortCentred = 64;   // of a layer norm, which waits for two sums: a warp needs no barrier for them
constexpr int kShortThreads = 64;   // per block with several rows; larger blocks are slower
constexpr int kMostThreads = 512;   // per block with one row
constexpr int kFewRows = 256;
constexpr int kLongThreads = 1024;
constexpr int kFirstBlocks = 512;   // in these, the weights may not be in any cache yet
constexpr int kHeldBytes = 224 << 10;  // shared memory for one long row

struct Work {
  Norm norm;
  int vectors;  // 16-byte vectors per row
  int team;     // threads per row: a power of two up to a warp, or the block
  int log2_team;      // 31 if the team is the block, which makes all its threads part of one row
  int rows_of_block;
  float share;        // 1 / columns
  int held;     // vectors of a long row that fit into shared memory
};

// Sums a value over a team. All threads of the block must call this, each time with other shared memory.
__device__ inline float sum_of_team(float value, int team, float* shared) {
#pragma unroll
  for (int bits = 1; bits < 32; bits *= 2) {
    if (bits < team) {
      value += opkiln::exchange(value, bits);
    }
  }
  if (team > 32) {
    const unsigned lane = threadIdx.x % 32, warps = blockDim.x / 32;
    if (lane == 0) {
      shared[threadIdx.x / 32] = value;
    }
    __syncthreads();
    value = 0;
#pragma unroll 4
    for (unsigned i = 0; i < warps; ++i) {
      value += shared[i];
    }
  }
  return value;
}

template <class T>
__device__ inline Sixteen<T> vector_of(const void* tensor, int64_t index) {
  return static_cast<const Sixteen<T>*>(tensor)[index];
}

// x + input_bias + residual, rounded to the stored type: the norm is of what the caller gets.
template <class T>
__device__ inline void add(const Norm& n, Sixteen<T>& x, const Sixteen<T>& residual, int column) {
  Sixteen<T> shift = {};
  if (n.input_bias) {
    shift = vector_of<T>(n.input_bias, column);
  }
#pragma unroll
  for (int i = 0; i < Sixteen<T>::kCount; i += 2) {
    x.set_two(i, x[i] + shift[i] + residual[i], x[i + 1] + shift[i + 1] + residual[i + 1]);
  }
}

template <class T>
__device__ inline float sum_of(const Sixteen<T>& x) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < Sixteen<T>::kCount; ++i) {
    sum += x[i];
  }
  return sum;
}

template <class T>
__device__ inline float squares_of(const Sixteen<T>& x, float mean) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < Sixteen<T>::kCount; ++i) {
    sum += (x[i] - mean) * (x[i] - mean);
  }
  return sum;
}

template <class T>
struct Affine {
  Sixteen<T> weight, bias;  // unused if absent
};

template <class T>
__device__ inline Affine<T> affine_of(const Norm& n, int column) {
  Affine<T> out = {};
  if (n.weight) {
    out.weight = vector_of<T>(n.weight, column);
  }
  if (n.bias) {
    out.bias = vector_of<T>(n.bias, column);
  }
  return out;
}

template <class T>
__device__ inline Sixteen<T> result_of(const Norm& n, Sixteen<T> x, const Affine<T>& affine, float mean, float scale) {
#pragma unroll
  for (int i = 0; i < Sixteen<T>::kCount; i += 2) {
    float out[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      out[k] = (x[i + k] - mean) * scale;
      out[k] = n.weight ? out[k] * affine.weight[i + k] : out[k];
      out[k] = n.bias ? out[k] + affine.bias[i + k] : out[k];
    }
    x.set_two(i, out[0], out[1]);
  }
  return x;
}

// A thread has up to kCount vectors of a row. If they are few, it also loads the
// weights early. For a layer norm, which also has biases, that would take too many
// registers, so that fewer blocks run; it loads them when they are used.
template <class T, bool kCentred, bool kAdds, int kCount>
__global__ void __launch_bounds__(kMostThreads, kAdds || kCentred ? 2 : 3)
    norm_kernel(const OPK_GRID_CONSTANT Work w) {
  opk::wait_for_previous();
  __shared__ float shared[2][kMostThreads / 32];
  const Norm& n = w.norm;
  const int lane = threadIdx.x & ((1u << w.log2_team) - 1);
  const int64_t row = int64_t{blockIdx.x} * w.rows_of_block + (threadIdx.x >> w.log2_team);
  const int vectors = row < n.rows ? w.vectors : 0;  // 0 for teams past the last row
  const int64_t start = row * w.vectors;
  Sixteen<T> x[kCount], residual[kCount];
#pragma unroll
  for (int v = 0; v < kCount; ++v) {
    const int at = lane + v * w.team;
    x[v] = Sixteen<T>{};
    if (at < vectors) {
      x[v] = vector_of<T>(n.x, start + at);
      if (kAdds) {
        residual[v] = vector_of<T>(n.residual, start + at);
      }
    }
  }
  constexpr bool kEarly = kCount == kFewVectors && !kCentred;
  Affine<T> early[kFewVectors];
  if (kEarly) {
#pragma unroll
    for (int v = 0; v < kFewVectors; ++v) {
      const int at = lane + v * w.team;
      if (at < vectors) {
        early[v] = affine_of<T>(n, at);
      }
    }
  } else if (blockIdx.x < kFirstBlocks && lane % 8 == 0) {  // a cache line is 8 vectors
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      const int at = lane + v * w.team;
      if (at < vectors && n.weight) {
        opkiln::device::prefetch(static_cast<const Sixteen<T>*>(n.weight) + at);
      }
      if (kCentred && at < vectors && n.bias) {
        opkiln::device::prefetch(static_cast<const Sixteen<T>*>(n.bias) + at);
      }
    }
  }
  if (kAdds) {
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      const int at = lane + v * w.team;
      if (at < vectors) {
        add(n, x[v], residual[v], at);
        if (n.sum) {
          static_cast<Sixteen<T>*>(n.sum)[start + at] = x[v];
        }
      }
    }
  }
  float mean = 0;
  if (kCentred) {
    float sum = 0;
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      sum += sum_of(x[v]);
    }
    mean = sum_of_team(sum, w.team, shared[0]) * w.share;
  }
  float squares = 0;
#pragma unroll
  for (int v = 0; v < kCount; ++v) {
    opkiln::device::forget_floats(x[v]);
    squares += lane + v * w.team < vectors ? squares_of(x[v], mean) : 0.0f;
  }
  const float scale = rsqrtf(sum_of_team(squares, w.team, shared[1]) * w.share + n.eps);
#pragma unroll
  for (int v = 0; v < kCount; ++v) {
    const int at = lane + v * w.team;
    if (at < vectors) {
      opkiln::device::forget_floats(x[v]);
      const Affine<T> affine = kEarly ? early[v % kFewVectors] : affine_of<T>(n, at);
      static_cast<Sixteen<T>*>(n.out)[start + at] = result_of(n, x[v], affine, mean, scale);
    }
  }
}

// Loads a vector of a long row.
template <class T>
__device__ inline Sixteen<T> long_vector(const Norm& n, int64_t start, int at) {
  Sixteen<T> x = vector_of<T>(n.x, start + at);
  if (n.residual) {
    add(n, x, vector_of<T>(n.residual, start + at), at);
  }
  return x;
}

template <class T>
__global__ void __launch_bounds__(kLongThreads) long_norm_kernel(const OPK_GRID_CONSTANT Work w) {
  opk::wait_for_previous();
  __shared__ float shared[2][kLongThreads / 32];
  extern __shared__ uint4 memory[];  // a thread reads only what it wrote
  Sixteen<T>* const held = reinterpret_cast<Sixteen<T>*>(memory);
  const Norm& n = w.norm;
  const int64_t start = int64_t{blockIdx.x} * w.vectors;
  float sum = 0, squares = 0, mean = 0;
#pragma unroll 4
  for (int at = threadIdx.x; at < w.vectors; at += kLongThreads) {
    const Sixteen<T> x = long_vector<T>(n, start, at);
    if (n.sum) {
      static_cast<Sixteen<T>*>(n.sum)[start + at] = x;
    }
    if (at < w.held) {
      held[at] = x;
    }
    sum += sum_of(x);
    squares += squares_of(x, 0);
  }
  if (n.centred) {
    mean = sum_of_team(sum, w.team, shared[0]) * w.share;
    squares = 0;
#pragma unroll 4
    for (int at = threadIdx.x; at < w.vectors; at += kLongThreads) {
      squares += squares_of(at < w.held ? held[at] : long_vector<T>(n, start, at), mean);
    }
  }
  const float scale = rsqrtf(sum_of_team(squares, w.team, shared[1]) * w.share + n.eps);
#pragma unroll 2
  for (int at = threadIdx.x; at < w.vectors; at += kLongThreads) {
    const Sixteen<T> x = at < w.held ? held[at] : long_vector<T>(n, start, at);
    static_cast<Sixteen<T>*>(n.out)[start + at] = result_of(n, x, affine_of<T>(n, at), mean, scale);
  }
}

// Loads an element.
template <class T>
__device__ inline float element(const Norm& n, int64_t start, int64_t at) {
  const float x = static_cast<float>(static_cast<const T*>(n.x)[start + at]);
  if (!n.residual) {
    return x;
  }
  const float shift = n.input_bias ? static_cast<float>(static_cast<const T*>(n.input_bias)[at]) : 0.0f;
  return static_cast<float>(T(x + shift + static_cast<float>(static_cast<const T*>(n.residual)[start + at])));
}

template <class T>
__global__ void __launch_bounds__(kMostThreads) element_norm_kernel(const OPK_GRID_CONSTANT Work w) {
  opk::wait_for_previous();
  __shared__ float shared[2][kMostThreads / 32];
  const Norm& n = w.norm;
  const int lane = threadIdx.x & ((1u << w.log2_team) - 1);
  const int64_t row = int64_t{blockIdx.x} * w.rows_of_block + (threadIdx.x >> w.log2_team);
  const int64_t columns = row < n.rows ? n.columns : 0, start = row * n.columns;
  float mean = 0, squares = 0;
  if (n.centred) {
    float sum = 0;
#pragma unroll 1
    for (int64_t at = lane; at < columns; at += w.team) {
      sum += element<T>(n, start, at);
    }
    mean = sum_of_team(sum, w.team, shared[0]) * w.share;
  }
#pragma unroll 1
  for (int64_t at = lane; at < columns; at += w.team) {
    const float x = element<T>(n, start, at) - mean;
    squares += x * x;
  }
  const float scale = rsqrtf(sum_of_team(squares, w.team, shared[1]) * w.share + n.eps);
#pragma unroll 1
  for (int64_t at = lane; at < columns; at += w.team) {
    const float x = element<T>(n, start, at);
    if (n.sum) {
      static_cast<T*>(n.sum)[start + at] = T(x);
    }
    float out = (x - mean) * scale;
    out = n.weight ? out * static_cast<float>(static_cast<const T*>(n.weight)[at]) : out;
    out = n.bias ? out + static_cast<float>(static_cast<const T*>(n.bias)[at]) : out;
    static_cast<T*>(n.out)[start + at] = T(out);
  }
}

template <class T, int kCount>
auto kernel_for(const Norm& norm) {
  if (norm.centred) {
    return norm.residual ? norm_kernel<T, true, true, kCount> : norm_kernel<T, true, false, kCount>;
  }
  return norm.residual ? norm_kernel<T, false, true, kCount> : norm_kernel<T, false, false, kCount>;
}

template <class T>
void launch_for(const Norm& norm) {
  constexpr int kCount = Sixteen<T>::kCount;
  bool aligned = norm.columns % kCount == 0;
  for (const void* each : {norm.x, norm.residual, norm.input_bias, norm.weight, norm.bias,
                           static_cast<const void*>(norm.out), static_cast<const void*>(norm.sum)}) {
    aligned = aligned && reinterpret_cast<uintptr_t>(each) % 16 == 0;
  }
  // A unit is what a thread reads of a row at once. It is small if the
  // row is short, or if there are too few rows to fill a large GPU.
  const int64_t vectors = norm.columns / kCount;
  const bool few = vectors <= (norm.centred && !norm.residual ? kShortCentred : kShortVectors) || (norm.rows <= kFewRows && vectors <= kFewVectors * kMostThreads);
  const int64_t unit = kCount * (few ? kFewVectors : kVectors);
  const int64_t units = aligned ? (norm.columns + unit - 1) / unit : norm.columns;
  Work work{norm, static_cast<int>(norm.columns / kCount), 1, 0, 1, 1.0f / static_cast<float>(norm.columns), 0};
  if (aligned && units > kMostThreads) {
    const int64_t room = kHeldBytes / 16;
    work.team = kLongThreads;
    work.held = static_cast<int>(work.vectors < room ? work.vectors : room);
    return opk::launch_overlapping(long_norm_kernel<T>, norm.rows, kLongThreads, size_t{16} * work.held, work);
  }
  int threads = kShortThreads;
  if (units <= 32) {
    while (work.team < units) work.team *= 2, ++work.log2_team;
    work.rows_of_block = threads / work.team;
  } else {
    const int64_t warps = (units + 31) / 32;
    threads = work.team = static_cast<int>(warps * 32 < kMostThreads ? warps * 32 : kMostThreads);
    work.log2_team = 31;
  }
  const int64_t blocks = (norm.rows + work.rows_of_block - 1) / work.rows_of_block;
  opk::launch_overlapping(!aligned ? element_norm_kernel<T> : few ? kernel_for<T, kFewVectors>(norm) : kernel_for<T, kVectors>(norm), blocks,
              threads, 0, work);
}

void normalize(const Norm& norm) {
  OPK_ELEMENT(norm.type, T, (float, opk::bfloat16, opk::half), launch_for<T>(norm));
}

}  // namespace

OPKILN_OP(rms_norm, cuda);
OPKILN_OP(layer_norm, cuda);
OPKILN_OP(pre_rms_norm, cuda);
OPKILN_OP(pre_layer_norm, cuda);
OPKILN_OP(post_rms_norm, cuda);
OPKILN_OP(post_layer_norm, cuda);
