// Replaces CUDA's header for emulated kernels. Of the runtime's functions it has those that launch and
// report. All work is done when a launch returns, so the others have nothing to wait for.
#pragma once

#include "../language.h"
#include "../launch.h"

#include <exception>

using cudaStream_t = struct CUstream_st*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };

namespace opk {
namespace emulator {

inline char last_report[4096] = "no error";

}  // namespace emulator
}  // namespace opk

inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : ::opk::emulator::last_report;
}
inline cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
inline cudaError_t cudaPeekAtLastError() {
  return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() {
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) {
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
// Few multiprocessors, so that loops over the blocks of a grid take more than one turn.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 2;
  return cudaSuccess;
}

// CUDA gets only the kernel's address; here the kernel's type describes the arguments.
template <class... P>
cudaError_t cudaLaunchKernel(void (*kernel)(P...), dim3 blocks, dim3 threads, void** arguments,
                             std::size_t shared, cudaStream_t) {
  try {
    ::opk::emulator::run_kernel(kernel, {blocks, threads, shared, false, false, dim3(), nullptr}, arguments);
    return cudaSuccess;
  } catch (const std::exception& error) {
    std::snprintf(::opk::emulator::last_report, sizeof ::opk::emulator::last_report, "%s", error.what());
    return cudaErrorLaunchFailure;
  }
}
