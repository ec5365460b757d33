// Atomic operations. One thread runs at a time, so a plain change is atomic.
// The runtime is told first; the change itself is not instrumented.
#pragma once

#include "runtime.h"

namespace opk {
namespace emulator {

template <class T>
struct Plain {
  using type = T;
};

// `change(old)` returns the new value. Returns the old one.
template <class T, class Change>
__attribute__((no_sanitize("thread"), noinline)) T change_memory(T* address, const Change& change) {
  const T old = *address;
  *address = change(old);
  return old;
}

// Inlined, so that reports name the kernel's line.
template <class T, class Change>
OPKILN_INLINE T atomically(T* address, const Change& change) {
  before_atomic(address, sizeof(T));
  return change_memory(address, change);
}

}  // namespace emulator
}  // namespace opk

#define OPKILN_ATOMIC(name, expression)                                                         \
  template <class T>                                                                            \
  OPKILN_INLINE T name(T* address,                                      \
                                               typename ::opk::emulator::Plain<T>::type value) { \
    return ::opk::emulator::atomically(address, [&](T old) __attribute__((no_sanitize("thread"))) -> T { \
      return expression;                                                                        \
    });                                                                                         \
  }                                                                                             \
  template <class T>                                                                            \
  OPKILN_INLINE T name##_block(                                         \
      T* address, typename ::opk::emulator::Plain<T>::type value) {                             \
    return name(address, value);                                                                \
  }                                                                                             \
  template <class T>                                                                            \
  OPKILN_INLINE T name##_system(                                        \
      T* address, typename ::opk::emulator::Plain<T>::type value) {                             \
    return name(address, value);                                                                \
  }
OPKILN_ATOMIC(atomicAdd, static_cast<T>(old + value))
OPKILN_ATOMIC(atomicSub, static_cast<T>(old - value))
OPKILN_ATOMIC(atomicExch, (static_cast<void>(old), value))
OPKILN_ATOMIC(atomicMin, value < old ? value : old)
OPKILN_ATOMIC(atomicMax, old < value ? value : old)
OPKILN_ATOMIC(atomicInc, old >= value ? T{0} : static_cast<T>(old + 1))
OPKILN_ATOMIC(atomicDec, old == 0 || old > value ? value : static_cast<T>(old - 1))
OPKILN_ATOMIC(atomicAnd, static_cast<T>(old & value))
OPKILN_ATOMIC(atomicOr, static_cast<T>(old | value))
OPKILN_ATOMIC(atomicXor, static_cast<T>(old ^ value))
#undef OPKILN_ATOMIC

template <class T>
OPKILN_INLINE T atomicCAS(T* address,
                                                  typename ::opk::emulator::Plain<T>::type compare,
                                                  typename ::opk::emulator::Plain<T>::type value) {
  return ::opk::emulator::atomically(
      address, [&](T old) __attribute__((no_sanitize("thread"))) -> T {
        return old == compare ? value : old;
      });
}
