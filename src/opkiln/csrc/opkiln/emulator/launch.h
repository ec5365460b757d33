// Launches a kernel of known type on the emulator.
#pragma once

#include <cstddef>
#include <utility>

#include "runtime.h"

namespace opk {
namespace emulator {

template <class... P>
struct Call {
  void (*kernel)(P...);
  void** arguments;

  template <std::size_t... kIndex>
  __attribute__((no_sanitize("thread"))) void operator()(std::index_sequence<kIndex...>) const {
    kernel(*static_cast<P*>(arguments[kIndex])...);
  }

  __attribute__((no_sanitize("thread"))) static void body(const void* call) {
    (*static_cast<const Call*>(call))(std::index_sequence_for<P...>());
  }
};

// arguments[i] is the address of the i-th argument. Each thread gets its own copy.
template <class... P>
void run_kernel(void (*kernel)(P...), Grid grid, void** arguments) {
  const Call<P...> call{kernel, arguments};
  grid.kernel = reinterpret_cast<const void*>(kernel);
  run(grid, &Call<P...>::body, &call, sizeof call);
}

}  // namespace emulator
}  // namespace opk
