// Elementwise kernels over a list of tensors of mixed sizes and types. Needs no torch header.
//
// A kernel's body is one plain loop over arrays of floats. It gets fp32 memory directly. Narrower types
// are widened, a block at a time, into scratch memory that stays in the first level cache, and narrowed
// again after the body. So one body serves every mix of types (templates over the types would need
// sixty copies of it), and the arithmetic is always fp32. A body that is a template gets the most
// common mixes directly from memory.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "vec.h"

OPKILN_NAMESPACE_BEGIN

// One tensor's memory and its type.
struct Stream {
  std::byte* data = nullptr;  // null: absent
  Type type = Type::kFloat;
  bool output = false;  // written as well as read

  template <class T>
  T* at(int64_t i) const {
    return reinterpret_cast<T*>(data) + i;
  }
};

// Streams that are walked together, such as a parameter, its gradient and its states.
template <std::size_t N>
struct Item {
  std::array<Stream, N> streams;
  Stream copy;  // if present, it receives streams[0] as it was stored, in its own type
  int64_t numel = 0;
  int64_t traffic = 0;  // bytes read and written per element: the unit of a thread's share
};

constexpr int64_t kBlock = 512;  // four streams of scratch are 8 KiB of a cache of at least 32
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
  if (whole < count) {  // the rest goes through a padded register: no byte beyond the tensor is read
    T rest[Vec::kLanes] = {};
    std::memcpy(rest, from + whole, (count - whole) * sizeof(T));
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
    std::memcpy(to + whole, rest, (count - whole) * sizeof(T));
  }
}

// A copy of at least this many bytes is written around the caches. That saves reading each line in
// order to overwrite it: a step that writes bf16 copies took 1.01 to 1.05 times as long as one without
// copies, and 1.07 to 1.13 times with plain stores. A smaller copy may still be in the cache when it is
// used.
constexpr int64_t kAroundBytes = 1 << 20;

// Like narrow, but around the caches if the alignment allows it. The caller must call settle_stores().
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

// The elements [begin, begin + count) of a stream as floats. The last register is padded with zeros.
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

// prefetch_ahead of vec.h, for each of a body's pointers.
template <class Streams>
inline void prefetch_ahead(const Streams& at, int64_t i) {
  std::apply([&](const auto*... stream) { (prefetch_ahead(stream + i), ...); }, at);
}

inline bool is_float(const Stream& stream) {
  return stream.type == Type::kFloat;
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

template <class T>
constexpr Type kTypeOf = std::is_same_v<T, BFloat16> ? Type::kBFloat16
    : std::is_same_v<T, Float16>                     ? Type::kFloat16
                                                     : Type::kFloat;

template <std::size_t N>
bool all_are(const Item<N>& item, std::size_t first, std::size_t last, Type type) {
  return std::all_of(item.streams.begin() + first, item.streams.begin() + last,
                     [&](const Stream& stream) { return stream.type == type; });
}

// Calls the body for whole registers of [begin, end), if all streams are of type T and the body accepts
// such pointers. Returns where the rest begins. Blocks through scratch were up to a fifth slower.
template <class T, std::size_t N, class Body>
int64_t sweep_alike(const Item<N>& item, int64_t begin, int64_t end, const Body& body) {
  using Pointers = std::array<T*, N>;
  if constexpr (std::is_invocable_v<const Body&, const Pointers&, int64_t>) {
    if (all_are(item, 0, N, kTypeOf<T>)) {
      Pointers at;
      for (std::size_t n = 0; n < N; ++n) {
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
template <class T, class States>
struct MixedPointers;
template <class T, std::size_t... States>
struct MixedPointers<T, std::index_sequence<States...>> {
  template <std::size_t>
  using State = float*;
  using type = std::tuple<T*, T*, State<States>...>;
};

// The same for these types, the usual form of mixed precision.
template <class T, std::size_t N, class Body>
int64_t sweep_mixed(const Item<N>& item, int64_t begin, int64_t end, const Body& body) {
  using Pointers = typename MixedPointers<T, std::make_index_sequence<N - 2>>::type;
  if constexpr (std::is_invocable_v<const Body&, const Pointers&, int64_t>) {
    if (all_are(item, 0, 2, kTypeOf<T>) && all_are(item, 2, N, Type::kFloat)) {
      const auto& streams = item.streams;
      const int64_t whole = whole_registers(end - begin);
      [&]<std::size_t... States>(std::index_sequence<States...>) {
        body(Pointers{streams[0].template at<T>(begin), streams[1].template at<T>(begin),
                      streams[States + 2].template at<float>(begin)...},
             whole);
      }(std::make_index_sequence<N - 2>());
      return begin + whole;
    }
  }
  return begin;
}

// Calls body(pointers, count) for the elements [begin, end) of an item, with one pointer per stream and
// a count that is a whole number of registers. An element's result does not depend on how the elements
// are split into ranges.
template <std::size_t N, class Body>
void sweep(const Item<N>& item, int64_t begin, int64_t end, const Body& body) {
  // With a copy, all goes in blocks: then the body's results are still in the cache when copied.
  if (item.copy.data == nullptr) {
    begin = sweep_alike<float>(item, begin, end, body);
    begin = sweep_mixed<BFloat16>(item, begin, end, body);
    begin = sweep_mixed<Float16>(item, begin, end, body);
    begin = sweep_alike<BFloat16>(item, begin, end, body);
    begin = sweep_alike<Float16>(item, begin, end, body);
  }
  const bool around =
      item.copy.data != nullptr && item.numel * size_of(item.copy.type) >= kAroundBytes;
  std::array<float*, N> at;
  alignas(64) float scratch[N][kBlock];
  while (begin < end) {
    const int64_t count = std::min(end - begin, kBlock);
    const bool whole = count == whole_registers(count);
    for (std::size_t n = 0; n < N; ++n) {
      if (whole && is_float(item.streams[n])) {
        at[n] = item.streams[n].template at<float>(begin);
      } else {
        at[n] = scratch[n];
        widen(item.streams[n], begin, count, at[n]);
      }
    }
    body(at, whole_registers(count + Vec::kLanes - 1));
    for (std::size_t n = 0; n < N; ++n) {
      if (at[n] == scratch[n] && item.streams[n].output) {
        narrow(at[n], item.streams[n], begin, count);
      }
    }
    if (item.copy.data != nullptr) {
      if (!is_float(item.streams[0])) {
        widen(item.streams[0], begin, count, at[0]);  // as it was stored, after rounding
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

// The items of a list, one after the other, in one index space. Its unit is a byte of traffic. So
// threads get equal shares for all sizes and types, and small tensors do not each need their own
// parallel region.
template <std::size_t N>
class Flat {
 public:
  explicit Flat(std::vector<Item<N>> items) : items_(std::move(items)) {
    starts_.reserve(items_.size() + 1);
    starts_.push_back(0);
    for (const Item<N>& item : items_) {
      starts_.push_back(starts_.back() + item.numel * item.traffic);
    }
  }

  int64_t size() const {
    return starts_.back();
  }

  // Calls body(pointers, count) for all elements that belong to [low, high) of the index space. Two
  // adjacent ranges share no element and leave none out.
  template <class Body>
  void sweep(int64_t low, int64_t high, const Body& body) const {
    const auto after = std::upper_bound(starts_.begin(), starts_.end(), low);
    for (auto i = static_cast<std::size_t>(after - starts_.begin()) - 1;
         i < items_.size() && starts_[i] < high; ++i) {
      opkiln::sweep(items_[i], element(i, low), element(i, high), body);
    }
  }

 private:
  // Ranges end at multiples of this many elements: whole cache lines of every type, whole blocks.
  static constexpr int64_t kCut = 2 * kBlock;

  int64_t element(std::size_t i, int64_t position) const {
    const Item<N>& item = items_[i];
    if (position <= starts_[i]) {
      return 0;
    }
    if (position >= starts_[i + 1]) {
      return item.numel;
    }
    const int64_t cut = (position - starts_[i]) / item.traffic;
    return std::min(item.numel, (cut + kCut - 1) / kCut * kCut);
  }

  std::vector<Item<N>> items_;
  std::vector<int64_t> starts_;
};

OPKILN_NAMESPACE_END
