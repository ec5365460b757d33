// Converts tensors in host memory to blocks of floats, and back.
// Includes neither torch's headers nor heavy standard ones.
#pragma once

#include "stream.h"
#include "vec.h"

OPKILN_NAMESPACE_BEGIN

constexpr int64_t kBlock = 512;  // four scratch streams take 8 KiB of an L1 cache of at least 32
static_assert(kBlock % Vec::kLanes == 0);

constexpr int64_t whole_registers(int64_t count) {
  return count / Vec::kLanes * Vec::kLanes;
}

template <class T>
inline void widen(const T* from, float* to, int64_t count) {
  const int64_t whole = whole_registers(count);
  for (int64_t i = 0; i < whole; i += Vec::kLanes) {
    prefetch_ahead(from + i);
    Vec::load(from + i).store(to + i);
  }
  if (whole < count) {  // the rest goes through a padded register, so that no byte beyond the tensor is read
    T rest[Vec::kLanes] = {};
    __builtin_memcpy(rest, from + whole, (count - whole) * sizeof(T));
    Vec::load(rest).store(to + whole);
  }
}

template <class T>
inline void narrow(const float* from, T* to, int64_t count) {
  const int64_t whole = whole_registers(count);
  for (int64_t i = 0; i < whole; i += Vec::kLanes) {
    Vec::load(from + i).store(to + i);
  }
  if (whole < count) {
    T rest[Vec::kLanes];
    Vec::load(from + whole).store(rest);
    __builtin_memcpy(to + whole, rest, (count - whole) * sizeof(T));
  }
}

// A copy of at least this many bytes is written with non-temporal stores, which save reading each cache line
// before overwriting it. A step that writes bf16 copies took 1.01 to 1.05 times as long as one without
// copies, and 1.07 to 1.13 times with plain stores. A smaller copy may still be in the cache when it is used.
constexpr int64_t kAroundBytes = 1 << 20;

// Like narrow, but with non-temporal stores if the alignment allows it. The caller must call settle_stores().
template <class T>
inline void narrow_around(const float* from, T* to, int64_t count) {
  int64_t whole = whole_registers(count);
  if (reinterpret_cast<uintptr_t>(to) % (Vec::kLanes * sizeof(T)) != 0) {
    whole = 0;
  }
  for (int64_t i = 0; i < whole; i += Vec::kLanes) {
    Vec::load(from + i).store_around(to + i);
  }
  narrow(from + whole, to + whole, count - whole);
}

// The elements [begin, begin + count) of a stream, as floats. The last register is padded with zeros.
[[gnu::noinline]] inline void widen(const Stream& from, int64_t begin, int64_t count, float* to) {
  switch (from.type) {
    case Type::kBFloat16:
      return widen(from.at<BFloat16>(begin), to, count);
    case Type::kFloat16:
      return widen(from.at<Float16>(begin), to, count);
    case Type::kFloat:
      return widen(from.at<float>(begin), to, count);
  }
}

// The inverse. It reads whole registers of `from`, but writes only `count` elements.
[[gnu::noinline]] inline void narrow(const float* from, const Stream& to, int64_t begin,
                                     int64_t count) {
  switch (to.type) {
    case Type::kBFloat16:
      return narrow(from, to.at<BFloat16>(begin), count);
    case Type::kFloat16:
      return narrow(from, to.at<Float16>(begin), count);
    case Type::kFloat:
      return narrow(from, to.at<float>(begin), count);
  }
}

[[gnu::noinline]] inline void narrow_around(const float* from, const Stream& to, int64_t begin,
                                            int64_t count) {
  switch (to.type) {
    case Type::kBFloat16:
      return narrow_around(from, to.at<BFloat16>(begin), count);
    case Type::kFloat16:
      return narrow_around(from, to.at<Float16>(begin), count);
    case Type::kFloat:
      return narrow_around(from, to.at<float>(begin), count);
  }
}

OPKILN_NAMESPACE_END
