// In place of DeepSpeed's header of this name, which is made of CUDA's conversions: those that the
// quantizer calls, as CUDA defines them.
#pragma once

#include <cmath>

#include "ds_kernel_utils.h"

namespace conversion {

template <class To, class From>
To to(From value);

template <>
inline float to(float value) {
  return value;
}
template <>
inline float to(__half value) {
  return value.wide();
}
template <>
inline float to(int8_t value) {
  return static_cast<float>(value);
}
template <>
inline __half to(float value) {
  return __half(value);
}
template <>
inline float2 to(__half2 value) {
  return {value.x.wide(), value.y.wide()};
}
// __float2int_rn: ties to even, cut off at the ends, 0 of NaN.
template <>
inline int32_t to(float value) {
  if (std::isnan(value)) {
    return 0;
  }
  if (value >= 0x1p31f) {
    return INT32_MAX;
  }
  return value < -0x1p31f ? INT32_MIN : static_cast<int32_t>(std::nearbyint(value));
}

}  // namespace conversion
