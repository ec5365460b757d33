// What the binding hands to the kernels. Needs neither torch's headers nor CUDA's, so that each side
// compiles without the other's. (Not named cuda.h: hipify would take it for CUDA's own.)
#pragma once

#include <opkiln/optimizing/plan.h>

namespace opkiln {
namespace fused_lamb {

struct Hyper {
  double beta1, log_beta1, beta2, log_beta2, eps, weight_decay, min_coeff, max_coeff;
  bool eps_inside_sqrt, bias_correction, maximize;
  multi_tensor::Numbers numbers;
};

// Squares of a parameter and its update, summed per chunk, and again over so many chunks where these
// are all of one tensor: so that the sum of a large tensor's takes no longer than that of a small.
constexpr uint32_t kFold = 512;

// Words of 8 bytes that `sums` of a step has.
constexpr std::size_t sum_words(const multi_tensor::Sizes& sizes) {
  return sizes.chunks + 2 * (sizes.chunks / kFold + 1);
}

// Enqueues the step of all items on a stream of the current device, and adds 1 to each count of
// steps. `coefficients` has a number per item. Null, or the text of CUDA's error. Does not wait,
// allocates nothing.
const char* enqueue(const Hyper& hyper, const multi_tensor::Plan& plan, void* sums,
                    float* coefficients, void* stream);

// The halves of it, with sums of squares between them that the caller may add to: two numbers per
// item, of it and of its update. The first does not count the step.
const char* enqueue_average(const Hyper& hyper, const multi_tensor::Plan& plan, void* sums,
                            double* squares, void* stream);
const char* enqueue_move(const Hyper& hyper, const multi_tensor::Plan& plan, const double* squares,
                         float* coefficients, void* stream);

}  // namespace fused_lamb
}  // namespace opkiln
