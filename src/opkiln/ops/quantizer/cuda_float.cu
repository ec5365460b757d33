// Quantizing fp32: tensors, and what is worked out in it (sums of parts, feedback of errors). Of
// groups above 32768 elements a block's registers do not hold all.

#include "launches.h"

namespace opkiln {
namespace quantizer {

cudaError_t enqueue_float(Launch& l, cudaStream_t stream) {
  return launch_quantize<TensorSource<Float>>(l, l, stream);
}

cudaError_t enqueue_worked_out(Reduction& r, cudaStream_t stream) {
  return launch_quantize<FloatSource>(r.launch, r, stream);
}

}  // namespace quantizer
}  // namespace opkiln
