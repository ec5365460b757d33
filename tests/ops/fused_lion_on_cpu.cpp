// fused_lion's CUDA kernels, run on the CPU: the files themselves, on what stands in for CUDA's
// runtime. Called from Python with ctypes; fused_kernel.py mirrors the structures.

#include <ops/fused_lion/cuda.cu>

#include "fused_on_cpu.h"

using opkiln::fused_lion::Hyper;

extern "C" {

std::size_t hyper_bytes() {
  return sizeof(Hyper);
}

int run(const Hyper* hyper, Items items) {
  return run_items(items, [&](const Plan& plan) {
    return opkiln::fused_lion::enqueue(*hyper, plan, nullptr);
  });
}
}
