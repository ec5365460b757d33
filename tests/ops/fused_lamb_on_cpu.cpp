// fused_lamb's CUDA kernels, run on the CPU: the files themselves, on what stands in for CUDA's
// runtime. Called from Python with ctypes; fused_kernel.py mirrors the structures.

#include <ops/fused_lamb/cuda.cu>

#include "fused_on_cpu.h"

using opkiln::fused_lamb::Hyper;

extern "C" {

std::size_t hyper_bytes() {
  return sizeof(Hyper);
}

int run(const Hyper* hyper, Items items, float* coefficients) {
  return run_items(items, [&](const Plan& plan) {
    // NaN, so that a sum that is read before it is written is seen.
    std::vector<double> sums(opkiln::fused_lamb::sum_words(plan.sizes), NAN);
    return opkiln::fused_lamb::enqueue(*hyper, plan, sums.data(), coefficients, nullptr);
  });
}

int run_average(const Hyper* hyper, Items items, double* squares) {
  return run_items(items, [&](const Plan& plan) {
    std::vector<double> sums(opkiln::fused_lamb::sum_words(plan.sizes), NAN);
    return opkiln::fused_lamb::enqueue_average(*hyper, plan, sums.data(), squares, nullptr);
  });
}

int run_move(const Hyper* hyper, Items items, const double* squares, float* coefficients) {
  return run_items(items, [&](const Plan& plan) {
    return opkiln::fused_lamb::enqueue_move(*hyper, plan, squares, coefficients, nullptr);
  });
}
}
