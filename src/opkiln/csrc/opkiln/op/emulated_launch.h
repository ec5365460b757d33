// opk::launch on the CPU, by the emulator: docs/emulator.md.
#pragma once

#include "../emulator/launch.h"

OPK_NAMESPACE_BEGIN

// Returns when the grid is done. Raises what the emulator found.
template <class... P>
void launch_kernel(void (*kernel)(P...), const Launch& how, void** arguments) {
  emulator::run_kernel(
      kernel, {how.grid, how.block, how.shared, how.cooperative, how.overlap, how.cluster, nullptr}, arguments);
}

template <class... P>
bool runs_as(void (*)(P...), int capability) {
  return capability < 90;
}

template <class... P>
size_t most_shared(void (*)(P...)) {
  return 227 << 10;  // as much as GPUs of compute capability 9.0 have
}

OPK_NAMESPACE_END
