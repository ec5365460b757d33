// What the binding hands to the kernel. Needs neither torch's headers nor CUDA's, so that each side
// compiles without the other's. (Not named cuda.h: hipify would take it for CUDA's own.)
#pragma once

#include <opkiln/optimizing/plan.h>

namespace opkiln {
namespace fused_adam {

struct Hyper {
  double beta1, log_beta1, beta2, log_beta2, eps, weight_decay;
  bool adamw_mode, bias_correction, maximize;
  multi_tensor::Numbers numbers;
};

// Enqueues the step of all items on a stream of the current device, and adds 1 to each count of
// steps. Null, or the text of CUDA's error. Does not wait, allocates nothing.
const char* enqueue(const Hyper& hyper, const multi_tensor::Plan& plan, void* stream);

}  // namespace fused_adam
}  // namespace opkiln
