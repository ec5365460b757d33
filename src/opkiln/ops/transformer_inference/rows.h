// Parts of rows in host memory as registers of floats.
#pragma once

#include <opkiln/blocks.h>

namespace {

using opkiln::Vec;
using opkiln::whole_registers;

// The first `count` elements, of at most a register; zeros after them.
template <class T>
inline Vec load_some(const T* from, int64_t count) {
  if (count >= Vec::kLanes) return Vec::load(from);
  T some[Vec::kLanes] = {};
  __builtin_memcpy(some, from, static_cast<size_t>(count) * sizeof(T));
  return Vec::load(some);
}

template <class T>
inline void store_some(Vec value, T* to, int64_t count) {
  if (count >= Vec::kLanes) return value.store(to);
  T some[Vec::kLanes];
  value.store(some);
  __builtin_memcpy(to, some, static_cast<size_t>(count) * sizeof(T));
}

// Whether whole registers of T can be stored around the caches here.
template <class T>
inline bool may_go_around(const T* to) {
  return reinterpret_cast<uintptr_t>(to) % (Vec::kLanes * sizeof(T)) == 0;
}

// Stores value(at, count) for each register of `count` elements from `to` on. value(at, count) is that of
// the elements from `at` on; `count` is a whole register but at the end.
template <class T, class Value>
inline void fill(T* to, int64_t count, bool around, const Value& value) {
  const int64_t whole = whole_registers(count);
  if (around && may_go_around(to)) {
    for (int64_t at = 0; at < whole; at += Vec::kLanes) value(at, Vec::kLanes).store_around(to + at);
  } else {
    for (int64_t at = 0; at < whole; at += Vec::kLanes) value(at, Vec::kLanes).store(to + at);
  }
  if (whole < count) store_some(value(whole, count - whole), to + whole, count - whole);
}

// Calls body(row, column, count) for the parts of rows that the elements [first, last) of a matrix are.
template <class Body>
inline void over_rows(int64_t first, int64_t last, int64_t columns, const Body& body) {
  for (int64_t at = first; at < last;) {
    const int64_t row = at / columns, column = at % columns;
    const int64_t count = columns - column < last - at ? columns - column : last - at;
    body(row, column, count);
    at += count;
  }
}

// Runs body(first, last) for parts of a matrix of elements, in torch's threads. Parts begin with whole
// cache lines.
template <class Body>
inline void over_elements(int64_t count, int64_t bytes_of_element, const Body& body) {
  constexpr int64_t kLine = 32;  // elements: of 16 bits, a line
  opk::parallel_for(0, (count + kLine - 1) / kLine, opk::kGrainBytes / (kLine * bytes_of_element),
                    [&](int64_t first, int64_t last) {
                      body(first * kLine, last * kLine < count ? last * kLine : count);
                      opkiln::settle_stores();
                    });
}

}  // namespace
