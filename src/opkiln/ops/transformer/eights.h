// Shared by the kernels of a training layer: the eight neighbouring
// elements that a thread has of a row, and dropout's random bits.
#pragma once

#include <opkiln/arguments.h>
#include <opkiln/random_bits.h>
#include <opkiln/sixteen_bytes.h>

namespace {

using opkiln::device::Sixteen;

constexpr int kEight = 8;

// The eights in a row; the last may be shorter.
OPK_HOST_DEVICE constexpr int64_t eights_of(int64_t columns) { return (columns + kEight - 1) / kEight; }

template <class T>
struct Eight {
  static constexpr int kCount = Sixteen<T>::kCount;
  Sixteen<T> parts[kEight / kCount];

  __device__ float operator[](int i) const { return parts[i / kCount][i % kCount]; }
  __device__ void set_two(int i, float first, float second) {
    parts[i / kCount].set_two(i % kCount, first, second);
  }
};

// Makes the compiler convert the elements again; see forget_floats.
template <class T>
__device__ inline void forget(Eight<T>& value) {
#pragma unroll
  for (Sixteen<T>& part : value.parts) {
    opkiln::device::forget_floats(part);
  }
}

// Loads eight elements from `at` on. Those past the `left` elements of the row
// are zero. kAligned: all eight exist and are aligned to 16 bytes.
template <class T, bool kAligned>
__device__ inline Eight<T> load_eight(const void* tensor, int64_t at, int64_t left) {
  if constexpr (kAligned) {
    return *reinterpret_cast<const Eight<T>*>(static_cast<const T*>(tensor) + at);
  } else {
    const T* const from = static_cast<const T*>(tensor) + at;
    Eight<T> out;
#pragma unroll
    for (int i = 0; i < kEight; i += 2) {
      out.set_two(i, i < left ? static_cast<float>(from[i]) : 0.0f,
                  i + 1 < left ? static_cast<float>(from[i + 1]) : 0.0f);
    }
    return out;
  }
}

template <class T, bool kAligned>
__device__ inline void store_eight(const Eight<T>& value, void* tensor, int64_t at, int64_t left) {
  if constexpr (kAligned) {
    *reinterpret_cast<Eight<T>*>(static_cast<T*>(tensor) + at) = value;
  } else {
    T* const to = static_cast<T*>(tensor) + at;
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      if (i < left) {
        to[i] = T(value[i]);
      }
    }
  }
}

constexpr int kDropoutRounds = 7;  // of Philox: the fewest that pass its authors' tests

// Dropout drops the elements whose 16 random bits are below `limit`. The bits are a function of the
// seed, the site in the layer, and the element's position. The seed is in device memory, so that
// the host does not wait for it and a captured graph can change it.
struct Dropout {
  const int64_t* seed;  // null: no dropout
  uint64_t site;
  uint32_t limit;  // of 65536
  float factor;    // scales the kept elements
};

// One bit for each of eight elements, set if it is kept.
__device__ inline uint32_t kept_of(const Dropout& dropout, int64_t key, int64_t eight) {
  const opkiln::RandomWords words =
      opkiln::random_words(static_cast<uint64_t>(eight), dropout.site,
                           opkiln::random_keys<kDropoutRounds>(static_cast<uint64_t>(key)));
  uint32_t kept = 0;
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    const uint32_t bits = words.at[i / 2] >> 16 * (i % 2) & 0xffffu;
    kept |= (bits >= dropout.limit ? 1u : 0u) << i;
  }
  return kept;
}

__device__ inline float apply_dropout(float value, uint32_t kept, int i, float factor) {
  return kept >> i & 1u ? value * factor : 0.0f;
}

#if !defined(__CUDACC_RTC__)
OPK_PLAIN_BEGIN

using opk::Tensor;
using MaybeTensor = opk::optional<Tensor>;

// The kernels' grids depend only on the sizes, not on the GPU, so the
// sums over rows are equal to the last bit.
[[gnu::noinline]] Dropout dropout_of(const Tensor& x, const MaybeTensor& seed, int64_t site, double p) {
  OPK_CHECK(p >= 0 && p <= 1, "p is ", p, ", expected 0 to 1");
  if (p == 0) return {nullptr, 0, 0, 1};
  OPK_CHECK(seed.has_value(), "seed is None, and p is ", p);
  opk::check_same_device(x, *seed);
  opk::check_numel(*seed, 1);
  const uint32_t limit = static_cast<uint32_t>(p * 65536 + 0.5);
  return {(*seed).data<const int64_t>(), static_cast<uint64_t>(site), limit,
          limit >= 65536 ? 0.0f : static_cast<float>(1 / (1 - p))};
}

// Checks that `row` has one element per column of `x`, or that
// `other` has x's shape, and in both cases x's dtype and device.
[[gnu::noinline]] void check_row(const Tensor& x, const Tensor& row) {
  opk::check_same_dtype(x, row);
  opk::check_same_device(x, row);
  opk::check_shape(row, {x.size(-1)});
}
[[gnu::noinline]] void check_same(const Tensor& x, const Tensor& other) {
  opk::check_same_dtype(x, other);
  opk::check_same_device(x, other);
  opk::check_same_shape(x, other);
}

// The number of rows of `x`, which must be on this op's device and have at least one dimension.
[[gnu::noinline]] int64_t rows_of(const Tensor& x) {
  opk::device_of(x);
  OPK_CHECK(x.dim() > 0, x, " has no dimensions, expected at least 1");
  return x.size(-1) == 0 ? 0 : x.numel() / x.size(-1);
}

inline Tensor nothing_like(const Tensor& x) { return opk::empty({0}, x); }
inline Tensor floats_like(const Tensor& x, opk::Ints sizes) {
  return opk::empty(sizes, opk::DType::float32, x.device());
}

template <class... Pointer>
bool are_aligned(const Pointer*... each) {
  return ((reinterpret_cast<uintptr_t>(each) % 16 == 0) && ...);
}

OPK_PLAIN_END
#endif

}  // namespace
