// Parts of rows in host memory, in Wide registers.
#pragma once

#include <opkiln/blocks.h>
#include <opkiln/vec_wide.h>

namespace {

using opkiln::Wide;

template <class V = Wide>
constexpr int64_t whole_registers(int64_t count) {
  return count / V::kLanes * V::kLanes;
}

// Loads `count` elements, or all that fit if there are more; the rest is zero.
template <class V, class T>
inline V load_some(const T* from, int64_t count) {
  if (count >= V::kLanes) return V::load(from);
  T some[V::kLanes] = {};
  __builtin_memcpy(some, from, static_cast<size_t>(count) * sizeof(T));
  return V::load(some);
}

template <class V, class T>
inline void store_some(const V& value, T* to, int64_t count) {
  if (count >= V::kLanes) return value.store(to);
  T some[V::kLanes];
  value.store(some);
  __builtin_memcpy(to, some, static_cast<size_t>(count) * sizeof(T));
}

// Prefetches the cache lines that a loop over V reads some iterations later.
template <class V, class T>
inline void prefetch_registers(const T* from) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t at = 0; at < V::kLanes; at += kLine) opkiln::prefetch_ahead(from + at);
}

// Whether `to` is aligned for non-temporal stores of whole registers.
template <class T>
inline bool may_go_around(const T* to) {
  return reinterpret_cast<uintptr_t>(to) % Wide::kAroundAlignment == 0;
}

// The tensors that a loop reads, at its first element. A null pointer is absent.
template <class T, int kCount>
struct Inputs {
  const T* from[kCount];
  int64_t mask[kCount];  // of offsets: 0 repeats the first register. Set by fill().
};

// The registers of each input side by side. Eight of more than two inputs do not fit into a CPU's; those of fp32
// wait for memory alone, which four do better.
template <class T, int kCount>
using Beside = opkiln::Registers<(kCount > 2 || sizeof(T) == 4 ? 4 : 8)>;

// Stores value(x) for each register of the `count` elements at `to`; x is an array of the inputs' registers.
// Everything is inlined here, because a call would pass registers in memory.
template <class T, int kCount, class Value>
[[gnu::flatten, gnu::noinline]] void fill_registers(T* to, const Inputs<T, kCount> inputs, int64_t count,
                                                    bool around, const Value value) {
  using V = Beside<T, kCount>;
  for (int64_t at = 0; at < count; at += V::kLanes) {
    V x[kCount];
    for (int i = 0; i < kCount; ++i) {
      const T* const from = inputs.from[i] + (at & inputs.mask[i]);
      prefetch_registers<V>(from);
      x[i] = V::load(from);
    }
    const V out = value(x);
    if (around) {
      out.store_around(to + at);
    } else {
      out.store(to + at);
    }
  }
}

// The same for any count. Absent inputs are -0, which changes no sum. The rest goes through padded registers.
template <class T, int kCount, class Value>
void fill(T* to, Inputs<T, kCount> inputs, int64_t count, bool around, const Value& value) {
  using V = Beside<T, kCount>;
  alignas(64) T none[V::kLanes], rest[kCount + 1][V::kLanes] = {};
  V::all(-0.0f).store(none);
  for (int i = 0; i < kCount; ++i) {
    inputs.mask[i] = inputs.from[i] ? -1 : 0;
    if (!inputs.from[i]) inputs.from[i] = none;
  }
  const int64_t whole = whole_registers<V>(count);
  fill_registers(to, inputs, whole, around && may_go_around(to), value);
  if (whole == count) return;
  const size_t bytes = static_cast<size_t>(count - whole) * sizeof(T);
  for (int i = 0; i < kCount; ++i) {
    __builtin_memcpy(rest[i], inputs.from[i] + (whole & inputs.mask[i]), bytes);
    inputs.from[i] = rest[i];
  }
  fill_registers(rest[kCount], inputs, V::kLanes, false, value);
  __builtin_memcpy(to + whole, rest[kCount], bytes);
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
