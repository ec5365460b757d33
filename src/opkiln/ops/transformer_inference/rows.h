// Parts of rows in host memory, in Wide registers.
#pragma once

#include <opkiln/blocks.h>
#include <opkiln/vec_wide.h>

namespace {

using opkiln::Wide;

constexpr int64_t whole_registers(int64_t count) { return count / Wide::kLanes * Wide::kLanes; }

// Loads `count` elements, or a whole register if there are more; the rest is zero.
template <class T>
inline Wide load_some(const T* from, int64_t count) {
  if (count >= Wide::kLanes) return Wide::load(from);
  T some[Wide::kLanes] = {};
  __builtin_memcpy(some, from, static_cast<size_t>(count) * sizeof(T));
  return Wide::load(some);
}

template <class T>
inline void store_some(Wide value, T* to, int64_t count) {
  if (count >= Wide::kLanes) return value.store(to);
  T some[Wide::kLanes];
  value.store(some);
  __builtin_memcpy(to, some, static_cast<size_t>(count) * sizeof(T));
}

// Prefetches the cache lines that loops over Wides read some iterations later.
template <class T>
inline void prefetch_wide(const T* from) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t at = 0; at < Wide::kLanes; at += kLine) opkiln::prefetch_ahead(from + at);
}

// Whether `to` is aligned for non-temporal stores of whole registers.
template <class T>
inline bool may_go_around(const T* to) {
  return reinterpret_cast<uintptr_t>(to) % Wide::kAroundAlignment == 0;
}

// Stores value(at, count) for each register of the `count` elements at `to`. value(at, count) computes the
// elements from `at` on; its `count` is a whole register except at the end.
template <class T, class Value>
inline void fill(T* to, int64_t count, bool around, Value value) {
  const int64_t whole = whole_registers(count);
  if (around && may_go_around(to)) {
    for (int64_t at = 0; at < whole; at += Wide::kLanes) value(at, Wide::kLanes).store_around(to + at);
  } else {
    for (int64_t at = 0; at < whole; at += Wide::kLanes) value(at, Wide::kLanes).store(to + at);
  }
  if (whole < count) store_some(value(whole, count - whole), to + whole, count - whole);
}

// Calls body(row, column, count) for the parts of rows within the elements [first, last) of a matrix.
template <class Body>
inline void for_each_row(int64_t first, int64_t last, int64_t columns, const Body& body) {
  for (int64_t at = first; at < last;) {
    const int64_t row = at / columns, column = at % columns;
    const int64_t count = columns - column < last - at ? columns - column : last - at;
    body(row, column, count);
    at += count;
  }
}

// Runs body(first, last) on parts of a matrix' elements, in torch's
// thread pool. Parts begin at whole cache lines.
template <class Body>
inline void parallel_elements(int64_t count, int64_t bytes_of_element, const Body& body) {
  constexpr int64_t kLine = 32;  // elements: a cache line of 16-bit ones
  opk::parallel_for(0, (count + kLine - 1) / kLine, opk::kGrainBytes / (kLine * bytes_of_element),
                    [&](int64_t first, int64_t last) {
                      body(first * kLine, last * kLine < count ? last * kLine : count);
                      opkiln::settle_stores();
                    });
}

}  // namespace
