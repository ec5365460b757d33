// fused_adam's CUDA kernels, run on the CPU: the file itself, on what stands in for CUDA's runtime.
// Called from Python with ctypes; the structures below mirror those of kernel.h there.

#include <ops/fused_adam/cuda.cu>

using namespace opkiln::fused_adam;

int launches = 0;

cudaError_t cudaLaunchKernel(const void* kernel, dim3 blocks, dim3 threads, void** arguments,
                             std::size_t, cudaStream_t) {
  ++launches;
  if (kernel == reinterpret_cast<const void*>(step_kernel)) {
    const Work& work = *static_cast<const Work*>(arguments[0]);
    const Hyper& hyper = *static_cast<const Hyper*>(arguments[1]);
    run_grid(blocks, threads, [&] { step_kernel(work, hyper); });
  } else {
    const Steps& steps = *static_cast<const Steps*>(arguments[0]);
    const float* found_inf = *static_cast<const float* const*>(arguments[1]);
    run_grid(blocks, threads, [&] { advance_kernel(steps, found_inf); });
  }
  return cudaSuccess;
}

extern "C" {

std::size_t item_bytes() {
  return sizeof(Item);
}

std::size_t hyper_bytes() {
  return sizeof(Hyper);
}

// The number of launches it took, of which the steps' own is the last.
int run(const Hyper* hyper, const Item* items, std::size_t count, float* const* steps,
        std::size_t step_count) {
  launches = 0;
  return enqueue(*hyper, items, count, steps, step_count, nullptr) == nullptr ? launches : -1;
}
}
