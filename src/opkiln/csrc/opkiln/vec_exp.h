// Exponentials of vector registers of floats (Vec or Wide). The
// coefficients are minimax fits on these intervals.
//
// The template parameter is the number of binary digits that the caller keeps: 24 for float, 11 for float16,
// 8 for bfloat16. Fewer digits need less work; the error stays below a sixteenth of the rounding error.
#pragma once

#include "vec.h"

OPKILN_NAMESPACE_BEGIN

template <class T>
constexpr int kDigitsOf = 24;
template <>
inline constexpr int kDigitsOf<Float16> = 11;
template <>
inline constexpr int kDigitsOf<BFloat16> = 8;

// Evaluates a polynomial; the constant coefficient comes first.
template <class V, int kCount>
inline V polynomial(const V& x, const float (&coefficients)[kCount]) {
  V sum = V::all(coefficients[kCount - 1]);
  for (int i = kCount - 2; i >= 0; --i) {
    sum = multiply_add(sum, x, V::all(coefficients[i]));
  }
  return sum;
}

// 1 / x for x >= 1.
template <int kDigits, class V>
inline V inverse(const V& x) {
  if constexpr (kDigits <= 8) {
    return rough_reciprocal(x);
  } else {
    return reciprocal(x);
  }
}

// 2 to the power of x. The relative error is below 3e-7 for 24 digits, 3e-6 for 11 and 8e-5 for 8. The result
// is 0 or subnormal below 2^-126, and infinity from 2^128 on.
template <int kDigits, class V>
inline V exp2(const V& x) {
  constexpr float kFine[] = {1.0f,           0.693147206f,   0.240226469f,  0.0555032878f,
                             0.00961848896f, 0.00133999312f, 0.000153458116f};
  constexpr float kMiddle[] = {0.999999261f, 0.693121815f, 0.240247448f, 0.0559178603f, 0.0095701017f};
  constexpr float kCoarse[] = {0.999928074f, 0.693260986f, 0.242611122f, 0.0551716672f};
  const V bounded = within_exponents(x);
  const V rest = rest_of_whole(bounded), power = whole_power(bounded);
  if constexpr (kDigits <= 8) {
    return times_power_of_two(polynomial(rest, kCoarse), power);
  } else if constexpr (kDigits <= 11) {
    return times_power_of_two(polynomial(rest, kMiddle), power);
  } else {
    return times_power_of_two(polynomial(rest, kFine), power);
  }
}

// The normal distribution's tail, erfc(x / sqrt(2)) / 2, for 0 <= x <= kTailEnd. Its logarithm is a
// polynomial for few digits; for 24 that would need too many terms, and it is t * 2^(P(t) - x^2 * log2(e) / 2)
// with t = 1 / (1 + k * x). For 24 digits the relative error is below 1e-5 down to 2^-126, and below 1e-6 for
// small x. For 8 digits it is below 2e-4. For 11 digits it is below 2e-5 down to 2^-30, and 1% at the end.
template <int kDigits>
constexpr float kTailEnd = kDigits == 11 ? 8.0f : 14.5f;

template <int kDigits, class V>
inline V normal_tail(const V& x) {
  constexpr float kFine[] = {-3.56661376f, 1.50475821f, 0.240888405f, 1.87085795f,
                             -3.11006798f, 4.2419235f,  -2.88739626f, 0.70564935f};
  constexpr float kMiddle[] = {-1.00000191f,    -1.15119863f,     -0.4585751f,    -0.0538612343f,
                               0.0084638074f, -0.000920196762f, 6.03841618e-05f, -1.77838899e-06f};
  constexpr float kCoarse[] = {-1.00018382f,      -1.14903545f,   -0.462790489f,   -0.0507947765f, 0.00741626089f,
                               -0.000743482669f, 4.75494198e-05f, -1.73123397e-06f, 2.71626543e-08f};
  if constexpr (kDigits <= 8) {
    return exp2<kDigits>(polynomial(x, kCoarse));
  } else if constexpr (kDigits <= 11) {
    return exp2<kDigits>(polynomial(x, kMiddle));
  } else {
    const V t = reciprocal(multiply_add(x, V::all(0.212132034f), V::all(1)));
    return t * exp2<kDigits>(subtract_product(polynomial(t, kFine), x * V::all(0.72134752f), x));
  }
}

OPKILN_NAMESPACE_END
