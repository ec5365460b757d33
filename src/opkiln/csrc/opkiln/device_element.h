// Elements of tensors in device code: the storage types, their conversions, and packs of elements
// that one access moves. hipify translates it to HIP, and the emulator compiles it for the host.
#pragma once

#include "element_type.h"
#include "op/types.h"

namespace opkiln {
namespace device {

// Kernels are compiled for each size of elements. Which of the two 16-bit types it is, is checked when
// an element is converted. Separate kernels for each type would need thirty copies of a loop.
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

// (Hints that memory is used only once, __ldcs and __stcs, made an optimizer's step 2 to 3% slower on
// an H200.)
template <int kWidth, class T>
__device__ inline void load(Pack<T, kWidth>& pack, const T* from) {
  pack = *reinterpret_cast<const Pack<T, kWidth>*>(from);
}

// Stores 16 bytes that will not be read soon. On an H200, such stores are half a percent faster if a
// kernel writes more than twice as much as it reads, and slower if it writes less.
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
