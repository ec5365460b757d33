// How a call's groups are laid over threads, for the two files that compile the kernels.
#pragma once

#include <opkiln/whole_groups_launch.h>

#include <type_traits>

#include "device.h"

namespace opkiln {
namespace quantizer {
namespace {

inline bool is_aligned(const void* pointer, std::size_t bytes) {
  return reinterpret_cast<std::size_t>(pointer) % bytes == 0;  // null is
}

inline unsigned log2_at_least(int64_t count) {
  unsigned log2 = 0;
  while ((int64_t{1} << log2) < count) {
    ++log2;
  }
  return log2;
}

template <class Source>
using Kernel = void (*)(const typename Source::Parameters);

inline Scheme scheme_of(const Format& format) {
  return !format.symmetric ? Scheme::kAsymmetric
      : format.full        ? Scheme::kFull
                           : Scheme::kSymmetric;
}

template <class Source, class Mode>
Kernel<Source> kernel_of(Scheme scheme) {
  switch (scheme) {
    case Scheme::kAsymmetric:
      return quantize_groups_kernel<Source, Scheme::kAsymmetric, Mode>;
    case Scheme::kSymmetric:
      return quantize_groups_kernel<Source, Scheme::kSymmetric, Mode>;
    case Scheme::kFull:
      // Rounding at random in the full scheme is rare: it has no kernel of its own.
      using Shared = std::conditional_t<Mode::kAtRandom, AnyMode, Mode>;
      return quantize_groups_kernel<Source, Scheme::kFull, Shared>;
  }
  return nullptr;
}

template <class Source>
Kernel<Source> kernel_for(const Work& work) {
  const Scheme scheme = scheme_of(work.format);
  const bool stochastic = work.random.stochastic;
  if constexpr (!Source::kFeedback) {
    if (work.to.values != nullptr && work.format.bits == 8) {
      return stochastic ? kernel_of<Source, LevelsMode<8, true>>(scheme)
                        : kernel_of<Source, LevelsMode<8, false>>(scheme);
    }
    if (work.to.values != nullptr) {
      return stochastic ? kernel_of<Source, LevelsMode<4, true>>(scheme)
                        : kernel_of<Source, LevelsMode<4, false>>(scheme);
    }
  }
  return kernel_of<Source, AnyMode>(scheme);
}

// The groups from l.first to l.last.
template <class Source>
cudaError_t launch_any(Launch& l, const typename Source::Parameters& p, cudaStream_t stream) {
  const int64_t most = l.work.format.group_size;
  const int64_t held = int64_t{Source::Type::kUnit} * kAnyUnits;
  l.log2_team = log2_at_least(((l.work.numel < most ? l.work.numel : most) + held - 1) / held);
  l.log2_team = l.log2_team > 10 ? 10 : l.log2_team;  // the kernel goes over the group in turns
  const unsigned threads = l.log2_team > 7 ? 1u << l.log2_team : 128;
  const int64_t a_block = threads >> l.log2_team;
  const auto blocks = static_cast<unsigned>((l.last - l.first + a_block - 1) / a_block);
  switch (scheme_of(l.work.format)) {
    case Scheme::kAsymmetric:
      return device::launch(quantize_any_kernel<Source, Scheme::kAsymmetric>, blocks, threads,
                            stream, p);
    case Scheme::kSymmetric:
      return device::launch(quantize_any_kernel<Source, Scheme::kSymmetric>, blocks, threads,
                            stream, p);
    case Scheme::kFull:
      return device::launch(quantize_any_kernel<Source, Scheme::kFull>, blocks, threads, stream, p);
  }
  return cudaErrorInvalidValue;
}

// All groups of a call, of which `l` is a part of `p`: those that are laid out as in whole_groups.h,
// and then the rest.
template <class Source>
cudaError_t launch_quantize(Launch& l, const typename Source::Parameters& p, cudaStream_t stream) {
  const Format& format = l.work.format;
  const int64_t groups = groups_of(l.work.numel, format);
  const bool aligned = l.aligned && is_aligned(l.work.to.values, 2 * format.bits);
  const device::WholeGroups layout(
      format.group_size, aligned ? l.work.numel / format.group_size : 0, 128,
      [] { return device::has_clusters(kernel_of<Source, AnyMode>(Scheme::kSymmetric)); });
  l.log2_chunks = layout.log2_chunks;
  cudaError_t error = cudaSuccess;
  if (layout.blocks > 0) {
    error = device::launch(kernel_for<Source>(l.work), layout, stream, p);
  }
  if (error == cudaSuccess && layout.groups < groups) {
    l.first = layout.groups;
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
