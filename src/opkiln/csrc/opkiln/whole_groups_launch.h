// Launches kernels over whole groups: in blocks with as many threads as a group needs, or in clusters
// of blocks if the GPU has them. Needs CUDA's headers, but not torch's.
#pragma once

#include "launch.h"
#include "whole_groups.h"

namespace opkiln {
namespace device {

struct WholeGroups {
  unsigned log2_chunks;  // in a group
  unsigned threads;      // of a block; 0: groups of this size are not supported
  unsigned cluster;      // blocks that share a group, or 1
  int64_t blocks;
  int64_t groups;        // that these blocks process: the first ones

  // The layout of `whole` groups, in blocks of at least `least_threads` threads. `clusters()` says
  // whether the kernel may be launched in clusters.
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

// Whether the device can run this kernel in clusters: both the device and the code must support them.
// (Code for an earlier GPU does not, even if the driver compiles it for a later one.)
template <class... Parameters>
bool has_clusters(void (*kernel)(Parameters...)) {
#if defined(OPKILN_KNOWS_CLUSTERS)
  cudaFuncAttributes found;
  return cudaFuncGetAttributes(&found, reinterpret_cast<const void*>(kernel)) == cudaSuccess &&
      found.ptxVersion >= 90 && found.binaryVersion >= 90;
#else
  return false;
#endif
}

template <class... Parameters>
cudaError_t launch(void (*kernel)(Parameters...), const WholeGroups& layout, cudaStream_t stream,
                   const Parameters&... parameters) {
#if defined(OPKILN_KNOWS_CLUSTERS)
  if (layout.cluster > 1) {
    void* arguments[] = {const_cast<void*>(static_cast<const void*>(&parameters))...};
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {layout.cluster, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(layout.blocks));
    config.blockDim = dim3(layout.threads);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments);
  }
#endif
  return launch(kernel, static_cast<unsigned>(layout.blocks), layout.threads, stream,
                parameters...);
}

}  // namespace device
}  // namespace opkiln
