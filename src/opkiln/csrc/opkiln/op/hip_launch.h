// opk::launch through HIP's runtime. Written for HIP directly, so hipify does not translate it.
#pragma once

OPK_NAMESPACE_BEGIN

[[gnu::noinline]] inline void launch_address(const void* kernel, const Launch& how, void** arguments) {
  OPK_CHECK(how.cluster.count() == 1, "launch: clusters need an NVIDIA GPU");
  int device = 0;
  hipError_t error = hipGetDevice(&device);
  if (error == hipSuccess) {
    const auto stream = static_cast<hipStream_t>(current_stream(device));
    if (how.cooperative) {
      error = hipLaunchCooperativeKernel(kernel, how.grid, how.block, arguments,
                                         static_cast<unsigned>(how.shared), stream);
    } else {
      error = hipLaunchKernel(kernel, how.grid, how.block, arguments, how.shared, stream);
    }
  }
  if (error != hipSuccess) {
    (void)hipGetLastError();  // otherwise the next call would report it again
    raise_launch(how, hipGetErrorString(error));
  }
}

template <class... P>
void launch_kernel(void (*kernel)(P...), const Launch& how, void** arguments) {
  launch_address(reinterpret_cast<const void*>(kernel), how, arguments);
}

template <class... P>
bool runs_as(void (*)(P...), int) {
  return false;
}

template <class... P>
size_t most_shared(void (*)(P...)) {
  int device = 0, most = 0;
  const bool found = hipGetDevice(&device) == hipSuccess &&
      hipDeviceGetAttribute(&most, hipDeviceAttributeMaxSharedMemoryPerBlock, device) == hipSuccess;
  return found ? static_cast<size_t>(most) : 0;
}

OPK_NAMESPACE_END
