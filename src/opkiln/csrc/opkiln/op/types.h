// The dtypes: numbers, names, and a C++ type for each. For host and device code.
#pragma once

#include <stddef.h>
#include <stdint.h>  // NVRTC lacks both headers: csrc/opkiln/nvrtc/device stands in

#if defined(__CUDACC__) || defined(__HIPCC__) || defined(__CUDACC_RTC__)
#define OPK_HOST_DEVICE __host__ __device__
#else
#define OPK_HOST_DEVICE
#endif

// Marks a kernel parameter that is read in place instead of being copied to each thread's stack:
// `__global__ void k(const OPK_GRID_CONSTANT Work work)`.
#if defined(__NVCC__) || defined(__CUDACC_RTC__) || defined(OPKILN_NVRTC_HOST)
#define OPK_GRID_CONSTANT __grid_constant__
#else
#define OPK_GRID_CONSTANT
#endif

// Whether this compiler has _Float16 in C++: g++ since 13 (on x86 since 12). cudafe++ does not have it.
#if defined(__HIP_DEVICE_COMPILE__) ||                      \
    (defined(__FLT16_MAX__) && !defined(__CUDACC__) &&      \
     (defined(__clang__) || __GNUC__ >= 13 || (__GNUC__ == 12 && defined(__x86_64__))))
#define OPK_FLOAT16
#endif

// Hidden: libraries in one process share nothing, whatever they were built from.
#if defined(__CUDACC_RTC__)  // it builds no library
#define OPK_NAMESPACE_BEGIN namespace opk {
#else
#define OPK_NAMESPACE_BEGIN namespace opk __attribute__((visibility("hidden"))) {
#endif
#define OPK_NAMESPACE_END }

// These compile the code in between with no optimization (RARE: messages, and what runs once per process) or
// with little (PLAIN: what runs a few times per call), where the compiler supports it. Fully optimizing this
// code around an op's arithmetic takes longer than compiling the rest of a small op.
#if defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#define OPK_RARE_BEGIN _Pragma("GCC push_options") _Pragma("GCC optimize(\"O0\")")
#define OPK_RARE_END _Pragma("GCC pop_options")
#define OPK_PLAIN_BEGIN _Pragma("GCC push_options") _Pragma("GCC optimize(\"O1\")")
#define OPK_PLAIN_END _Pragma("GCC pop_options")
#else
#define OPK_RARE_BEGIN
#define OPK_RARE_END
#define OPK_PLAIN_BEGIN
#define OPK_PLAIN_END
#endif

// CUDA's and HIP's own types, for authors who include their headers.
struct __half;
#if defined(__HIPCC__)
struct __hip_bfloat16;
#else
struct __nv_bfloat16;
struct __nv_fp8_e4m3;
struct __nv_fp8_e5m2;
#endif

OPK_NAMESPACE_BEGIN

// torch's numbers. opkiln_register refuses a torch that numbers them differently.
enum class DType : int32_t {
  uint8 = 0,
  int8 = 1,
  int16 = 2,
  int32 = 3,
  int64 = 4,
  float16 = 5,
  float32 = 6,
  float64 = 7,
  complex32 = 8,
  complex64 = 9,
  complex128 = 10,
  bool_ = 11,
  bfloat16 = 15,
  float8_e5m2 = 23,
  float8_e4m3fn = 24,
  float8_e5m2fnuz = 25,
  float8_e4m3fnuz = 26,
  uint16 = 27,
  uint32 = 28,
  uint64 = 29,
  float8_e8m0fnu = 44,
  float4_e2m1fn_x2 = 45,
};

enum class DeviceType : int32_t { cpu = 0, cuda = 1, xpu = 12, mps = 13, meta = 14, privateuse1 = 20 };

// The most bytes that all parameters of a kernel may take. The limit is 32764 since
// CUDA 12.1 on compute capability 7.0 and later, which is all that CUDA 13 supports.
// (The host side of an NVRTC build does not know CUDA's version.)
#if defined(__CUDACC_VER_MAJOR__) && __CUDACC_VER_MAJOR__ >= 13 && !defined(__CUDACC_RTC__)
constexpr size_t kParameterBytes = 32764;
#else
constexpr size_t kParameterBytes = 4096;
#endif

// 16-bit floats without CUDA's or HIP's headers. Arithmetic is in float: both types convert to float and
// back, rounding to nearest, ties to even.
namespace bits {

OPK_HOST_DEVICE inline uint32_t of_float(float value) {
  union {
    float number;
    uint32_t bits;
  } both{value};
  return both.bits;
}

OPK_HOST_DEVICE inline float to_float(uint32_t value) {
  union {
    uint32_t bits;
    float number;
  } both{value};
  return both.number;
}

OPK_HOST_DEVICE inline float half_to_float(uint16_t half) {
#if defined(__CUDA_ARCH__)
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(half));
  return out;
#elif defined(OPK_FLOAT16)
  _Float16 out;
  __builtin_memcpy(&out, &half, 2);
  return static_cast<float>(out);
#else
  const uint32_t sign = (half & 0x8000u) << 16, rest = (half & 0x7fffu) << 13;
  if (rest >= 0x0f800000u) return to_float(sign | 0x70000000u | rest);  // infinity or NaN
  if (rest >= 0x00800000u) return to_float(sign | (rest + 0x38000000u));
  // Subnormal. The subtraction uses normal floats only, so it also works where denormals are flushed to zero.
  return to_float(sign | of_float(to_float(0x38800000u + rest) - to_float(0x38800000u)));
#endif
}

OPK_HOST_DEVICE inline uint16_t float_to_half(float value) {
#if defined(__CUDA_ARCH__)
  uint16_t out;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(value));
  return out;
#elif defined(OPK_FLOAT16)
  const _Float16 half = static_cast<_Float16>(value);
  uint16_t out;
  __builtin_memcpy(&out, &half, 2);
  return out;
#else
  const uint32_t all = of_float(value), sign = (all >> 16) & 0x8000u;
  uint32_t rest = all & 0x7fffffffu;
  if (rest > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((rest >> 13) & 0x1ffu));
  if (rest >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // too large, or infinite
  if (rest >= 0x38800000u) {
    rest += 0xfffu + ((rest >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((rest - 0x38000000u) >> 13));
  }
  // Subnormal. In a float near 0.5, the last bit is worth as much as the last bit of a half subnormal.
  return static_cast<uint16_t>(sign | (of_float(to_float(rest) + 0.5f) - 0x3f000000u));
#endif
}

OPK_HOST_DEVICE inline uint16_t float_to_bfloat16(float value) {
  const uint32_t all = of_float(value);
  if ((all & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((all >> 16) | 0x40u);  // NaN
  return static_cast<uint16_t>((all + 0x7fffu + ((all >> 16) & 1u)) >> 16);
}

}  // namespace bits

#if defined(__CUDA_FP16_TYPES_EXIST__) || defined(__CUDA_FP16_H__)  // <cuda_fp16.h> came first
using half = ::__half;
#else
struct half {
  uint16_t bits;
  half() = default;
  OPK_HOST_DEVICE half(float value) : bits(bits::float_to_half(value)) {}
  OPK_HOST_DEVICE operator float() const { return bits::half_to_float(bits); }
};
#endif

#if defined(__CUDA_BF16_TYPES_EXIST__) || defined(__CUDA_BF16_H__)  // <cuda_bf16.h> came first
using bfloat16 = ::__nv_bfloat16;
#else
struct bfloat16 {
  uint16_t bits;
  bfloat16() = default;
  OPK_HOST_DEVICE bfloat16(float value) : bits(bits::float_to_bfloat16(value)) {}
  OPK_HOST_DEVICE operator float() const { return bits::to_float(uint32_t{bits} << 16); }
};
#endif

// The dtype of tensors whose elements are T.
template <class T>
struct dtype_is {
  static_assert(sizeof(T) == 0,
                "no dtype has this C++ type: take float, double, bool, opk::half, opk::bfloat16 or a "
                "fixed-width integer; data() without a type gives untyped memory");
};
#define OPK_DTYPE(T, name) \
  template <>              \
  struct dtype_is<T> {     \
    static constexpr DType value = DType::name; \
  }
OPK_DTYPE(uint8_t, uint8);
OPK_DTYPE(int8_t, int8);
OPK_DTYPE(int16_t, int16);
OPK_DTYPE(int32_t, int32);
OPK_DTYPE(long, int64);
OPK_DTYPE(long long, int64);
OPK_DTYPE(uint16_t, uint16);
OPK_DTYPE(uint32_t, uint32);
OPK_DTYPE(unsigned long, uint64);
OPK_DTYPE(unsigned long long, uint64);
OPK_DTYPE(float, float32);
OPK_DTYPE(double, float64);
OPK_DTYPE(bool, bool_);
OPK_DTYPE(::__half, float16);
#if defined(__HIPCC__)
OPK_DTYPE(::__hip_bfloat16, bfloat16);
#else
OPK_DTYPE(::__nv_bfloat16, bfloat16);
OPK_DTYPE(::__nv_fp8_e4m3, float8_e4m3fn);
OPK_DTYPE(::__nv_fp8_e5m2, float8_e5m2);
#endif
#if !(defined(__CUDA_FP16_TYPES_EXIST__) || defined(__CUDA_FP16_H__))
OPK_DTYPE(half, float16);
#endif
#if !(defined(__CUDA_BF16_TYPES_EXIST__) || defined(__CUDA_BF16_H__))
OPK_DTYPE(bfloat16, bfloat16);
#endif
#if defined(OPK_FLOAT16)
OPK_DTYPE(_Float16, float16);
#endif
#undef OPK_DTYPE
template <class T>
struct dtype_is<const T> : dtype_is<T> {};
template <class T>
inline constexpr DType dtype_of = dtype_is<T>::value;

constexpr bool is_floating(DType dtype) {
  return (dtype >= DType::float16 && dtype <= DType::float64) || dtype == DType::bfloat16 ||
      (dtype >= DType::float8_e5m2 && dtype <= DType::float8_e4m3fnuz);
}

OPK_NAMESPACE_END
