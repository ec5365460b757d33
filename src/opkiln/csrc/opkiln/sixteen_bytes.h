// Sixteen bytes of a tensor in device code: one access moves them,
// and arithmetic is in float. For CUDA, HIP and the emulator.
#pragma once

#include "op/types.h"

namespace opkiln {
namespace device {

// Rounds two floats to 16-bit elements in one word, the first in the
// low half. To nearest, ties to even; NaN stays NaN.
template <class T>
__device__ inline uint32_t narrow_two(float first, float second);

template <>
__device__ inline uint32_t narrow_two<opk::bfloat16>(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(second), "f"(first));
  return out;
#else
  return opk::bits::float_to_bfloat16(first) |
      static_cast<uint32_t>(opk::bits::float_to_bfloat16(second)) << 16;
#endif
}

template <>
__device__ inline uint32_t narrow_two<opk::half>(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(second), "f"(first));
  return out;
#else
  return opk::bits::float_to_half(first) |
      static_cast<uint32_t>(opk::bits::float_to_half(second)) << 16;
#endif
}

// One of a word's two 16-bit elements, as a float.
template <class T>
__device__ inline float widen_one(uint32_t word, int which);

template <>
__device__ inline float widen_one<opk::bfloat16>(uint32_t word, int which) {
  return __uint_as_float(which == 0 ? word << 16 : word & 0xffff0000u);
}

template <>
__device__ inline float widen_one<opk::half>(uint32_t word, int which) {
  return opk::bits::half_to_float(static_cast<uint16_t>(which == 0 ? word & 0xffffu : word >> 16));
}

template <class T>
struct alignas(16) Sixteen {
  static constexpr int kCount = 8;
  uint32_t words[4];

  __device__ float operator[](int i) const { return widen_one<T>(words[i / 2], i % 2); }
  __device__ void set_two(int i, float first, float second) {
    words[i / 2] = narrow_two<T>(first, second);
  }
};

template <>
struct alignas(16) Sixteen<float> {
  static constexpr int kCount = 4;
  float words[4];

  __device__ float operator[](int i) const { return words[i]; }
  __device__ void set_two(int i, float first, float second) {
    words[i] = first;
    words[i + 1] = second;
  }
};

// Makes the compiler convert the elements again on their next use. Otherwise it keeps the floats from one use
// to the next, in twice as many registers.
template <class T>
__device__ inline void forget_floats(Sixteen<T>& value) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 2) {
    asm volatile("" : "+r"(value.words[0]), "+r"(value.words[1]), "+r"(value.words[2]), "+r"(value.words[3]));
  }
#endif
}

// Stores with an evict-first hint, so that the L2 cache keeps what is used again. Units of other sizes than
// 16 bytes get a plain store.
template <class Unit>
__device__ inline void store_once(Unit* to, const Unit& value) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(Unit) == 16) {
    const uint32_t* const words = reinterpret_cast<const uint32_t*>(&value);
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[0]), "r"(words[1]),
                 "r"(words[2]), "r"(words[3])
                 : "memory");
    return;
  }
#endif
  *to = value;
}

// Prefetches into the L2 cache. Unlike an early load, this holds no register.
__device__ inline void prefetch(const void* memory) {
#if defined(__CUDA_ARCH__)
  asm volatile("prefetch.global.L2 [%0];" ::"l"(memory));
#endif
}

}  // namespace device
}  // namespace opkiln
