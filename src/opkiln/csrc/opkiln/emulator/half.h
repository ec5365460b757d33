// CUDA's 16-bit floats, __half and __nv_bfloat16: storage, conversions and arithmetic. Operations compute in
// float and round, which equals a GPU's result: a float has more than twice the digits.
#pragma once

#include <cmath>
#include <cstdint>

#include "numbers.h"
#include "vectors.h"

namespace opk {
namespace emulator {

inline float half_to_float(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16, rest = bits & 0x7fffu;
  if (rest >= 0x7c00u) {
    return bits_as<float>(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  }
  // The exponent biases differ by 112; this product turns a subnormal half into a normal float.
  const float scaled = bits_as<float>(rest << 13) * 0x1p112f;
  return bits_as<float>(sign | bits_as<uint32_t>(scaled));
}

inline uint16_t half_of_float(float value) {
  const uint32_t bits = bits_as<uint32_t>(value), sign = bits >> 16 & 0x8000u;
  const uint32_t rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) {
    return 0x7fff;
  }
  if (rest >= 0x477ff000u) {  // rounds to more than 65504
    return static_cast<uint16_t>(sign | 0x7c00u);
  }
  if (rest < 0x38800000u) {  // subnormal: the sum aligns a float's last digit with a half's
    const float sum = bits_as<float>(rest) + 0.5f;
    return static_cast<uint16_t>(sign | (bits_as<uint32_t>(sum) - 0x3f000000u));
  }
  const uint32_t even = rest + 0xfffu + (rest >> 13 & 1u);
  return static_cast<uint16_t>(sign | (even - 0x38000000u) >> 13);
}

inline float bfloat16_to_float(uint16_t bits) {
  return bits_as<float>(static_cast<uint32_t>(bits) << 16);
}

inline uint16_t bfloat16_of_float(float value) {
  const uint32_t bits = bits_as<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return 0x7fff;
  }
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// Converts from double. Rounding to float first must not decide a
// tie, so its last bit keeps the rest (round to odd).
inline float float_to_round(double value) {
  const float near = static_cast<float>(value);
  if (near == value || near != near || std::isinf(near)) {
    return near;
  }
  const uint32_t bits = bits_as<uint32_t>(near);
  const bool too_far = std::fabs(static_cast<double>(near)) > std::fabs(value);
  return bits_as<float>((too_far ? bits - 1 : bits) | 1u);
}

}  // namespace emulator
}  // namespace opk

#define OPKILN_16_BITS(Type, Raw, prefix, read, round)                                          \
  struct Raw {                                                                                  \
    unsigned short x;                                                                           \
  };                                                                                            \
  struct Type {                                                                                 \
    Type() = default;                                                                           \
    Type(const Raw& raw) : bits(raw.x) {}                                                       \
    Type(float v) : bits(::opk::emulator::round(v)) {}                                          \
    Type(double v) : bits(::opk::emulator::round(::opk::emulator::float_to_round(v))) {}        \
    Type(int v) : Type(static_cast<double>(v)) {}                                               \
    Type(unsigned v) : Type(static_cast<double>(v)) {}                                          \
    Type(long v) : Type(static_cast<double>(v)) {}                                              \
    Type(unsigned long v) : Type(static_cast<double>(v)) {}                                     \
    Type(long long v) : Type(static_cast<double>(v)) {}                                         \
    Type(unsigned long long v) : Type(static_cast<double>(v)) {}                                \
    Type(short v) : Type(static_cast<float>(v)) {}                                              \
    Type(unsigned short v) : Type(static_cast<float>(v)) {}                                     \
    operator float() const {                                                                    \
      return ::opk::emulator::read(bits);                                                       \
    }                                                                                           \
    operator Raw() const {                                                                      \
      return {bits};                                                                            \
    }                                                                                           \
    Type& operator+=(Type v) {                                                                  \
      return *this = Type(float(*this) + float(v));                                             \
    }                                                                                           \
    Type& operator-=(Type v) {                                                                  \
      return *this = Type(float(*this) - float(v));                                             \
    }                                                                                           \
    Type& operator*=(Type v) {                                                                  \
      return *this = Type(float(*this) * float(v));                                             \
    }                                                                                           \
    Type& operator/=(Type v) {                                                                  \
      return *this = Type(float(*this) / float(v));                                             \
    }                                                                                           \
    unsigned short bits;                                                                        \
  };                                                                                            \
  inline Type operator+(Type a, Type b) {                                                       \
    return Type(float(a) + float(b));                                                           \
  }                                                                                             \
  inline Type operator-(Type a, Type b) {                                                       \
    return Type(float(a) - float(b));                                                           \
  }                                                                                             \
  inline Type operator*(Type a, Type b) {                                                       \
    return Type(float(a) * float(b));                                                           \
  }                                                                                             \
  inline Type operator/(Type a, Type b) {                                                       \
    return Type(float(a) / float(b));                                                           \
  }                                                                                             \
  inline Type operator-(Type a) {                                                               \
    return Type(Raw{static_cast<unsigned short>(a.bits ^ 0x8000u)});                            \
  }                                                                                             \
  inline bool operator==(Type a, Type b) {                                                      \
    return float(a) == float(b);                                                                \
  }                                                                                             \
  inline bool operator!=(Type a, Type b) {                                                      \
    return float(a) != float(b);                                                                \
  }                                                                                             \
  inline bool operator<(Type a, Type b) {                                                       \
    return float(a) < float(b);                                                                 \
  }                                                                                             \
  inline bool operator>(Type a, Type b) {                                                       \
    return float(a) > float(b);                                                                 \
  }                                                                                             \
  inline bool operator<=(Type a, Type b) {                                                      \
    return float(a) <= float(b);                                                                \
  }                                                                                             \
  inline bool operator>=(Type a, Type b) {                                                      \
    return float(a) >= float(b);                                                                \
  }                                                                                             \
  inline Type __hadd(Type a, Type b) {                                                          \
    return a + b;                                                                               \
  }                                                                                             \
  inline Type __hsub(Type a, Type b) {                                                          \
    return a - b;                                                                               \
  }                                                                                             \
  inline Type __hmul(Type a, Type b) {                                                          \
    return a * b;                                                                               \
  }                                                                                             \
  inline Type __hdiv(Type a, Type b) {                                                          \
    return a / b;                                                                               \
  }                                                                                             \
  inline Type __hfma(Type a, Type b, Type c) {                                                  \
    /* exact in double: 22 digits in the product */                                             \
    return Type(double(float(a)) * double(float(b)) + double(float(c)));                        \
  }                                                                                             \
  inline Type __hneg(Type a) {                                                                  \
    return -a;                                                                                  \
  }                                                                                             \
  inline Type __habs(Type a) {                                                                  \
    return Type(Raw{static_cast<unsigned short>(a.bits & 0x7fffu)});                            \
  }                                                                                             \
  inline Type __hmax(Type a, Type b) {                                                          \
    return Type(fmaxf(float(a), float(b)));                                                     \
  }                                                                                             \
  inline Type __hmin(Type a, Type b) {                                                          \
    return Type(fminf(float(a), float(b)));                                                     \
  }                                                                                             \
  inline bool __heq(Type a, Type b) {                                                           \
    return a == b;                                                                              \
  }                                                                                             \
  inline bool __hne(Type a, Type b) {                                                           \
    return a < b || a > b;                                                                      \
  }                                                                                             \
  inline bool __hlt(Type a, Type b) {                                                           \
    return a < b;                                                                               \
  }                                                                                             \
  inline bool __hle(Type a, Type b) {                                                           \
    return a <= b;                                                                              \
  }                                                                                             \
  inline bool __hgt(Type a, Type b) {                                                           \
    return a > b;                                                                               \
  }                                                                                             \
  inline bool __hge(Type a, Type b) {                                                           \
    return a >= b;                                                                              \
  }                                                                                             \
  inline bool __hisnan(Type a) {                                                                \
    return float(a) != float(a);                                                                \
  }                                                                                             \
  inline int __hisinf(Type a) {                                                                 \
    return std::isinf(float(a)) ? (float(a) > 0 ? 1 : -1) : 0;                                  \
  }                                                                                             \
  inline Type hexp(Type a) {                                                                    \
    return Type(std::exp(double(float(a))));                                                    \
  }                                                                                             \
  inline Type hlog(Type a) {                                                                    \
    return Type(std::log(double(float(a))));                                                    \
  }                                                                                             \
  inline Type hsqrt(Type a) {                                                                   \
    return Type(std::sqrt(float(a)));                                                           \
  }                                                                                             \
  inline Type hrsqrt(Type a) {                                                                  \
    return Type(1 / std::sqrt(double(float(a))));                                               \
  }                                                                                             \
  inline Type hrcp(Type a) {                                                                    \
    return Type(1 / float(a));                                                                  \
  }                                                                                             \
  inline Type hfloor(Type a) {                                                                  \
    return Type(std::floor(float(a)));                                                          \
  }                                                                                             \
  inline Type hceil(Type a) {                                                                   \
    return Type(std::ceil(float(a)));                                                           \
  }                                                                                             \
  inline Type hrint(Type a) {                                                                   \
    return Type(std::nearbyint(float(a)));                                                      \
  }                                                                                             \
  struct alignas(4) Type##2 {                                                                   \
    Type x, y;                                                                                  \
  };                                                                                            \
  inline Type##2 operator+(Type##2 a, Type##2 b) {                                              \
    return {a.x + b.x, a.y + b.y};                                                              \
  }                                                                                             \
  inline Type##2 operator-(Type##2 a, Type##2 b) {                                              \
    return {a.x - b.x, a.y - b.y};                                                              \
  }                                                                                             \
  inline Type##2 operator*(Type##2 a, Type##2 b) {                                              \
    return {a.x * b.x, a.y * b.y};                                                              \
  }                                                                                             \
  inline Type##2 operator/(Type##2 a, Type##2 b) {                                              \
    return {a.x / b.x, a.y / b.y};                                                              \
  }                                                                                             \
  inline Type##2 __hadd2(Type##2 a, Type##2 b) {                                                \
    return a + b;                                                                               \
  }                                                                                             \
  inline Type##2 __hsub2(Type##2 a, Type##2 b) {                                                \
    return a - b;                                                                               \
  }                                                                                             \
  inline Type##2 __hmul2(Type##2 a, Type##2 b) {                                                \
    return a * b;                                                                               \
  }                                                                                             \
  inline Type##2 __hfma2(Type##2 a, Type##2 b, Type##2 c) {                                     \
    return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};                                      \
  }                                                                                             \
  inline Type##2 __hmax2(Type##2 a, Type##2 b) {                                                \
    return {__hmax(a.x, b.x), __hmax(a.y, b.y)};                                                \
  }                                                                                             \
  inline Type##2 __hmin2(Type##2 a, Type##2 b) {                                                \
    return {__hmin(a.x, b.x), __hmin(a.y, b.y)};                                                \
  }                                                                                             \
  inline Type##2 __habs2(Type##2 a) {                                                           \
    return {__habs(a.x), __habs(a.y)};                                                          \
  }                                                                                             \
  inline Type __low2##prefix(Type##2 v) {                                                       \
    return v.x;                                                                                 \
  }                                                                                             \
  inline Type __high2##prefix(Type##2 v) {                                                      \
    return v.y;                                                                                 \
  }                                                                                             \
  inline float __low2float(Type##2 v) {                                                         \
    return v.x;                                                                                 \
  }                                                                                             \
  inline float __high2float(Type##2 v) {                                                        \
    return v.y;                                                                                 \
  }

OPKILN_16_BITS(__half, __half_raw, half, half_to_float, half_of_float)
OPKILN_16_BITS(__nv_bfloat16, __nv_bfloat16_raw, bfloat16, bfloat16_to_float, bfloat16_of_float)
#undef OPKILN_16_BITS

#define OPKILN_CONVERSIONS(Type, half, Raw)                                                     \
  inline float __##half##2float(Type v) {                                                       \
    return v;                                                                                   \
  }                                                                                             \
  inline Type __float2##half(float v) {                                                         \
    return Type(v);                                                                             \
  }                                                                                             \
  inline Type __float2##half##_rn(float v) {                                                    \
    return Type(v);                                                                             \
  }                                                                                             \
  inline Type __double2##half(double v) {                                                       \
    return Type(v);                                                                             \
  }                                                                                             \
  inline Type __int2##half##_rn(int v) {                                                        \
    return Type(v);                                                                             \
  }                                                                                             \
  inline Type __uint2##half##_rn(unsigned v) {                                                  \
    return Type(v);                                                                             \
  }                                                                                             \
  inline int __##half##2int_rn(Type v) {                                                        \
    return __float2int_rn(v);                                                                   \
  }                                                                                             \
  inline int __##half##2int_rz(Type v) {                                                        \
    return __float2int_rz(v);                                                                   \
  }                                                                                             \
  inline unsigned short __##half##_as_ushort(Type v) {                                          \
    return v.bits;                                                                              \
  }                                                                                             \
  inline short __##half##_as_short(Type v) {                                                    \
    return static_cast<short>(v.bits);                                                          \
  }                                                                                             \
  inline Type __ushort_as_##half(unsigned short v) {                                            \
    return Type(Raw{v});                                                                        \
  }                                                                                             \
  inline Type __short_as_##half(short v) {                                                      \
    return Type(Raw{static_cast<unsigned short>(v)});                                           \
  }                                                                                             \
  inline Type##2 __##half##2##half##2(Type v) {                                                 \
    return {v, v};                                                                              \
  }                                                                                             \
  inline Type##2 __float2##half##2_rn(float v) {                                                \
    return {Type(v), Type(v)};                                                                  \
  }                                                                                             \
  inline Type##2 __floats2##half##2_rn(float a, float b) {                                      \
    return {Type(a), Type(b)};                                                                  \
  }                                                                                             \
  inline float2 __##half##22float2(Type##2 v) {                                                 \
    return {float(v.x), float(v.y)};                                                            \
  }                                                                                             \
  inline Type##2 __float22##half##2_rn(float2 v) {                                              \
    return {Type(v.x), Type(v.y)};                                                              \
  }
OPKILN_CONVERSIONS(__half, half, __half_raw)
OPKILN_CONVERSIONS(__nv_bfloat16, bfloat16, __nv_bfloat16_raw)
#undef OPKILN_CONVERSIONS
inline __half2 __halves2half2(__half a, __half b) {
  return {a, b};
}
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) {
  return {a, b};
}
inline __half2 make_half2(__half a, __half b) {
  return {a, b};
}
inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) {
  return {a, b};
}
using half = __half;
using half2 = __half2;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;
