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
  const V power = within_exponents(x);
  const V rest = rest_of_whole(power);
  const V whole = power - rest;
  if constexpr (kDigits <= 8) {
    return times_power_of_two(polynomial(rest, kCoarse), whole);
  } else if constexpr (kDigits <= 11) {
    return times_power_of_two(polynomial(rest, kMiddle), whole);
  } else {
    return times_power_of_two(polynomial(rest, kFine), whole);
  }
}

// erfc(x) for x >= 0, as t * 2^(P(t) - x^2 * log2(e)) with t = 1 / (1 + k * x). For 24 digits the relative
// error is below 1e-5 down to 2^-126, and below 1e-6 for small x. It is 3e-5 for 11 digits and 2e-4 for 8.
template <int kDigits, class V>
inline V erfc_of_positive(const V& x) {
  constexpr float kFine[] = {-2.56661376f, 1.50475821f, 0.240888405f, 1.87085795f,
                             -3.11006798f, 4.2419235f,  -2.88739626f, 0.70564935f};
  constexpr float kMiddle[] = {-1.82723351f, 1.46868309f, 0.367083919f, 0.684549075f, -1.02314629f, 0.330074709f};
  constexpr float kCoarse[] = {-1.33644196f, 1.3801455f, 0.729184276f, -1.13867999f, 0.365765437f};
  const V square = x * V::all(1.44269504f);
  const auto from = [&](float k, const auto& coefficients) {
    const V t = inverse<kDigits>(multiply_add(x, V::all(k), V::all(1)));
    return t * exp2<kDigits>(subtract_product(polynomial(t, coefficients), square, x));
  };
  if constexpr (kDigits <= 8) {
    return from(0.7f, kCoarse);
  } else if constexpr (kDigits <= 11) {
    return from(0.5f, kMiddle);
  } else {
    return from(0.3f, kFine);
  }
}

OPKILN_NAMESPACE_END
