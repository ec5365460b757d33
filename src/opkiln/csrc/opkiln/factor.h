// How kernels use numbers that were computed in double. Needs no torch header.
#pragma once

#include "vec.h"

OPKILN_NAMESPACE_BEGIN

inline Vec all(double value) {
  return Vec::all(static_cast<float>(value));
}

// A multiplier near 1 as the sum of two floats. Rounded to one float it would be off by up to 3e-8,
// always to the same side. A hundred steps add that up to more than 1e-6. The first part has few bits
// and the second is not small, so errors fall to both sides, also without fused multiply-add. Both are
// positive, so infinity times the factor is infinity, not infinity minus infinity.
class Factor {
 public:
  explicit Factor(double value)
      : Factor(value, __builtin_fmax(__builtin_ceil(value * 256) - 2, 0) / 256) {}

  // this * x + y. Of its roundings, only the last matters.
  Vec times_plus(Vec x, Vec y) const {
    return multiply_add(x, high_, multiply_add(x, low_, y));
  }

 private:
  Factor(double value, double high) : high_(all(high)), low_(all(value - high)) {}

  Vec high_, low_;
};

OPKILN_NAMESPACE_END
