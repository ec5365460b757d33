// Launches kernels over whole groups: in blocks with as many threads as a group needs, or in clusters of
// blocks on GPUs that have them.
#pragma once

#include "op.h"
#include "whole_groups.h"

namespace opkiln {
namespace device {

struct WholeGroups {
  unsigned log2_chunks;  // chunks in a group
  unsigned threads;      // threads per block; 0: groups of this size are not supported
  unsigned cluster;      // blocks per group: more than one is a cluster
  int64_t blocks;
  int64_t groups;        // groups that these blocks process: the first ones

  // The layout for `whole` groups, in blocks of at least `least_threads` threads. `clusters()` returns
  // whether the kernel may run in clusters; it is called only if a group needs more than one block.
  template <class Clusters>
  WholeGroups(int64_t group_size, int64_t whole, unsigned least_threads, const Clusters& clusters)
      : log2_chunks(0), threads(0), cluster(1), blocks(0), groups(0) {
    while (int64_t{kChunkElements} << log2_chunks < group_size) {
      ++log2_chunks;
    }
    if (whole == 0 || int64_t{kChunkElements} << log2_chunks != group_size) {
      return;
    }
    const unsigned needed = (1u << log2_chunks) / kChunksPerThread;
    if (needed <= kGroupThreads) {
      threads = needed > least_threads ? needed : least_threads;
      const int64_t a_block = (threads * kChunksPerThread) >> log2_chunks;
      blocks = whole / a_block;
      groups = blocks * a_block;
    } else if (needed <= kGroupThreads * kLargestCluster && clusters()) {
      threads = kGroupThreads;
      cluster = needed / kGroupThreads;
      groups = whole;
      blocks = whole * cluster;
    }
  }
};

#if !defined(__CUDACC_RTC__)

// Whether the device can run this kernel in clusters.
template <class... Parameters>
bool has_clusters(void (*kernel)(Parameters...)) {
#if defined(OPKILN_KNOWS_CLUSTERS)
  return opk::has_clusters(kernel);
#else
  return false;
#endif
}

template <class... Parameters>
void launch(void (*kernel)(Parameters...), const WholeGroups& layout,
            const typename opk::Same<Parameters>::type&... parameters) {
  opk::Launch how;
  how.grid = layout.blocks;
  how.block = layout.threads;
  how.cluster = layout.cluster;
  opk::launch(kernel, how, parameters...);
}

#endif

}  // namespace device
}  // namespace opkiln
