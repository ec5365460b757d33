// What the binding hands to the kernel. Needs neither torch's headers nor CUDA's, so that each side
// compiles without the other's. (Not named cuda.h: hipify would take it for CUDA's own.)
#pragma once

#include <cstddef>
#include <cstdint>

namespace opkiln {
namespace fused_adam {

enum class Type : uint8_t { kFloat, kBFloat16, kFloat16 };

// A parameter and what is walked in step with it; all of them in device memory.
struct Item {
  void* param;
  const void* grad;
  float* exp_avg;
  float* exp_avg_sq;
  float* master;      // null: the parameter itself is stepped
  const float* step;  // how many steps were made before this one
  int64_t numel;
  Type param_type, grad_type;
  bool fours;  // found by enqueue: four elements of each can be moved in one access
};

// Pointers are to single numbers in device memory, read when the kernel runs: a captured graph sees
// what is there at each replay.
struct Hyper {
  double beta1, log_beta1, beta2, log_beta2, eps, weight_decay;
  double lr;                  // unless one of the next two is given
  const float* lr_float;
  const double* lr_double;
  const float* grad_scale;    // null: 1
  const float* found_inf;     // null, or: nothing is written where it is not 0
  bool adamw_mode, bias_correction, maximize;
};

// Enqueues the step of all items on a stream of the current device, and then adds 1 to each of the
// `steps`. Null, or the text of CUDA's error. Does not wait, allocates nothing.
const char* enqueue(const Hyper& hyper, const Item* items, std::size_t count, float* const* steps,
                    std::size_t step_count, void* stream);

}  // namespace fused_adam
}  // namespace opkiln
