// Device code's form of a factor that was computed in double. factor.h is the form for CPU vector registers.
#pragma once

#include "op.h"

namespace opkiln {
namespace device {

// A multiplier near 1, as the sum of two floats. One float would be off by up to 3e-8, always in the same
// direction, and a hundred steps would add that up to more than 1e-6. The high part has few bits, so errors
// fall on both sides. Both parts are positive, so infinity times the factor is infinity.
struct Factor {
  float high, low;

  __device__ static Factor of(double value) {
    const double high = fmax(ceil(value * 256) - 2, 0.0) / 256;
    return {static_cast<float>(high), static_cast<float>(value - high)};
  }

  // this * x + y. Only the last rounding matters.
  __device__ float times_plus(float x, float y) const {
    return fmaf(x, high, fmaf(x, low, y));
  }
};

}  // namespace device
}  // namespace opkiln
