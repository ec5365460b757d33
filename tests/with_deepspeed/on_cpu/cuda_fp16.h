// CUDA's half, as far as DeepSpeed's quantizer uses it: arithmetic in fp32, rounded, which of two
// halves is the half arithmetic.
#pragma once

#include <cuda.h>
#include <opkiln/vec.h>

struct __half_raw {
  uint16_t x;
};
struct __half2_raw {
  uint16_t x, y;
};

struct __half {
  opkiln::Float16 value;

  __half() = default;
  explicit __half(__half_raw raw) : value{raw.x} {}
  explicit __half(float number) : value(opkiln::narrow_float16(number)) {}
  explicit __half(int number) : __half(static_cast<float>(number)) {}
  float wide() const {
    return opkiln::widen(value);
  }
};
using half = __half;

inline __half operator+(__half a, __half b) {
  return __half(a.wide() + b.wide());
}
inline __half operator-(__half a, __half b) {
  return __half(a.wide() - b.wide());
}
inline __half operator*(__half a, __half b) {
  return __half(a.wide() * b.wide());
}
inline __half operator/(__half a, __half b) {
  return __half(a.wide() / b.wide());
}
inline bool operator<(__half a, __half b) {
  return a.wide() < b.wide();
}
inline bool operator>(__half a, __half b) {
  return a.wide() > b.wide();
}
inline __half hrint(__half a) {
  return __half(std::rint(a.wide()));
}
// The number, where one of the two is NaN.
inline __half __hmax(__half a, __half b) {
  return __half(std::fmax(a.wide(), b.wide()));
}
inline __half __hmin(__half a, __half b) {
  return __half(std::fmin(a.wide(), b.wide()));
}

struct __half2 {
  __half x, y;

  __half2() = default;
  __half2(__half low, __half high) : x(low), y(high) {}
  explicit __half2(__half2_raw raw) : x(__half_raw{raw.x}), y(__half_raw{raw.y}) {}
};

inline __half2 operator+(__half2 a, __half2 b) {
  return {a.x + b.x, a.y + b.y};
}
inline __half2 __hmax2(__half2 a, __half2 b) {
  return {__hmax(a.x, b.x), __hmax(a.y, b.y)};
}
inline __half2 __hmin2(__half2 a, __half2 b) {
  return {__hmin(a.x, b.x), __hmin(a.y, b.y)};
}
inline __half2 __habs2(__half2 a) {
  return {__half(std::fabs(a.x.wide())), __half(std::fabs(a.y.wide()))};
}
