// The plan of a step over a list of tensors, in device memory: a record per tensor, the addresses of the
// gradients, and a table from chunk to tensor, where each thread block finds its work.
//
// Kernels write the plan from their launch parameters. So no host memory has to stay unchanged until a
// copy is done, and a captured graph keeps the values of the capture.
#pragma once

#include <opkiln/element_type.h>
#include <opkiln/op.h>

namespace opkiln {
namespace multi_tensor {

// A thread block steps one chunk: one access of four elements per thread and tensor. Blocks that loop over
// more were 2 to 13% slower on an H200, because a block that ends makes room for another block's loads.
constexpr int kThreads = 128;
constexpr int kChunk = 4 * kThreads;

// A parameter and the tensors that are stepped with it, all in device memory.
struct Item {
  void* param;
  float* states[2];  // the second is null if the optimizer has only one
  float* master;     // null: the parameter itself is stepped
  int64_t numel;
  uint32_t first;    // index of its first chunk; no memory holds 2^32 chunks
  uint32_t step;     // index of its step count
  ElementType param_type;
  bool fours;        // one access can move four elements of each tensor (the gradient is checked separately)
};

// A gradient's address, with its type in the two highest bits, which addresses do not use.
constexpr int kTypeShift = 62;
constexpr uint64_t kAddress = (uint64_t{1} << kTypeShift) - 1;  // also stands for a gradient without elements

inline uint64_t gradient(const void* at, ElementType type) {
  return at ? reinterpret_cast<uint64_t>(at) | static_cast<uint64_t>(type) << kTypeShift : kAddress;
}

struct Sizes {
  uint32_t items;
  uint32_t steps;   // step counts: one, or one per item
  uint32_t chunks;
};

constexpr size_t kCoefficientBytes = 64;  // per step count, of an optimizer's precomputed coefficients

// Pointers into one allocation of plan_words() 8-byte words, aligned to 16 bytes.
struct Plan {
  Sizes sizes;
  bool plain;  // all parameters and gradients are fp32
  Item* items;
  uint64_t* gradients;
  float** steps;
  unsigned char* coefficients;
  uint32_t* table;
};

constexpr size_t plan_words(const Sizes& sizes) {
  return sizes.steps * (kCoefficientBytes / 8 + 1) + sizes.items * (sizeof(Item) / 8 + 1) +
      (sizes.chunks + 1) / 2;
}

inline Plan plan_at(void* memory, const Sizes& sizes, bool plain) {
  Plan plan;
  plan.sizes = sizes;
  plan.plain = plain;
  plan.coefficients = static_cast<unsigned char*>(memory);
  plan.steps = reinterpret_cast<float**>(plan.coefficients + sizes.steps * kCoefficientBytes);
  plan.items = reinterpret_cast<Item*>(plan.steps + sizes.steps);
  plan.gradients = reinterpret_cast<uint64_t*>(plan.items + sizes.items);
  plan.table = reinterpret_cast<uint32_t*>(plan.gradients + sizes.items);
  return plan;
}

// Numbers that may be known only on the device. Kernels read them when they
// run, so each replay of a captured graph sees the current values.
struct Numbers {
  double lr;                // used if both of the next two are null
  const float* lr_float;
  const double* lr_double;
  const float* grad_scale;  // null: 1
  const float* found_inf;   // null, or a flag: if it is not 0, nothing is written
};

struct Words {
  static constexpr size_t kCount = (opk::kParameterBytes - 24) / 8;

  uint64_t at[kCount];
};

// The lanes of a warp read different words, and constant memory serves
// these one at a time. So a launch has many blocks of one warp.
constexpr unsigned kWriters = 32;

__global__ void write_kernel(uint64_t* to, uint32_t count, const OPK_GRID_CONSTANT Words words) {
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

#if !defined(__CUDACC_RTC__)

// Enqueues a copy of host memory, also during graph capture. The caller may free the memory at once.
inline void write(void* to, const void* from, size_t words) {
  Words part;
  for (size_t done = 0; done < words; done += Words::kCount) {
    const size_t left = words - done;
    const auto count = static_cast<uint32_t>(left < Words::kCount ? left : Words::kCount);
    __builtin_memcpy(part.at, static_cast<const uint64_t*>(from) + done, count * 8);
    opk::launch(write_kernel, (count + kWriters - 1) / kWriters, kWriters, 0,
                static_cast<uint64_t*>(to) + done, count, part);
  }
}

inline void write_items(const Plan& plan, const Item* items, float* const* steps) {
  static_assert(sizeof(Item) % 8 == 0);
  write(plan.items, items, plan.sizes.items * sizeof(Item) / 8);
  write(plan.steps, steps, plan.sizes.steps);
  opk::launch(table_kernel, (plan.sizes.chunks + kThreads - 1) / kThreads, kThreads, 0, plan);
}

inline void write_gradients(const Plan& plan, const uint64_t* gradients) {
  write(plan.gradients, gradients, plan.sizes.items);
}

#endif

}  // namespace multi_tensor
}  // namespace opkiln
