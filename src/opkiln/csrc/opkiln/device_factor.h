// How device code uses a factor that was computed in double. (factor.h has the same for the CPU's vector
// registers.)
#pragma once

#include "op.h"

namespace opkiln {
namespace device {

// A multiplier near 1 as the sum of two floats. Rounded to one float it would be off by up to 3e-8,
// always to the same side. A hundred steps add that up to more than 1e-6. The first part has few bits,
// so errors fall to both sides. Both are positive, so infinity times the factor is infinity.
struct Factor {
  float high, low;

  __device__ static Factor of(double value) {
    const double high = fmax(ceil(value * 256) - 2, 0.0) / 256;
    return {static_cast<float>(high), static_cast<float>(value - high)};
  }

  // this * x + y. Of its roundings, only the last matters.
  __device__ float times_plus(float x, float y) const {
    return fmaf(x, high, fmaf(x, low, y));
  }
};

}  // namespace device
}  // namespace opkiln
