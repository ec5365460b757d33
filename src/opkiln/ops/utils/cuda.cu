// Copies within a device's memory, many per launch: addresses and sizes
// are kernel parameters. hipify turns this file into HIP unchanged.

#include <opkiln/op.h>

#include "parts.h"

namespace {

constexpr int kThreads = 256;
constexpr int kVectors = 4;                             // accesses that a thread has in flight
constexpr int64_t kChunk = kThreads * kVectors * 16;  // bytes that a block copies

struct alignas(16) Vector {
  uint32_t at[4];
};

struct Work {
  static constexpr size_t kParts = (opk::kParameterBytes - 16) / (sizeof(Part) + sizeof(uint32_t));

  uint32_t count;
  uint32_t first[kParts + 1];  // the first chunk of each part
  Part parts[kParts];
};
static_assert(sizeof(Work) <= opk::kParameterBytes);

// The part to which a chunk belongs.
__device__ uint32_t part_of(const Work& work, uint32_t chunk) {
  uint32_t low = 0, high = work.count;  // the part is in [low, high)
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (work.first[middle] <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

__device__ bool are_aligned(const void* a, const void* b, size_t bytes) {
  return (reinterpret_cast<size_t>(a) | reinterpret_cast<size_t>(b)) % bytes == 0;
}

// Copies whole elements of T. Returns the number of bytes copied.
template <class T>
__device__ int64_t copy_elements(const char* from, char* to, int64_t bytes) {
  const auto count = static_cast<int>(bytes / static_cast<int64_t>(sizeof(T)));
  const T* const source = reinterpret_cast<const T*>(from);
  T* const target = reinterpret_cast<T*>(to);
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads * kVectors) {
    T held[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (i + k * kThreads < count) {
        held[k] = source[i + k * kThreads];
      }
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (i + k * kThreads < count) {
        target[i + k * kThreads] = held[k];
      }
    }
  }
  return static_cast<int64_t>(count) * static_cast<int64_t>(sizeof(T));
}

__global__ void __launch_bounds__(kThreads) copy_kernel(const OPK_GRID_CONSTANT Work work) {
  const uint32_t index = part_of(work, blockIdx.x);
  const Part& part = work.parts[index];
  const int64_t begin = static_cast<int64_t>(blockIdx.x - work.first[index]) * kChunk;
  const int64_t left = part.bytes - begin, bytes = left < kChunk ? left : kChunk;
  const char* const from = part.from + begin;
  char* const to = part.to + begin;
  int64_t done = 0;
  if (are_aligned(from, to, 16)) {
    done = copy_elements<Vector>(from, to, bytes);
  } else if (are_aligned(from, to, 4)) {
    done = copy_elements<uint32_t>(from, to, bytes);
  } else if (are_aligned(from, to, 2)) {
    done = copy_elements<uint16_t>(from, to, bytes);
  }
  copy_elements<uint8_t>(from + done, to + done, bytes - done);
}

void copy(const Parts& parts) {
  for (int64_t i = 0; i < parts.size();) {
    Work work;
    work.count = 0;
    work.first[0] = 0;
    for (; i < parts.size() && work.count < Work::kParts; ++i) {
      if (parts[i].bytes > 0) {
        work.parts[work.count] = parts[i];
        work.first[work.count + 1] =
            work.first[work.count] + static_cast<uint32_t>((parts[i].bytes + kChunk - 1) / kChunk);
        ++work.count;
      }
    }
    opk::launch(copy_kernel, work.first[work.count], kThreads, 0, work);
  }
}

}  // namespace

OPKILN_OP(flatten_list, cuda);
OPKILN_OP(unflatten_list_, cuda);
