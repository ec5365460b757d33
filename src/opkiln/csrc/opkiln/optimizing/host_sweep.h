// Elementwise kernels over a list of tensors of mixed sizes and types.
//
// A kernel's body is one plain loop over arrays of floats. It gets fp32 memory directly. Narrower types are
// widened in blocks into scratch memory that stays in the L1 cache, and narrowed again after the body. So one
// body serves every mix of types (templates over the types would need sixty copies), and the arithmetic is
// always fp32. A body that is a template gets the most common mixes directly from memory.
#pragma once

#include <opkiln/arguments.h>
#include <opkiln/blocks.h>

OPKILN_NAMESPACE_BEGIN

constexpr opk::Device kHost{};

// Streams that are processed together, such as a parameter, its gradient and its states.
template <size_t N>
struct Item {
  Stream streams[N];
  Stream copy;  // if present, receives the stored values of streams[0], converted to its own type
  int64_t numel = 0;
  int64_t traffic = 0;  // bytes read and written per element, by which threads share the work
};

template <size_t N>
int64_t traffic(const Item<N>& item) {
  int64_t bytes = item.copy.data == nullptr ? 0 : size_of(item.copy.type);
  for (const Stream& stream : item.streams) {
    bytes += (stream.output ? 2 : 1) * size_of(stream.type);
  }
  return bytes;
}

// Applies prefetch_ahead of vec.h to each pointer.
template <class... T>
inline void prefetch_all(const T*... streams) {
  (prefetch_ahead(streams), ...);
}

template <class T>
constexpr Type kTypeOf = Type::kFloat;
template <>
inline constexpr Type kTypeOf<BFloat16> = Type::kBFloat16;
template <>
inline constexpr Type kTypeOf<Float16> = Type::kFloat16;

inline bool all_are(const Stream* first, const Stream* last, Type type) {
  while (first != last && first->type == type) {
    ++first;
  }
  return first == last;
}

// Calls the body on whole registers of [begin, end), if all streams have type T and the body accepts such
// pointers. Returns where the rest begins. Going through scratch blocks was up to a fifth slower.
template <class T, size_t N, class Body>
int64_t sweep_alike(const Item<N>& item, int64_t begin, int64_t end, const Body& body) {
  T* at[N];
  if constexpr (requires { body(at, end); }) {
    if (all_are(item.streams, item.streams + N, kTypeOf<T>)) {
      for (size_t n = 0; n < N; ++n) {
        at[n] = item.streams[n].template at<T>(begin);
      }
      const int64_t whole = whole_registers(end - begin);
      body(at, whole);
      return begin + whole;
    }
  }
  return begin;
}

// Pointers to a parameter and its gradient, both of type T, and to its fp32 states.
template <class T, size_t N>
struct MixedPointers;
template <class T>
struct MixedPointers<T, 3> {
  T *param, *grad;
  float* state;
};
template <class T>
struct MixedPointers<T, 4> {
  T *param, *grad;
  float *first, *second;
};

// Like sweep_alike, for MixedPointers, the usual mixed-precision layout.
template <class T, size_t N, class Body>
int64_t sweep_mixed(const Item<N>& item, int64_t begin, int64_t end, const Body& body) {
  using Pointers = MixedPointers<T, N>;
  if constexpr (requires(const Pointers& at) { body(at, end); }) {
    const Stream* const s = item.streams;
    if (all_are(s, s + 2, kTypeOf<T>) && all_are(s + 2, s + N, Type::kFloat)) {
      const int64_t whole = whole_registers(end - begin);
      if constexpr (N == 3) {
        body(Pointers{s[0].at<T>(begin), s[1].at<T>(begin), s[2].at<float>(begin)}, whole);
      } else {
        body(Pointers{s[0].at<T>(begin), s[1].at<T>(begin), s[2].at<float>(begin), s[3].at<float>(begin)},
             whole);
      }
      return begin + whole;
    }
  }
  return begin;
}

// Calls body(pointers, count) for the elements [begin, end) of an item, with one pointer per stream and a
// count of whole registers. An element's result does not depend on how the elements are split into ranges.
template <size_t N, class Body>
void sweep(const Item<N>& item, int64_t begin, int64_t end, const Body& body) {
  // With a copy, everything goes in blocks: the body's results are still in the cache when they are copied.
  if (item.copy.data == nullptr) {
    begin = sweep_alike<float>(item, begin, end, body);
    begin = sweep_mixed<BFloat16>(item, begin, end, body);
    begin = sweep_mixed<Float16>(item, begin, end, body);
    begin = sweep_alike<BFloat16>(item, begin, end, body);
    begin = sweep_alike<Float16>(item, begin, end, body);
  }
  const bool around =
      item.copy.data != nullptr && item.numel * size_of(item.copy.type) >= kAroundBytes;
  float* at[N];
  alignas(64) float scratch[N][kBlock];
  while (begin < end) {
    const int64_t count = end - begin < kBlock ? end - begin : kBlock;
    const bool whole = count == whole_registers(count);
    for (size_t n = 0; n < N; ++n) {
      if (whole && item.streams[n].type == Type::kFloat) {
        at[n] = item.streams[n].template at<float>(begin);
      } else {
        at[n] = scratch[n];
        widen(item.streams[n], begin, count, at[n]);
      }
    }
    body(at, whole_registers(count + Vec::kLanes - 1));
    for (size_t n = 0; n < N; ++n) {
      if (at[n] == scratch[n] && item.streams[n].output) {
        narrow(at[n], item.streams[n], begin, count);
      }
    }
    if (item.copy.data != nullptr) {
      if (item.streams[0].type != Type::kFloat) {
        widen(item.streams[0], begin, count, at[0]);  // copies the stored, rounded values
      }
      if (around) {
        narrow_around(at[0], item.copy, begin, count);
      } else {
        narrow(at[0], item.copy, begin, count);
      }
    }
    begin += count;
  }
  if (around) {
    settle_stores();
  }
}

// All items of a list in one index space, in units of bytes of traffic. So threads get equal shares for all
// sizes and types, and small tensors do not need a parallel region each. The list must outlive this object.
template <size_t N>
class Flat {
 public:
  explicit Flat(const opk::List<Item<N>>& items) : items_(items), starts_(items.size() + 1) {
    int64_t* const starts = starts_.begin();
    for (int64_t i = 0; i < items_.size(); ++i) {
      const Item<N>& item = items_.data()[i];
      starts[i + 1] = starts[i] + item.numel * item.traffic;
    }
  }

  int64_t size() const {
    return starts_.end()[-1];
  }

  // Calls body_of(i)(pointers, count) for the elements of each item i in [low, high) of
  // the index space. Adjacent ranges neither overlap nor leave gaps.
  template <class BodyOf>
  void sweep(int64_t low, int64_t high, const BodyOf& body_of) const {
    for (int64_t i = item_at(low); i < items_.size() && starts_.data()[i] < high; ++i) {
      opkiln::sweep(items_.data()[i], element(i, low), element(i, high), body_of(i));
    }
  }

 private:
  // Ranges end at multiples of this many elements: whole blocks, and whole cache lines of every type.
  static constexpr int64_t kCut = 2 * kBlock;

  // The last item that begins at or before the position.
  int64_t item_at(int64_t position) const {
    int64_t low = 0, high = items_.size() + 1;  // the item is in [low, high)
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (starts_.data()[middle] <= position ? low : high) = middle;
    }
    return low;
  }

  int64_t element(int64_t i, int64_t position) const {
    const Item<N>& item = items_.data()[i];
    if (position <= starts_.data()[i]) {
      return 0;
    }
    if (position >= starts_.data()[i + 1]) {
      return item.numel;
    }
    const int64_t cut = (position - starts_.data()[i]) / item.traffic;
    const int64_t whole = (cut + kCut - 1) / kCut * kCut;
    return whole < item.numel ? whole : item.numel;
  }

  const opk::List<Item<N>>& items_;
  opk::List<int64_t> starts_;
};

// Calls body_of(i)(pointers, count) for all elements of each item i,
// in torch's thread pool. Small lists stay on the calling thread.
template <size_t N, class BodyOf>
void parallel_sweep(const opk::List<Item<N>>& items, const BodyOf& body_of) {
  const Flat<N> list(items);
  opk::parallel_for(0, list.size(), opk::kGrainBytes, [&](int64_t low, int64_t high) {
    list.sweep(low, high, body_of);
  });
}

// The same with one body for all items: Body{coefficients}.
template <class Body, class Coefficients, size_t N>
void parallel_sweep(const opk::List<Item<N>>& items, const Coefficients& coefficients) {
  parallel_sweep(items, [&](int64_t) { return Body{coefficients}; });
}

OPKILN_NAMESPACE_END
