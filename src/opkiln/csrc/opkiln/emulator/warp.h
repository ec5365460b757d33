// Exchanges between the threads of a warp: shuffles, votes, matches and reductions.
#pragma once

#include "runtime.h"

OPKILN_INLINE void __syncwarp(unsigned mask = 0xffffffffu) {
  ::opk::emulator::sync_warp(mask);
}

OPKILN_INLINE unsigned __activemask() {
  return ::opk::emulator::active_mask();
}

namespace opk {
namespace emulator {

// A lane's value. For an absent lane a GPU returns anything; the
// emulator sets all bits, which is NaN as a float.
template <class T>
OPKILN_INLINE T value_of(const LaneValues& all, unsigned lane) {
  T out;
  if ((all.present >> lane & 1) != 0) {
    std::memcpy(&out, all.value[lane], sizeof(T));
  } else {
    std::memset(static_cast<void*>(&out), 0xff, sizeof(T));
  }
  return out;
}

template <class T>
OPKILN_INLINE LaneValues gather_values(Exchange kind, unsigned mask, const T& value) {
  static_assert(sizeof(T) <= kLargestValue, "a warp exchanges values of at most 16 bytes");
  LaneValues all;
  gather(kind, mask, &value, sizeof(T), all);
  return all;
}

// Reads from the lane that `from(lane, first, last)` returns, if it is within the section of `width` lanes.
template <class T, class From>
OPKILN_INLINE T shuffle(unsigned mask, const T& value, int width, const From& from) {
  if (width <= 0 || width > 32 || (width & (width - 1)) != 0) {
    stop("a shuffle whose width is not 1, 2, 4, 8, 16 or 32");
  }
  const LaneValues all = gather_values(Exchange::kShuffle, mask, value);
  const int lane = static_cast<int>(all.lane), first = lane & ~(width - 1);
  const int source = from(lane, first, first + width - 1);
  return source < first || source >= first + width ? value
                                                   : value_of<T>(all, static_cast<unsigned>(source));
}

template <class T, class Combine>
OPKILN_INLINE T reduce_lanes(unsigned mask, T value, const Combine& combine) {
  const LaneValues all = gather_values(Exchange::kReduce, mask, value);
  bool first = true;
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if ((all.present >> lane & 1) != 0) {
      const T other = value_of<T>(all, lane);
      value = first ? other : combine(value, other);
      first = false;
    }
  }
  return value;
}

OPKILN_INLINE unsigned ballot(unsigned mask, bool predicate, unsigned& present) {
  const LaneValues all = gather_values(Exchange::kVote, mask, predicate);
  unsigned out = 0;
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if ((all.present >> lane & 1) != 0 && all.value[lane][0] != 0) {
      out |= 1u << lane;
    }
  }
  present = all.present;
  return out;
}

}  // namespace emulator
}  // namespace opk

template <class T>
OPKILN_INLINE T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  return ::opk::emulator::shuffle(mask, value, width,
                                  [&](int, int first, int) { return first + (lane & (width - 1)); });
}
template <class T>
OPKILN_INLINE T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return ::opk::emulator::shuffle(
      mask, value, width, [&](int own, int, int) { return own - static_cast<int>(delta); });
}
template <class T>
OPKILN_INLINE T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return ::opk::emulator::shuffle(
      mask, value, width, [&](int own, int, int) { return own + static_cast<int>(delta); });
}
// As in PTX, a lane of an earlier section can be read, but not one of a later section.
template <class T>
OPKILN_INLINE T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const ::opk::emulator::LaneValues all =
      ::opk::emulator::gather_values(::opk::emulator::Exchange::kShuffle, mask, value);
  const int own = static_cast<int>(all.lane), last = (own & ~(width - 1)) + width - 1;
  const int source = own ^ bits;
  return source < 0 || source > last ? value
                                     : ::opk::emulator::value_of<T>(all, static_cast<unsigned>(source));
}

OPKILN_INLINE unsigned __ballot_sync(unsigned mask, int predicate) {
  unsigned present;
  return ::opk::emulator::ballot(mask, predicate != 0, present);
}
OPKILN_INLINE int __any_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) != 0;
}
OPKILN_INLINE int __all_sync(unsigned mask, int predicate) {
  unsigned present;
  return ::opk::emulator::ballot(mask, predicate != 0, present) == present;
}
OPKILN_INLINE int __uni_sync(unsigned mask, int predicate) {
  unsigned present;
  const unsigned set = ::opk::emulator::ballot(mask, predicate != 0, present);
  return set == 0 || set == present;
}

template <class T>
OPKILN_INLINE unsigned __match_any_sync(unsigned mask, T value) {
  const auto all = ::opk::emulator::gather_values(::opk::emulator::Exchange::kMatch, mask, value);
  unsigned out = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((all.present >> lane & 1) != 0 && std::memcmp(all.value[lane], &value, sizeof(T)) == 0) {
      out |= 1u << lane;
    }
  }
  return out;
}
template <class T>
OPKILN_INLINE unsigned __match_all_sync(unsigned mask, T value, int* all_equal) {
  const auto all = ::opk::emulator::gather_values(::opk::emulator::Exchange::kMatch, mask, value);
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((all.present >> lane & 1) != 0 && std::memcmp(all.value[lane], &value, sizeof(T)) != 0) {
      *all_equal = 0;
      return 0;
    }
  }
  *all_equal = 1;
  return all.present;
}

#define OPKILN_REDUCE(T)                                                                        \
  OPKILN_INLINE T __reduce_add_sync(unsigned mask, T value) {                                          \
    return ::opk::emulator::reduce_lanes(mask, value, [](T a, T b) {                                 \
      return static_cast<T>(static_cast<unsigned>(a) + static_cast<unsigned>(b));               \
    });                                                                                         \
  }                                                                                             \
  OPKILN_INLINE T __reduce_min_sync(unsigned mask, T value) {                                          \
    return ::opk::emulator::reduce_lanes(mask, value, [](T a, T b) { return a < b ? a : b; });       \
  }                                                                                             \
  OPKILN_INLINE T __reduce_max_sync(unsigned mask, T value) {                                          \
    return ::opk::emulator::reduce_lanes(mask, value, [](T a, T b) { return a < b ? b : a; });       \
  }
OPKILN_REDUCE(int)
OPKILN_REDUCE(unsigned)
#undef OPKILN_REDUCE
OPKILN_INLINE unsigned __reduce_and_sync(unsigned mask, unsigned value) {
  return ::opk::emulator::reduce_lanes(mask, value, [](unsigned a, unsigned b) { return a & b; });
}
OPKILN_INLINE unsigned __reduce_or_sync(unsigned mask, unsigned value) {
  return ::opk::emulator::reduce_lanes(mask, value, [](unsigned a, unsigned b) { return a | b; });
}
OPKILN_INLINE unsigned __reduce_xor_sync(unsigned mask, unsigned value) {
  return ::opk::emulator::reduce_lanes(mask, value, [](unsigned a, unsigned b) { return a ^ b; });
}
