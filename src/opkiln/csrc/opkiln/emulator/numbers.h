// CUDA's functions on numbers that C++ lacks: bits, conversions, roundings and fast approximations.
// Approximations return the exact result, rounded: a kernel that depends on the GPU's error is wrong anyway.
#pragma once

#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace opk {
namespace emulator {

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// Runs `compute()` in another rounding mode. Not inlined, so that the compiler moves nothing across it.
template <class Compute>
__attribute__((noinline, no_sanitize("thread"))) auto rounded(int mode, const Compute& compute) {
  const int before = std::fegetround();
  std::fesetround(mode);
  const volatile auto out = compute();
  std::fesetround(before);
  return static_cast<decltype(compute())>(out);
}

// Converts a float to an integer, saturating; NaN becomes 0, as on a GPU.
template <class I, class F>
I integer_of(F value) {
  constexpr I kSmallest = static_cast<I>(I(-1) < I(0) ? I(1) << (sizeof(I) * 8 - 1) : I(0));
  constexpr I kLargest = static_cast<I>(~kSmallest);
  if (value != value) {
    return sizeof(F) == 8 && I(-1) < I(0) ? kSmallest : I(0);
  }
  if (value <= static_cast<F>(kSmallest)) {
    return kSmallest;
  }
  return value >= static_cast<F>(kLargest) ? kLargest : static_cast<I>(value);
}

}  // namespace emulator
}  // namespace opk

// Bits

inline int __float_as_int(float v) {
  return ::opk::emulator::bits_as<int>(v);
}
inline unsigned __float_as_uint(float v) {
  return ::opk::emulator::bits_as<unsigned>(v);
}
inline float __int_as_float(int v) {
  return ::opk::emulator::bits_as<float>(v);
}
inline float __uint_as_float(unsigned v) {
  return ::opk::emulator::bits_as<float>(v);
}
inline long long __double_as_longlong(double v) {
  return ::opk::emulator::bits_as<long long>(v);
}
inline double __longlong_as_double(long long v) {
  return ::opk::emulator::bits_as<double>(v);
}
inline int __double2hiint(double v) {
  return static_cast<int>(::opk::emulator::bits_as<uint64_t>(v) >> 32);
}
inline int __double2loint(double v) {
  return static_cast<int>(::opk::emulator::bits_as<uint64_t>(v));
}
inline double __hiloint2double(int high, int low) {
  return ::opk::emulator::bits_as<double>(uint64_t{static_cast<unsigned>(high)} << 32 |
                                          static_cast<unsigned>(low));
}

inline int __popc(unsigned v) {
  return __builtin_popcount(v);
}
inline int __popcll(unsigned long long v) {
  return __builtin_popcountll(v);
}
inline int __clz(int v) {
  return v == 0 ? 32 : __builtin_clz(static_cast<unsigned>(v));
}
inline int __clzll(long long v) {
  return v == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(v));
}
inline int __ffs(int v) {
  return __builtin_ffs(v);
}
inline int __ffsll(long long v) {
  return __builtin_ffsll(v);
}
inline unsigned __brev(unsigned v) {
  unsigned out = 0;
  for (int i = 0; i < 32; ++i) {
    out |= (v >> i & 1u) << (31 - i);
  }
  return out;
}
inline unsigned long long __brevll(unsigned long long v) {
  return static_cast<unsigned long long>(__brev(static_cast<unsigned>(v))) << 32 |
      __brev(static_cast<unsigned>(v >> 32));
}
// Picks four of the eight bytes of two words by the digits of the selector. A digit's
// highest bit replicates the byte's sign bit into all eight bits.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned digit = selector >> (4 * i) & 15;
    unsigned byte = static_cast<unsigned>(bytes >> (8 * (digit & 7)) & 255);
    if (digit > 7) {
      byte = byte > 127 ? 255 : 0;
    }
    out |= byte << (8 * i);
  }
  return out;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  return static_cast<unsigned>(both << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  return static_cast<unsigned>(both >> (shift & 31));
}
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) {
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  return shift >= 32 ? low : static_cast<unsigned>(both << shift >> 32);
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift) {
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  return shift >= 32 ? high : static_cast<unsigned>(both >> shift);
}

// Integers

inline int __mulhi(int a, int b) {
  return static_cast<int>(static_cast<int64_t>(a) * b >> 32);
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
inline long long __mul64hi(long long a, long long b) {
  return static_cast<long long>(static_cast<__int128>(a) * b >> 64);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline int __mul24(int a, int b) {
  return static_cast<int>(static_cast<int64_t>(a << 8 >> 8) * (b << 8 >> 8));
}
inline unsigned __umul24(unsigned a, unsigned b) {
  return (a & 0xffffffu) * (b & 0xffffffu);
}
inline unsigned __sad(int a, int b, unsigned c) {
  return c + static_cast<unsigned>(a < b ? b - a : a - b);
}
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i) {
    c += static_cast<int8_t>(a >> (8 * i)) * static_cast<int8_t>(b >> (8 * i));
  }
  return c;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 4; ++i) {
    c += (a >> (8 * i) & 255u) * (b >> (8 * i) & 255u);
  }
  return c;
}

#define OPKILN_MIN_MAX(T)                \
  inline T min(T a, T b) {               \
    return b < a ? b : a;                \
  }                                      \
  inline T max(T a, T b) {               \
    return a < b ? b : a;                \
  }
OPKILN_MIN_MAX(int)
OPKILN_MIN_MAX(unsigned)
OPKILN_MIN_MAX(long)
OPKILN_MIN_MAX(unsigned long)
OPKILN_MIN_MAX(long long)
OPKILN_MIN_MAX(unsigned long long)
#undef OPKILN_MIN_MAX
inline unsigned min(int a, unsigned b) {
  return min(static_cast<unsigned>(a), b);
}
inline unsigned min(unsigned a, int b) {
  return min(a, static_cast<unsigned>(b));
}
inline unsigned max(int a, unsigned b) {
  return max(static_cast<unsigned>(a), b);
}
inline unsigned max(unsigned a, int b) {
  return max(a, static_cast<unsigned>(b));
}
inline float min(float a, float b) {
  return fminf(a, b);
}
inline float max(float a, float b) {
  return fmaxf(a, b);
}
inline double min(double a, double b) {
  return fmin(a, b);
}
inline double max(double a, double b) {
  return fmax(a, b);
}
inline double min(float a, double b) {
  return fmin(static_cast<double>(a), b);
}
inline double max(float a, double b) {
  return fmax(static_cast<double>(a), b);
}
inline double min(double a, float b) {
  return fmin(a, static_cast<double>(b));
}
inline double max(double a, float b) {
  return fmax(a, static_cast<double>(b));
}

// Arithmetic with explicit rounding

#define OPKILN_ROUNDINGS(prefix, T)                                                             \
  OPKILN_ROUNDED(prefix, T, rn, FE_TONEAREST)                                                   \
  OPKILN_ROUNDED(prefix, T, rz, FE_TOWARDZERO)                                                  \
  OPKILN_ROUNDED(prefix, T, ru, FE_UPWARD)                                                      \
  OPKILN_ROUNDED(prefix, T, rd, FE_DOWNWARD)
#define OPKILN_ROUNDED(prefix, T, way, mode)                                                    \
  inline T __##prefix##add_##way(T a, T b) {                                                    \
    return ::opk::emulator::rounded(mode, [=] { volatile T x = a; return static_cast<T>(x + b); }); \
  }                                                                                             \
  inline T __##prefix##sub_##way(T a, T b) {                                                    \
    return ::opk::emulator::rounded(mode, [=] { volatile T x = a; return static_cast<T>(x - b); }); \
  }                                                                                             \
  inline T __##prefix##mul_##way(T a, T b) {                                                    \
    return ::opk::emulator::rounded(mode, [=] { volatile T x = a; return static_cast<T>(x * b); }); \
  }                                                                                             \
  inline T __##prefix##div_##way(T a, T b) {                                                    \
    return ::opk::emulator::rounded(mode, [=] { volatile T x = a; return static_cast<T>(x / b); }); \
  }                                                                                             \
  inline T __##prefix##rcp_##way(T a) {                                                         \
    return ::opk::emulator::rounded(mode, [=] { volatile T x = 1; return static_cast<T>(x / a); }); \
  }                                                                                             \
  inline T __##prefix##sqrt_##way(T a) {                                                        \
    return ::opk::emulator::rounded(mode, [=] { volatile T x = a; return std::sqrt(static_cast<T>(x)); }); \
  }
OPKILN_ROUNDINGS(f, float)
OPKILN_ROUNDINGS(d, double)
#undef OPKILN_ROUNDED
#undef OPKILN_ROUNDINGS

#define OPKILN_FMA(way, mode)                                                                   \
  inline float __fmaf_##way(float a, float b, float c) {                                        \
    return ::opk::emulator::rounded(mode, [=] { volatile float x = a; return std::fma(static_cast<float>(x), b, c); }); \
  }                                                                                             \
  inline double __fma_##way(double a, double b, double c) {                                     \
    return ::opk::emulator::rounded(mode, [=] { volatile double x = a; return std::fma(static_cast<double>(x), b, c); }); \
  }
OPKILN_FMA(rn, FE_TONEAREST)
OPKILN_FMA(rz, FE_TOWARDZERO)
OPKILN_FMA(ru, FE_UPWARD)
OPKILN_FMA(rd, FE_DOWNWARD)
#undef OPKILN_FMA

// Conversions

#define OPKILN_TO_INTEGER(F, f, I, i)                                                           \
  inline I __##f##2##i##_rn(F v) {                                                              \
    return ::opk::emulator::integer_of<I>(std::nearbyint(v));                                   \
  }                                                                                             \
  inline I __##f##2##i##_rz(F v) {                                                              \
    return ::opk::emulator::integer_of<I>(std::trunc(v));                                       \
  }                                                                                             \
  inline I __##f##2##i##_ru(F v) {                                                              \
    return ::opk::emulator::integer_of<I>(std::ceil(v));                                        \
  }                                                                                             \
  inline I __##f##2##i##_rd(F v) {                                                              \
    return ::opk::emulator::integer_of<I>(std::floor(v));                                       \
  }
OPKILN_TO_INTEGER(float, float, int, int)
OPKILN_TO_INTEGER(float, float, unsigned, uint)
OPKILN_TO_INTEGER(float, float, long long, ll)
OPKILN_TO_INTEGER(float, float, unsigned long long, ull)
OPKILN_TO_INTEGER(double, double, int, int)
OPKILN_TO_INTEGER(double, double, unsigned, uint)
OPKILN_TO_INTEGER(double, double, long long, ll)
OPKILN_TO_INTEGER(double, double, unsigned long long, ull)
#undef OPKILN_TO_INTEGER

#define OPKILN_FROM_INTEGER(I, i, way, mode)                                                    \
  inline float __##i##2float_##way(I v) {                                                       \
    return ::opk::emulator::rounded(mode, [=] { volatile I x = v; return static_cast<float>(x); }); \
  }                                                                                             \
  inline double __##i##2double_##way(I v) {                                                     \
    return ::opk::emulator::rounded(mode, [=] { volatile I x = v; return static_cast<double>(x); }); \
  }
#define OPKILN_FROM_INTEGERS(I, i)                 \
  OPKILN_FROM_INTEGER(I, i, rn, FE_TONEAREST)      \
  OPKILN_FROM_INTEGER(I, i, rz, FE_TOWARDZERO)     \
  OPKILN_FROM_INTEGER(I, i, ru, FE_UPWARD)         \
  OPKILN_FROM_INTEGER(I, i, rd, FE_DOWNWARD)
OPKILN_FROM_INTEGERS(int, int)
OPKILN_FROM_INTEGERS(unsigned, uint)
OPKILN_FROM_INTEGERS(long long, ll)
OPKILN_FROM_INTEGERS(unsigned long long, ull)
#undef OPKILN_FROM_INTEGERS
#undef OPKILN_FROM_INTEGER

inline float __double2float_rn(double v) {
  return static_cast<float>(v);
}
inline float __double2float_rz(double v) {
  return ::opk::emulator::rounded(FE_TOWARDZERO, [=] {
    volatile double x = v;
    return static_cast<float>(x);
  });
}

// Approximations, and other functions that C++ lacks

inline float __expf(float v) {
  return std::exp(v);
}
inline float __exp10f(float v) {
  return static_cast<float>(std::pow(10.0, static_cast<double>(v)));
}
inline float __logf(float v) {
  return std::log(v);
}
inline float __log2f(float v) {
  return std::log2(v);
}
inline float __log10f(float v) {
  return std::log10(v);
}
inline float __sinf(float v) {
  return std::sin(v);
}
inline float __cosf(float v) {
  return std::cos(v);
}
inline float __tanf(float v) {
  return std::tan(v);
}
inline float __tanhf(float v) {
  return std::tanh(v);
}
inline void __sincosf(float v, float* s, float* c) {
  *s = std::sin(v);
  *c = std::cos(v);
}
inline float __powf(float a, float b) {
  return std::pow(a, b);
}
inline float __fdividef(float a, float b) {
  return a / b;
}
inline float __saturatef(float v) {
  return v >= 1 ? 1.0f : v > 0 ? v : 0.0f;  // NaN becomes 0
}
inline float rsqrtf(float v) {
  return static_cast<float>(1 / std::sqrt(static_cast<double>(v)));
}
inline float __frsqrt_rn(float v) {
  return rsqrtf(v);
}
inline double rsqrt(double v) {
  return 1 / std::sqrt(v);
}
inline float rsqrt(float v) {
  return rsqrtf(v);
}
inline float rcbrtf(float v) {
  return 1 / std::cbrt(v);
}
inline float normcdff(float v) {
  return static_cast<float>(0.5 * std::erfc(-static_cast<double>(v) / std::sqrt(2.0)));
}
inline double normcdf(double v) {
  return 0.5 * std::erfc(-v / std::sqrt(2.0));
}
inline float sinpif(float v) {
  return static_cast<float>(std::sin(std::acos(-1.0) * std::remainder(static_cast<double>(v), 2.0)));
}
inline float cospif(float v) {
  return static_cast<float>(std::cos(std::acos(-1.0) * std::remainder(static_cast<double>(v), 2.0)));
}

// Loads and stores with cache hints, which the emulator ignores

#define OPKILN_LOAD(name)                                            \
  template <class T>                                                 \
  __attribute__((always_inline)) inline T name(const T* address) {   \
    return *address;                                                 \
  }
OPKILN_LOAD(__ldg)
OPKILN_LOAD(__ldca)
OPKILN_LOAD(__ldcg)
OPKILN_LOAD(__ldcs)
OPKILN_LOAD(__ldlu)
OPKILN_LOAD(__ldcv)
#undef OPKILN_LOAD
#define OPKILN_STORE(name)                                                     \
  template <class T>                                                           \
  __attribute__((always_inline)) inline void name(T* address, T value) {       \
    *address = value;                                                          \
  }
OPKILN_STORE(__stwb)
OPKILN_STORE(__stcg)
OPKILN_STORE(__stcs)
OPKILN_STORE(__stwt)
#undef OPKILN_STORE
