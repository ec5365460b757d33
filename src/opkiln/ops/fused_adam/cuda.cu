// Adam and AdamW over the tensors of a plan: sweep.h has the loop, element.h the arithmetic.

#include <opkiln/optimizing/sweep.h>
#include "element.h"

namespace opkiln {
namespace fused_adam {

const char* enqueue(const Hyper& hyper, const multi_tensor::Plan& plan, void* stream) {
  const cudaError_t error = multi_tensor::enqueue_step<Coefficients>(
      hyper, plan, static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace fused_adam
}  // namespace opkiln
