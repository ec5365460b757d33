// Quantizing fp32: tensors, and what is worked out in it (sums of parts, feedback of errors). Of
// groups above 32768 elements a block's registers do not hold all.

#include <opkiln/op.h>

#include "launches.h"

namespace opkiln {
namespace quantizer {

void launch_float(Launch& l) {
  launch_quantize<TensorSource<Float>>(l, l);
}

void launch_worked_out(Reduction& r) {
  launch_quantize<FloatSource>(r.launch, r);
}

}  // namespace quantizer
}  // namespace opkiln
