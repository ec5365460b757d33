// Distributes a call's groups over threads, for the two files that compile the kernels.
#pragma once

#include <opkiln/whole_groups_launch.h>

#include "device.h"

#if !defined(__CUDACC_RTC__)

namespace opkiln {
namespace quantizer {
namespace {

inline bool is_aligned(const void* pointer, size_t bytes) {
  return reinterpret_cast<size_t>(pointer) % bytes == 0;  // null counts as aligned
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

// Stochastic rounding in the full scheme is rare, so it has no kernel of its own.
template <class Mode>
struct OrAny {
  using type = Mode;
};
template <int kBits>
struct OrAny<LevelsMode<kBits, true>> {
  using type = AnyMode;
};

template <class Source, class Mode>
Kernel<Source> kernel_of(Scheme scheme) {
  if (scheme == Scheme::kAsymmetric) {
    return quantize_groups_kernel<Source, Scheme::kAsymmetric, Mode>;
  }
  // Sources with feedback are bound by memory, so the symmetric scheme needs no kernel of its own.
  if constexpr (!Source::kFeedback) {
    if (scheme == Scheme::kSymmetric) {
      return quantize_groups_kernel<Source, Scheme::kSymmetric, Mode>;
    }
  }
  return quantize_groups_kernel<Source, Scheme::kFull, typename OrAny<Mode>::type>;
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

template <class Source>
Kernel<Source> any_kernel_of(Scheme scheme) {
  if (scheme == Scheme::kAsymmetric) {
    return quantize_any_kernel<Source, Scheme::kAsymmetric>;
  }
  if constexpr (!Source::kFeedback) {
    if (scheme == Scheme::kSymmetric) {
      return quantize_any_kernel<Source, Scheme::kSymmetric>;
    }
  }
  return quantize_any_kernel<Source, Scheme::kFull>;
}

// Launches the groups from l.first to l.last.
template <class Source>
void launch_any(Launch& l, const typename Source::Parameters& p) {
  const int64_t most = l.work.format.group_size;
  const int64_t held = int64_t{Source::Type::kUnit} * kAnyUnits;
  l.log2_team = log2_at_least(((l.work.numel < most ? l.work.numel : most) + held - 1) / held);
  l.log2_team = l.log2_team > 10 ? 10 : l.log2_team;  // the kernel then loops over the group
  const unsigned threads = l.log2_team > 7 ? 1u << l.log2_team : 128;
  const int64_t a_block = threads >> l.log2_team;
  opk::launch(any_kernel_of<Source>(scheme_of(l.work.format)),
              (l.last - l.first + a_block - 1) / a_block, threads, 0, p);
}

// Launches all groups of a call: first those in the layout of
// whole_groups.h, then the rest. `l` is a part of `p`.
template <class Source>
void launch_quantize(Launch& l, const typename Source::Parameters& p) {
  const Format& format = l.work.format;
  const int64_t groups = groups_of(l.work.numel, format);
  const bool aligned = l.aligned && is_aligned(l.work.to.values, 2 * format.bits);
  const device::WholeGroups layout(
      format.group_size, aligned ? l.work.numel / format.group_size : 0, 128,
      [] { return device::has_clusters(kernel_of<Source, AnyMode>(Scheme::kFull)); });
  l.log2_chunks = layout.log2_chunks;
  device::launch(kernel_for<Source>(l.work), layout, p);
  if (layout.groups < groups) {
    l.first = layout.groups;
    l.last = groups;
    launch_any<Source>(l, p);
  }
}

}  // namespace

// Defined in cuda_float.cu, called from cuda.cu.
void launch_float(Launch& l);
void launch_computed(Reduction& r);

}  // namespace quantizer
}  // namespace opkiln

#endif
