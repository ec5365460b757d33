// Conversions of CUDA's half, for a C++ compiler.
#pragma once

#include <opkiln/vec.h>

using __half = opkiln::Float16;

inline float __half2float(__half value) {
  return opkiln::widen(value);
}
inline __half __float2half_rn(float value) {
  return opkiln::narrow_float16(value);
}
inline __half __ushort_as_half(uint16_t bits) {
  return {bits};
}
inline uint16_t __half_as_ushort(__half value) {
  return value.bits;
}
