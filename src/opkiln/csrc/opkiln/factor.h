// The CPU kernels' form of factors that were computed in double. Includes no torch header.
#pragma once

#include "vec.h"

OPKILN_NAMESPACE_BEGIN

inline Vec all(double value) {
  return Vec::all(static_cast<float>(value));
}

// A multiplier near 1, as the sum of two floats. One float would be off by up to 3e-8, always in the same
// direction, and a hundred steps would add that up to more than 1e-6. The high part has few bits and the low
// part is not small, so errors fall on both sides, even without fused multiply-add. Both parts are positive,
// so infinity times the factor is infinity, not infinity minus infinity.
class Factor {
 public:
  explicit Factor(double value)
      : Factor(value, __builtin_fmax(__builtin_ceil(value * 256) - 2, 0) / 256) {}

  // this * x + y. Only the last rounding matters.
  Vec times_plus(Vec x, Vec y) const {
    return multiply_add(x, high_, multiply_add(x, low_, y));
  }

 private:
  Factor(double value, double high) : high_(all(high)), low_(all(value - high)) {}

  Vec high_, low_;
};

OPKILN_NAMESPACE_END
