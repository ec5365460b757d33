// Kernels write plans from the parameters of their launches. So no host memory has to stay unchanged
// until it is copied, and a captured graph keeps the values of the capture.

#include "plan.h"

#include <opkiln/launch.h>

namespace opkiln {
namespace multi_tensor {
namespace {

using device::launch;

struct Words {
  static constexpr std::size_t kCount = (device::kParameterBytes - 24) / 8;

  uint64_t at[kCount];
};

// Threads of a warp read different words, and the memory of parameters serves these one after the
// other. So a launch has many blocks of one warp.
constexpr unsigned kWriters = 32;

__global__ void write_kernel(uint64_t* to, uint32_t count,
                             const OPKILN_GRID_CONSTANT Words words) {
  const uint32_t i = blockIdx.x * kWriters + threadIdx.x;
  if (i < count) {
    to[i] = words.at[i];
  }
}

__global__ void table_kernel(const Plan plan) {
  const uint32_t chunk = blockIdx.x * kThreads + threadIdx.x;
  if (chunk >= plan.sizes.chunks) {
    return;
  }
  uint32_t low = 0, high = plan.sizes.items;  // the item is in [low, high)
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (plan.items[middle].first <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  plan.table[chunk] = low;
}

cudaError_t write(void* to, const void* from, std::size_t words, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  for (std::size_t done = 0; error == cudaSuccess && done < words; done += Words::kCount) {
    Words part;
    const std::size_t left = words - done;
    const auto count = static_cast<uint32_t>(left < Words::kCount ? left : Words::kCount);
    const uint64_t* const source = static_cast<const uint64_t*>(from) + done;
    for (uint32_t i = 0; i < count; ++i) {
      part.at[i] = source[i];
    }
    error = launch<uint64_t*, uint32_t, Words>(write_kernel, (count + kWriters - 1) / kWriters,
                                               kWriters, stream, static_cast<uint64_t*>(to) + done,
                                               count, part);
  }
  return error;
}

const char* text_of(cudaError_t error) {
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace

const char* write_items(const Plan& plan, const Item* items, float* const* steps, void* stream) {
  static_assert(sizeof(Item) % 8 == 0);
  const auto queue = static_cast<cudaStream_t>(stream);
  cudaError_t error = write(plan.items, items, plan.sizes.items * sizeof(Item) / 8, queue);
  if (error == cudaSuccess) {
    error = write(plan.steps, steps, plan.sizes.steps, queue);
  }
  if (error == cudaSuccess && plan.sizes.chunks > 0) {
    const unsigned blocks = (plan.sizes.chunks + kThreads - 1) / kThreads;
    error = launch<Plan>(table_kernel, blocks, kThreads, queue, plan);
  }
  return text_of(error);
}

const char* write_gradients(const Plan& plan, const uint64_t* gradients, void* stream) {
  return text_of(write(plan.gradients, gradients, plan.sizes.items,
                       static_cast<cudaStream_t>(stream)));
}

}  // namespace multi_tensor
}  // namespace opkiln
