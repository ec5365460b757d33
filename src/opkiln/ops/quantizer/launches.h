// How a call's groups are laid over threads, for the two files that compile the kernels.
#pragma once

#include "device.h"

namespace opkiln {
namespace quantizer {
namespace {

inline unsigned log2_at_least(int64_t count) {
  unsigned log2 = 0;
  while ((int64_t{1} << log2) < count) {
    ++log2;
  }
  return log2;
}

// Lays groups over teams of threads that take `groups` groups of `units` units a thread.
inline unsigned lay_out(Launch& l, int64_t units_in_group, int groups, int units,
                        unsigned& threads) {
  l.log2_team = log2_at_least((units_in_group + units - 1) / units);
  if (l.log2_team > 10) {
    l.log2_team = 10;  // the kernel goes over the group in turns
  }
  threads = l.log2_team > 7 ? 1u << l.log2_team : 128;
  const int64_t a_block = static_cast<int64_t>(groups) * (threads >> l.log2_team);
  return static_cast<unsigned>((l.last - l.first + a_block - 1) / a_block);
}

template <class Type>
int64_t units_in_group(const Work& work) {
  const int64_t most = work.format.group_size;
  return ((work.numel < most ? work.numel : most) + Type::kUnit - 1) / Type::kUnit;
}

template <class Source, int kGroups, int kUnits, class Mode>
cudaError_t launch_mode(Launch& l, const typename Source::Parameters& p, cudaStream_t stream) {
  unsigned threads = 0;
  const unsigned blocks =
      lay_out(l, units_in_group<typename Source::Type>(l.work), kGroups, kUnits, threads);
  return l.work.format.symmetric
      ? device::launch(quantize_kernel<Source, kGroups, kUnits, true, Mode>, blocks, threads,
                       stream, p)
      : device::launch(quantize_kernel<Source, kGroups, kUnits, false, Mode>, blocks, threads,
                       stream, p);
}

template <class Source, int kGroups, int kUnits>
cudaError_t launch_held(Launch& l, const typename Source::Parameters& p, cudaStream_t stream) {
  if constexpr (!Source::kFeedback) {
    const bool stochastic = l.work.random.stochastic;
    if (l.work.to.values != nullptr && l.work.format.bits == 8) {
      return stochastic
          ? launch_mode<Source, kGroups, kUnits, LevelsMode<8, true>>(l, p, stream)
          : launch_mode<Source, kGroups, kUnits, LevelsMode<8, false>>(l, p, stream);
    }
    if (l.work.to.values != nullptr) {
      return stochastic
          ? launch_mode<Source, kGroups, kUnits, LevelsMode<4, true>>(l, p, stream)
          : launch_mode<Source, kGroups, kUnits, LevelsMode<4, false>>(l, p, stream);
    }
  }
  return launch_mode<Source, kGroups, kUnits, AnyMode>(l, p, stream);
}

template <class Source>
cudaError_t launch_any(Launch& l, const typename Source::Parameters& p, cudaStream_t stream) {
  unsigned threads = 0;
  const unsigned blocks =
      lay_out(l, units_in_group<typename Source::Type>(l.work), 1, 1, threads);
  return l.work.format.symmetric
      ? device::launch(quantize_any_kernel<Source, true>, blocks, threads, stream, p)
      : device::launch(quantize_any_kernel<Source, false>, blocks, threads, stream, p);
}

// Of small groups each thread has several, for as many accesses in flight. Above four units a thread,
// eight keep a team within a warp, which needs no barrier, or a group in the registers of a block.
template <class Source>
cudaError_t launch_whole(Launch& l, const typename Source::Parameters& p, cudaStream_t stream) {
  const int64_t units = units_in_group<typename Source::Type>(l.work);
  if (units <= kWarp) {
    return launch_held<Source, 4, 1>(l, p, stream);
  }
  if (units <= 4 * kWarp || (units > 8 * kWarp && units <= 4 * kMostThreads)) {
    return launch_held<Source, 1, 4>(l, p, stream);
  }
  return launch_held<Source, 1, 8>(l, p, stream);
}

// All groups of a call, of which `l` is a part of `p`: the whole ones and then the rest.
template <class Source>
cudaError_t launch_quantize(Launch& l, const typename Source::Parameters& p, cudaStream_t stream) {
  const int64_t groups = groups_of(l.work.numel, l.work.format);
  const bool held = l.aligned &&
      l.work.format.group_size <= 8 * static_cast<int>(kMostThreads) * Source::Type::kUnit;
  l.first = 0;
  l.last = held ? l.work.numel / l.work.format.group_size : 0;
  cudaError_t error = cudaSuccess;
  if (l.last > 0) {
    error = launch_whole<Source>(l, p, stream);
  }
  if (error == cudaSuccess && l.last < groups) {
    l.first = l.last;
    l.last = groups;
    error = launch_any<Source>(l, p, stream);
  }
  return error;
}

}  // namespace

// Defined in the one file and called from the other.
cudaError_t enqueue_float(Launch& l, cudaStream_t stream);
cudaError_t enqueue_worked_out(Reduction& r, cudaStream_t stream);

}  // namespace quantizer
}  // namespace opkiln
