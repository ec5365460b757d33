// opk::launch through CUDA's runtime, which nvcc links into its libraries.
#pragma once

OPK_NAMESPACE_BEGIN

// The compute capability that the kernel's code on this device was written for; 0 if there is no code, or none
// but for one thread (warpgroup_matrix.h). It can be lower than the device's: the driver also compiles PTX of earlier
// capabilities.
[[gnu::noinline]] inline int capability_of(const void* kernel, int device) {
  static NumberCache known;
  int answer = known.find(kernel, device);
  if (answer < 0) {
    cudaFuncAttributes found;
    answer = cudaFuncGetAttributes(&found, kernel) != cudaSuccess || found.maxThreadsPerBlock == 1 ? 0
        : found.ptxVersion < found.binaryVersion                  ? found.ptxVersion
                                                                  : found.binaryVersion;
    known.add(kernel, device, answer);
  }
  return answer;
}

// Bytes of dynamic shared memory that a block of the kernel may have on this device, in whole KiB; 0 if that cannot be
// found out. The kernel may have all of them from then on: a limit of what one launch needs would hold for the launches
// of other threads, too.
[[gnu::noinline]] inline size_t most_shared_of(const void* kernel, int device) {
  static NumberCache known;
  int kib = known.find(kernel, device);
  if (kib < 0) {
    cudaFuncAttributes found;
    int most = 0;
    if (cudaFuncGetAttributes(&found, kernel) != cudaSuccess ||
        cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) {
      return 0;
    }
    most -= static_cast<int>(found.sharedSizeBytes);
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most) != cudaSuccess) return 0;
    kib = most < (256 << 10) ? most >> 10 : 255;
    known.add(kernel, device, kib);
  }
  return static_cast<size_t>(kib) << 10;
}

[[gnu::noinline]] inline void launch_address(const void* kernel, const Launch& how, void** arguments) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess && how.shared > 0) most_shared_of(kernel, device);  // if it fails, the launch says why
  // above this limit a kernel has to opt in: not every device has such clusters
  if (error == cudaSuccess && how.cluster.count() > 8) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (error == cudaSuccess) {
    cudaLaunchAttribute attributes[3];
    cudaLaunchConfig_t config = {};
    config.gridDim = how.grid;
    config.blockDim = how.block;
    config.dynamicSmemBytes = how.shared;
    config.stream = static_cast<cudaStream_t>(current_stream(device));
    config.attrs = attributes;
    if (how.cluster.count() > 1) {
      cudaLaunchAttribute& each = attributes[config.numAttrs++];
      each.id = cudaLaunchAttributeClusterDimension;
      each.val.clusterDim.x = how.cluster.x;
      each.val.clusterDim.y = how.cluster.y;
      each.val.clusterDim.z = how.cluster.z;
    }
    if (how.cooperative) {
      cudaLaunchAttribute& each = attributes[config.numAttrs++];
      each.id = cudaLaunchAttributeCooperative;
      each.val.cooperative = 1;
    }
    if (how.overlap && capability_of(kernel, device) >= 90) {
      cudaLaunchAttribute& each = attributes[config.numAttrs++];
      each.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      each.val.programmaticStreamSerializationAllowed = 1;
    }
    error = cudaLaunchKernelExC(&config, kernel, arguments);
  }
  if (error != cudaSuccess) {
    cudaGetLastError();  // otherwise the next call would report it again
    raise_launch(how, cudaGetErrorString(error));
  }
}

template <class... P>
void launch_kernel(void (*kernel)(P...), const Launch& how, void** arguments) {
  launch_address(reinterpret_cast<const void*>(kernel), how, arguments);
}

template <class... P>
bool runs_as(void (*kernel)(P...), int capability) {
  int device = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
      capability_of(reinterpret_cast<const void*>(kernel), device) >= capability;
}

template <class... P>
size_t most_shared(void (*kernel)(P...)) {
  int device = 0;
  return cudaGetDevice(&device) == cudaSuccess ? most_shared_of(reinterpret_cast<const void*>(kernel), device) : 0;
}

OPK_NAMESPACE_END
