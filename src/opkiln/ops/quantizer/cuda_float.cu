// The kernels that quantize fp32: tensors, sums of parts, and values with error
// feedback. Groups above 32768 elements exceed a block's registers.

#include <opkiln/op.h>

#include "launches.h"

namespace opkiln {
namespace quantizer {

void launch_float(Launch& l) {
  launch_quantize<TensorSource<Float>>(l, l);
}

void launch_computed(Reduction& r) {
  launch_quantize<FloatSource>(r.launch, r);
}

}  // namespace quantizer
}  // namespace opkiln
