// What kernels make of numbers worked out in double. Needs no torch header.
#pragma once

#include "vec.h"

OPKILN_NAMESPACE_BEGIN

inline Vec all(double value) {
  return Vec::all(static_cast<float>(value));
}

// A multiplier near 1 as the sum of two floats. Rounded to one it would be off by up to 3e-8, always
// to the same side, which a hundred steps add up to more than 1e-6. The first part has few bits and
// the second is not small, so that without fused multiply-add, too, errors fall to both sides; both
// are positive, so that infinity times it is infinity and not infinity less infinity.
class Factor {
 public:
  explicit Factor(double value)
      : Factor(value, std::fmax(std::ceil(value * 256) - 2, 0) / 256) {}

  // this * x + y, rounded once where it matters.
  Vec times_plus(Vec x, Vec y) const {
    return multiply_add(x, high_, multiply_add(x, low_, y));
  }

 private:
  Factor(double value, double high) : high_(all(high)), low_(all(value - high)) {}

  Vec high_, low_;
};

OPKILN_NAMESPACE_END
