// Tensor elements in device code: storage types, conversions, and packs that one access moves. hipify
// translates this file to HIP, and the emulator compiles it for the host.
#pragma once

#include "element_type.h"
#include "op/types.h"

namespace opkiln {
namespace device {

// Kernels are compiled once per element size, and the 16-bit type is looked up when an element is
// converted: a kernel per type would need thirty copies of a loop.
struct Bits16 {
  uint16_t bits;
};

__device__ inline float widen(float value, ElementType) {
  return value;
}
__device__ inline float widen(Bits16 value, ElementType type) {
  return type == ElementType::kBFloat16 ? __uint_as_float(static_cast<uint32_t>(value.bits) << 16)
                                        : opk::bits::half_to_float(value.bits);
}

// Rounds to nearest, ties to even; NaN stays NaN.
template <class T>
__device__ T narrow(float value, ElementType type);
template <>
__device__ inline float narrow<float>(float value, ElementType) {
  return value;
}
template <>
__device__ inline Bits16 narrow<Bits16>(float value, ElementType type) {
  if (type == ElementType::kFloat16) {
    return {opk::bits::float_to_half(value)};
  }
  const uint32_t bits = __float_as_uint(value);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<uint16_t>(nan ? 0x7fc0u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

// The elements that one access moves.
template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth) Pack {
  T at[kWidth];
};

// Cache hints for memory that is used only once, __ldcs and __stcs,
// made an optimizer step 2 to 3% slower on an H200.
template <int kWidth, class T>
__device__ inline void load(Pack<T, kWidth>& pack, const T* from) {
  pack = *reinterpret_cast<const Pack<T, kWidth>*>(from);
}

// Stores 16 bytes that are not read again soon. On an H200 this is half a percent faster in kernels that
// write more than twice as much as they read, and slower in the others.
template <class Sixteen>
__device__ inline void store_once(const Sixteen& value, void* to) {
  static_assert(sizeof(Sixteen) == 16 && alignof(Sixteen) == 16);
#if defined(__CUDA_ARCH__)
  __stcs(static_cast<uint4*>(to), *reinterpret_cast<const uint4*>(&value));
#else
  *static_cast<Sixteen*>(to) = value;
#endif
}

template <int kWidth, class T>
__device__ inline void store(const Pack<T, kWidth>& pack, T* to) {
  *reinterpret_cast<Pack<T, kWidth>*>(to) = pack;
}

}  // namespace device
}  // namespace opkiln
