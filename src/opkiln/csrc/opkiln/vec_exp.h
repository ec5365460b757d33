// Exponentials of a register of floats. The coefficients are minimax fits, made for these intervals.
#pragma once

#include "vec.h"

OPKILN_NAMESPACE_BEGIN

// The polynomial with these coefficients, the constant first.
template <int kCount>
inline Vec polynomial(Vec x, const float (&coefficients)[kCount]) {
  Vec sum = Vec::all(coefficients[kCount - 1]);
  for (int i = kCount - 2; i >= 0; --i) {
    sum = multiply_add(sum, x, Vec::all(coefficients[i]));
  }
  return sum;
}

// 2 to the power of x, with a relative error below 3e-7. Below 2^-126 it is 0, from 2^127.5 on infinity.
inline Vec exp2(Vec x) {
  constexpr float kPowers[] = {1.0f,           0.693147206f,   0.240226469f,  0.0555032878f,
                               0.00961848896f, 0.00133999312f, 0.000153458116f};
  const Vec bounded = at_least(Vec::all(-127), at_most(Vec::all(128), x));
  const Vec shift = Vec::all(12582912);  // 1.5 * 2^23: what is added to it is rounded to a whole number
  const Vec whole = (bounded + shift) - shift;
  return polynomial(bounded - whole, kPowers) * power_of_two(whole);
}

// erfc(x) for x >= 0, with a relative error below 1e-5 down to 2^-126, and below 1e-6 for small x:
// t * 2^(P(t) - x^2 * log2(e)), where t is 1 / (1 + x / 2).
inline Vec erfc_of_positive(Vec x) {
  constexpr float kLogarithm[] = {-1.82562522f,  1.44010554f,   0.563109698f, 0.0245520318f, 0.0764020713f,
                                  -0.256049125f, -0.835207062f, 1.54190538f,  -0.928434147f, 0.199240895f};
  const Vec t = Vec::all(1) / multiply_add(x, Vec::all(0.5f), Vec::all(1));
  const Vec square = x * Vec::all(1.44269504f);
  return t * exp2(subtract_product(polynomial(t, kLogarithm), square, x));
}

OPKILN_NAMESPACE_END
