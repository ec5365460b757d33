// LAMB over the tensors of a plan. One pass makes the new averages and sums up squares; a second,
// when the sums are known, reads parameters and averages again and moves the parameters: 40 bytes of
// traffic per element of fp32, where Adam has 28. Sums do not depend on the order of blocks.

#include <opkiln/optimizing/sweep.h>
#include "element.h"

namespace opkiln {
namespace fused_lamb {
namespace {

using namespace multi_tensor;

struct Sums {
  float* chunks;   // two per chunk: of the parameter, of its update
  double* folded;  // two per kFold chunks
};

struct Norms {
  const Coefficients& c;
  float& params;
  float& updates;
};

template <class Value, class Copy, class Grad, class Context>
struct Average {
  const Share& share;
  const Context& context;

  template <int kWidth>
  __device__ void at(int64_t index) const {
    constexpr bool kMaster = sizeof(Value) != sizeof(Copy);
    const Item& item = share.item;
    const void* const values = kMaster ? static_cast<void*>(item.master) : item.param;
    Pack<Value, kWidth> p;
    Pack<Grad, kWidth> g;
    Pack<float, kWidth> m, v;
    load(p, static_cast<const Value*>(values) + index);
    load(g, static_cast<const Grad*>(share.grads) + index);
    load(m, item.states[0] + index);
    load(v, item.states[1] + index);
    const Coefficients& c = context.c;
    if (c.skip) {
      return;
    }
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const float param = widen(p.at[k], item.param_type);
      c.average(widen(g.at[k], share.grad_type), m.at[k], v.at[k]);
      const float update = c.update(param, m.at[k], v.at[k]);
      context.params = fmaf(param, param, context.params);
      context.updates = fmaf(update, update, context.updates);
    }
    store(m, item.states[0] + index);
    store(v, item.states[1] + index);
  }
};

struct Move {
  const Coefficients& c;
  float trust;
};

template <class Value, class Copy, class Grad, class Context>
struct Apply {
  const Share& share;
  const Context& context;

  template <int kWidth>
  __device__ void at(int64_t index) const {
    constexpr bool kMaster = sizeof(Value) != sizeof(Copy);
    const Item& item = share.item;
    Value* const values =
        static_cast<Value*>(kMaster ? static_cast<void*>(item.master) : item.param);
    Pack<Value, kWidth> p;
    Pack<Copy, kWidth> copy;
    Pack<float, kWidth> m, v;
    load(p, values + index);
    load(m, item.states[0] + index);
    load(v, item.states[1] + index);
    const Coefficients& c = context.c;
    if (c.skip) {
      return;
    }
    const float rate = c.minus_lr * context.trust;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const float param = widen(p.at[k], item.param_type);
      const float moved = fmaf(rate, c.update(param, m.at[k], v.at[k]), param);
      p.at[k] = narrow<Value>(moved, item.param_type);
      copy.at[k] = narrow<Copy>(moved, item.param_type);
    }
    store(p, values + index);
    if (kMaster) {
      store(copy, static_cast<Copy*>(item.param) + index);
    }
  }
};

// The sums of two numbers over a block's threads, for thread 0. A tree in shared memory: no warp
// intrinsics, which HIP's are not alike.
template <class T, int kCount>
__device__ void add_up(T& first, T& second) {
  __shared__ T sums[2][kCount];
  const int thread = static_cast<int>(threadIdx.x);
  sums[0][thread] = first;
  sums[1][thread] = second;
  for (int half = kCount / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) {
      sums[0][thread] += sums[0][thread + half];
      sums[1][thread] += sums[1][thread + half];
    }
  }
  first = sums[0][0];
  second = sums[1][0];
}

template <bool kPlain>
__global__ void __launch_bounds__(kThreads, blocks_per_processor(kPlain))
average_kernel(const Plan plan, const Sums sums) {
  const uint32_t chunk = blockIdx.x;
  const uint32_t index = plan.table[chunk];
  const Item item = plan.items[index];
  float params = 0, updates = 0;
  by_type<kPlain, Average>(share_of(plan, item, index, chunk),
                           Norms{coefficients_of<Coefficients>(plan, item), params, updates});
  add_up<float, kThreads>(params, updates);
  if (threadIdx.x == 0) {
    sums.chunks[2 * chunk] = params;
    sums.chunks[2 * chunk + 1] = updates;
  }
}

// Of kFold chunks that are all of one tensor; of others nothing is read.
__global__ void __launch_bounds__(kThreads) fold_kernel(const Plan plan, const Sums sums) {
  const uint32_t begin = blockIdx.x * kFold;
  if (plan.table[begin] != plan.table[begin + kFold - 1]) {
    return;
  }
  double params = 0, updates = 0;
  for (uint32_t i = threadIdx.x; i < kFold; i += kThreads) {
    params += sums.chunks[2 * (begin + i)];
    updates += sums.chunks[2 * (begin + i) + 1];
  }
  add_up<double, kThreads>(params, updates);
  if (threadIdx.x == 0) {
    sums.folded[2 * blockIdx.x] = params;
    sums.folded[2 * blockIdx.x + 1] = updates;
  }
}

// The sums of squares of an item and of its update, in thread 0.
__device__ inline void sum_up(const Plan& plan, const Sums& sums, uint32_t index, double& params,
                              double& updates) {
  const Item& item = plan.items[index];
  const uint32_t begin = item.first;
  const auto count = static_cast<uint32_t>((item.numel + kChunk - 1) / kChunk);
  const uint32_t end = begin + count;
  // The folds that lie inside, and the chunks before and after them.
  const uint32_t first_fold = (begin + kFold - 1) / kFold;
  const uint32_t last_fold = end / kFold > first_fold ? end / kFold : first_fold;
  const bool has_folds = last_fold > first_fold;
  const uint32_t before = has_folds ? first_fold * kFold : end;
  const uint32_t after = has_folds ? last_fold * kFold : end;
  params = updates = 0;
  for (uint32_t i = begin + threadIdx.x; i < before; i += kThreads) {
    params += sums.chunks[2 * i];
    updates += sums.chunks[2 * i + 1];
  }
  for (uint32_t i = first_fold + threadIdx.x; i < last_fold; i += kThreads) {
    params += sums.folded[2 * i];
    updates += sums.folded[2 * i + 1];
  }
  for (uint32_t i = after + threadIdx.x; i < end; i += kThreads) {
    params += sums.chunks[2 * i];
    updates += sums.chunks[2 * i + 1];
  }
  add_up<double, kThreads>(params, updates);
}

__device__ inline bool skipped(const Plan& plan, uint32_t index) {
  return coefficients_of<Coefficients>(plan, plan.items[index]).skip;
}

__global__ void __launch_bounds__(kThreads)
trust_kernel(const Plan plan, const Sums sums, const Hyper hyper, float* coefficients) {
  double params, updates;
  sum_up(plan, sums, blockIdx.x, params, updates);
  if (threadIdx.x == 0 && !skipped(plan, blockIdx.x)) {
    coefficients[blockIdx.x] = trust(hyper, params, updates);
  }
}

__global__ void __launch_bounds__(kThreads)
squares_kernel(const Plan plan, const Sums sums, double* squares) {
  double params, updates;
  sum_up(plan, sums, blockIdx.x, params, updates);
  if (threadIdx.x == 0 && !skipped(plan, blockIdx.x)) {
    squares[2 * blockIdx.x] = params;
    squares[2 * blockIdx.x + 1] = updates;
  }
}

__global__ void __launch_bounds__(kThreads)
given_kernel(const Plan plan, const double* squares, const Hyper hyper, float* coefficients) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i < plan.sizes.items && !skipped(plan, i)) {
    coefficients[i] = trust(hyper, squares[2 * i], squares[2 * i + 1]);
  }
}

template <bool kPlain>
__global__ void __launch_bounds__(kThreads, blocks_per_processor(kPlain))
apply_kernel(const Plan plan, const float* coefficients) {
  const uint32_t chunk = blockIdx.x;
  const uint32_t index = plan.table[chunk];
  const Item item = plan.items[index];
  Share share = share_of(plan, item, index, chunk);
  share.grad_type = ElementType::kFloat;  // gradients are not read again
  by_type<kPlain, Apply>(
      share, Move{coefficients_of<Coefficients>(plan, item), coefficients[index]});
}

// The averages, and sums of squares of the chunks and folds.
template <bool kCounted>
cudaError_t launch_average(const Hyper& hyper, const Plan& plan, const Sums& sums,
                           cudaStream_t stream) {
  const Sizes& sizes = plan.sizes;
  cudaError_t error = enqueue_prepare<Coefficients, kCounted>(hyper, plan, stream);
  if (error == cudaSuccess && sizes.chunks > 0) {
    error = launch<Plan, Sums>(plan.plain ? average_kernel<true> : average_kernel<false>,
                               sizes.chunks, kThreads, stream, plan, sums);
  }
  if (error == cudaSuccess && sizes.chunks >= kFold) {
    error = launch<Plan, Sums>(fold_kernel, sizes.chunks / kFold, kThreads, stream, plan, sums);
  }
  return error;
}

cudaError_t launch_apply(const Plan& plan, const float* coefficients, cudaStream_t stream) {
  return plan.sizes.chunks == 0
      ? cudaSuccess
      : launch<Plan, const float*>(plan.plain ? apply_kernel<true> : apply_kernel<false>,
                                   plan.sizes.chunks, kThreads, stream, plan, coefficients);
}

Sums sums_at(void* memory, const Plan& plan) {
  auto* const folded = static_cast<double*>(memory);
  return {reinterpret_cast<float*>(folded + 2 * (plan.sizes.chunks / kFold + 1)), folded};
}

const char* text_of(cudaError_t error) {
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace

const char* enqueue(const Hyper& hyper, const multi_tensor::Plan& plan, void* memory,
                    float* coefficients, void* stream_pointer) {
  const Sums sums = sums_at(memory, plan);
  auto* const stream = static_cast<cudaStream_t>(stream_pointer);
  cudaError_t error = launch_average<true>(hyper, plan, sums, stream);
  if (error == cudaSuccess && plan.sizes.items > 0) {
    error = launch<Plan, Sums, Hyper, float*>(trust_kernel, plan.sizes.items, kThreads, stream,
                                              plan, sums, hyper, coefficients);
  }
  return text_of(error == cudaSuccess ? launch_apply(plan, coefficients, stream) : error);
}

const char* enqueue_average(const Hyper& hyper, const multi_tensor::Plan& plan, void* memory,
                            double* squares, void* stream_pointer) {
  const Sums sums = sums_at(memory, plan);
  auto* const stream = static_cast<cudaStream_t>(stream_pointer);
  cudaError_t error = launch_average<false>(hyper, plan, sums, stream);
  if (error == cudaSuccess && plan.sizes.items > 0) {
    error = launch<Plan, Sums, double*>(squares_kernel, plan.sizes.items, kThreads, stream, plan,
                                        sums, squares);
  }
  return text_of(error);
}

const char* enqueue_move(const Hyper& hyper, const multi_tensor::Plan& plan, const double* squares,
                         float* coefficients, void* stream_pointer) {
  auto* const stream = static_cast<cudaStream_t>(stream_pointer);
  cudaError_t error = enqueue_prepare<Coefficients>(hyper, plan, stream);
  const unsigned blocks = (plan.sizes.items + kThreads - 1) / kThreads;
  if (error == cudaSuccess && blocks > 0) {
    error = launch<Plan, const double*, Hyper, float*>(given_kernel, blocks, kThreads, stream, plan,
                                                       squares, hyper, coefficients);
  }
  return text_of(error == cudaSuccess ? launch_apply(plan, coefficients, stream) : error);
}

}  // namespace fused_lamb
}  // namespace opkiln
