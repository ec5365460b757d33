// The work on a list of tensors, in device memory: a record per tensor, the addresses of the gradients,
// and a table from chunk to tensor, in which each thread block finds its work. Includes no header of
// torch or CUDA, so that bindings and kernels compile separately.
#pragma once

#include <opkiln/element_type.h>

#include <cstddef>
#include <cstdint>

namespace opkiln {
namespace multi_tensor {

// A thread block steps one chunk: an access of four elements per thread and tensor. Blocks that loop
// over more were 2 to 13% slower on an H200, because a block that ends makes room for the loads of
// another.
constexpr int kThreads = 128;
constexpr int kChunk = 4 * kThreads;

// A parameter and the tensors that are walked together with it, all in device memory.
struct Item {
  void* param;
  float* states[2];  // the second is null if the optimizer has only one
  float* master;     // null: the parameter itself is stepped
  int64_t numel;
  uint32_t first;    // its first chunk; no memory holds 2^32 chunks
  uint32_t step;     // index of its count of steps
  ElementType param_type;
  bool fours;        // one access can move four elements of each tensor, the gradient aside
};

// A gradient's address, with its type in the two highest bits. No address uses these.
constexpr int kTypeShift = 62;
constexpr uint64_t kAddress = (uint64_t{1} << kTypeShift) - 1;

inline uint64_t gradient(const void* at, ElementType type) {
  return reinterpret_cast<uint64_t>(at) | static_cast<uint64_t>(type) << kTypeShift;
}

struct Sizes {
  uint32_t items;
  uint32_t steps;   // counts of steps: one, or one for each item
  uint32_t chunks;
};

constexpr std::size_t kCoefficientBytes = 64;  // an optimizer computes these once per count

// Pointers into one piece of memory of plan_words() words of 8 bytes, aligned to 16.
struct Plan {
  Sizes sizes;
  bool plain;  // all parameters and gradients are fp32
  Item* items;
  uint64_t* gradients;
  float** steps;
  std::byte* coefficients;
  uint32_t* table;
};

constexpr std::size_t plan_words(const Sizes& sizes) {
  return sizes.steps * (kCoefficientBytes / 8 + 1) + sizes.items * (sizeof(Item) / 8 + 1) +
      (sizes.chunks + 1) / 2;
}

inline Plan plan_at(void* memory, const Sizes& sizes, bool plain) {
  Plan plan;
  plan.sizes = sizes;
  plan.plain = plain;
  plan.coefficients = static_cast<std::byte*>(memory);
  plan.steps = reinterpret_cast<float**>(plan.coefficients + sizes.steps * kCoefficientBytes);
  plan.items = reinterpret_cast<Item*>(plan.steps + sizes.steps);
  plan.gradients = reinterpret_cast<uint64_t*>(plan.items + sizes.items);
  plan.table = reinterpret_cast<uint32_t*>(plan.gradients + sizes.items);
  return plan;
}

// Numbers that only the device may know. They are read when a kernel runs, so each replay of a captured
// graph sees their current values.
struct Numbers {
  double lr;                // used if both of the next two are null
  const float* lr_float;
  const double* lr_double;
  const float* grad_scale;  // null: 1
  const float* found_inf;   // null; otherwise nothing is written if it is not 0
};

// Each function enqueues on a stream of the current device, and returns null or the text of CUDA's
// error. They do not wait or allocate. Their arguments are passed in the parameters of launches, so the
// caller may free them at once, also while a graph is captured.
const char* write_items(const Plan& plan, const Item* items, float* const* steps, void* stream);
const char* write_gradients(const Plan& plan, const uint64_t* gradients, void* stream);

}  // namespace multi_tensor
}  // namespace opkiln
