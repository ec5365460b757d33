// LAMB over the tensors of a plan. The first pass computes the new averages and sums up squares. When the
// sums are known, the second pass reads parameters and averages again and updates the parameters. That is 40
// bytes of traffic per fp32 element; Adam has 28. The sums do not depend on the order of the blocks.


#include <opkiln/device_factor.h>
#include <opkiln/op.h>
#include <opkiln/optimizing/plan_lists.h>
#include <opkiln/optimizing/sweep.h>

namespace {

using namespace opkiln;
using namespace opkiln::multi_tensor;
using device::Factor;

struct Hyper {
  double beta1, log_beta1, beta2, log_beta2, eps, weight_decay, min_coeff, max_coeff;
  bool eps_inside_sqrt, bias_correction, maximize;
  Numbers numbers;
};

// The coefficients of a step, computed in double once per step count.
struct Coefficients {
  bool skip;
  bool eps_inside_sqrt;
  float grad_factor;
  Factor beta1, beta2;
  float one_minus_beta1, one_minus_beta2;
  float average_factor;  // corrects the average's bias towards 0
  float root_factor;     // corrects the average of squares, or its root
  float eps, weight_decay;
  float minus_lr;

  // For the step that follows `steps_made` steps.
  __device__ static Coefficients of(const Hyper& h, double steps_made, double lr, double grad_scale) {
    const double step = steps_made + 1;
    // 1 - beta^step without cancellation. For beta = 0, log_beta is minus infinity, which gives 1.
    const double correction1 = h.bias_correction ? -expm1(step * h.log_beta1) : 1;
    const double correction2 = h.bias_correction ? -expm1(step * h.log_beta2) : 1;
    Coefficients c;
    c.skip = false;
    c.eps_inside_sqrt = h.eps_inside_sqrt;
    c.grad_factor = static_cast<float>((h.maximize ? -1 : 1) / grad_scale);
    c.beta1 = Factor::of(h.beta1);
    c.beta2 = Factor::of(h.beta2);
    c.one_minus_beta1 = static_cast<float>(1 - h.beta1);
    c.one_minus_beta2 = static_cast<float>(1 - h.beta2);
    c.average_factor = static_cast<float>(1 / correction1);
    c.root_factor = static_cast<float>(h.eps_inside_sqrt ? 1 / correction2 : 1 / sqrt(correction2));
    c.eps = static_cast<float>(h.eps);
    c.weight_decay = static_cast<float>(h.weight_decay);
    c.minus_lr = static_cast<float>(-lr);
    return c;
  }

  __device__ void average(float grad, float& exp_avg, float& exp_avg_sq) const {
    const float g = grad * grad_factor;
    exp_avg = beta1.times_plus(exp_avg, one_minus_beta1 * g);
    exp_avg_sq = beta2.times_plus(exp_avg_sq, one_minus_beta2 * g * g);
  }

  // Uses the averages after the step.
  __device__ float update(float param, float exp_avg, float exp_avg_sq) const {
    const float root = eps_inside_sqrt ? sqrtf(fmaf(exp_avg_sq, root_factor, eps))
                                       : fmaf(sqrtf(exp_avg_sq), root_factor, eps);
    return fmaf(weight_decay, param, average_factor * exp_avg / root);
  }
};

// The factor for a tensor's update, from the sums of squares of the tensor and its update. Propagates NaN.
__device__ inline float trust(const Hyper& h, double params, double updates) {
  if (params == 0 || updates == 0) {
    return 1;
  }
  const double ratio = sqrt(params) / sqrt(updates);
  return static_cast<float>(ratio < h.min_coeff ? h.min_coeff
                                                : ratio > h.max_coeff ? h.max_coeff : ratio);
}

// Squares are summed per chunk, and then over kFold chunks where these all belong to one
// tensor. So summing up a large tensor takes no longer than a small one.
constexpr uint32_t kFold = 512;

// The 8-byte words that the sums of a step need.
constexpr size_t sum_words(const Sizes& sizes) {
  return sizes.chunks + 2 * (sizes.chunks / kFold + 1);
}

struct Sums {
  float* chunks;   // two per chunk: of the parameter, and of its update
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

// Sums two numbers over a block's threads, for thread 0. Uses a tree
// in shared memory, because HIP's warp intrinsics differ.
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
  if (thread == 0) {  // it wrote them itself; other threads would need a barrier
    first = sums[0][0];
    second = sums[1][0];
  }
}

template <bool kPlain>
__global__ void __launch_bounds__(kThreads, blocks_per_processor(kPlain))
average_kernel(const Plan plan, const Sums sums) {
  const uint32_t chunk = blockIdx.x;
  const uint32_t index = plan.table[chunk];
  const Item item = plan.items[index];
  float params = 0, updates = 0;
  dispatch_types<kPlain, Average>(share_of(plan, item, index, chunk),
                           Norms{coefficients_of<Coefficients>(plan, item), params, updates});
  add_up<float, kThreads>(params, updates);
  if (threadIdx.x == 0) {
    sums.chunks[2 * chunk] = params;
    sums.chunks[2 * chunk + 1] = updates;
  }
}

// Sums kFold chunks if all belong to one tensor. Other sums are never read.
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

// Sums up the squares of an item and of its update, for thread 0.
__device__ inline void sum_up(const Plan& plan, const Sums& sums, uint32_t index, double& params,
                              double& updates) {
  const Item& item = plan.items[index];
  const uint32_t begin = item.first;
  const auto count = static_cast<uint32_t>((item.numel + kChunk - 1) / kChunk);
  const uint32_t end = begin + count;
  // The folds inside the item, and the chunks before and after them.
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

__device__ inline bool is_skipped(const Plan& plan, uint32_t index) {
  return coefficients_of<Coefficients>(plan, plan.items[index]).skip;
}

__global__ void __launch_bounds__(kThreads)
trust_kernel(const Plan plan, const Sums sums, const Hyper hyper, float* coefficients) {
  double params, updates;
  sum_up(plan, sums, blockIdx.x, params, updates);
  if (threadIdx.x == 0 && !is_skipped(plan, blockIdx.x)) {
    coefficients[blockIdx.x] = trust(hyper, params, updates);
  }
}

__global__ void __launch_bounds__(kThreads)
squares_kernel(const Plan plan, const Sums sums, double* squares) {
  double params, updates;
  sum_up(plan, sums, blockIdx.x, params, updates);
  if (threadIdx.x == 0 && !is_skipped(plan, blockIdx.x)) {
    squares[2 * blockIdx.x] = params;
    squares[2 * blockIdx.x + 1] = updates;
  }
}

__global__ void __launch_bounds__(kThreads)
given_kernel(const Plan plan, const double* squares, const Hyper hyper, float* coefficients) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i < plan.sizes.items && !is_skipped(plan, i)) {
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
  dispatch_types<kPlain, Apply>(
      share, Move{coefficients_of<Coefficients>(plan, item), coefficients[index]});
}

Sums sums_at(Tensor& memory, const Plan& plan) {
  auto* const folded = static_cast<double*>(memory.data());
  return {reinterpret_cast<float*>(folded + 2 * (plan.sizes.chunks / kFold + 1)), folded};
}

// Memory for a step's sums. torch does not reuse it before this stream has finished with it.
Tensor allocate_sums(const Plan& plan, opk::Device device) {
  return opk::empty({static_cast<int64_t>(sum_words(plan.sizes))}, DType::int64, device);
}

// Computes the averages, and the sums of squares of chunks and folds.
template <bool kCounted>
void enqueue_averages(const Hyper& hyper, const Plan& plan, const Sums& sums) {
  enqueue_prepare<Coefficients, kCounted>(hyper, plan);
  opk::launch(plan.plain ? average_kernel<true> : average_kernel<false>, plan.sizes.chunks, kThreads, 0,
              plan, sums);
  opk::launch(fold_kernel, plan.sizes.chunks / kFold, kThreads, 0, plan, sums);
}

void enqueue_apply(const Plan& plan, const float* coefficients) {
  opk::launch(plan.plain ? apply_kernel<true> : apply_kernel<false>, plan.sizes.chunks, kThreads, 0, plan,
              coefficients);
}

void enqueue(const Hyper& hyper, const Plan& plan, Tensor& coefficients, opk::Device device) {
  Tensor memory = allocate_sums(plan, device);
  const Sums sums = sums_at(memory, plan);
  float* const out = coefficients.data<float>();
  enqueue_averages<true>(hyper, plan, sums);
  opk::launch(trust_kernel, plan.sizes.items, kThreads, 0, plan, sums, hyper, out);
  enqueue_apply(plan, out);
}

Hyper hyper_of(double beta1, double beta2, double eps, double weight_decay, bool eps_inside_sqrt,
               bool bias_correction, bool maximize, double min_coeff, double max_coeff,
               const Numbers& numbers) {
  return {beta1, __builtin_log(beta1), beta2, __builtin_log(beta2), eps, weight_decay, min_coeff,
          max_coeff, eps_inside_sqrt, bias_correction, maximize, numbers};
}

void fused_lamb_(TensorList& params, const TensorList& grads, TensorList& exp_avgs,
                 TensorList& exp_avg_sqs, TensorList& masters, TensorList& steps, Tensor& coefficients,
                 double lr, double beta1, double beta2, double eps, double weight_decay,
                 bool eps_inside_sqrt, bool bias_correction, bool maximize, double min_coeff,
                 double max_coeff, const OptionalTensor& lr_tensor, const OptionalTensor& grad_scale,
                 const OptionalTensor& found_inf) {
  const Lists lists{params, grads, exp_avgs, &exp_avg_sqs, masters, steps};
  lists.check();
  if (steps.empty()) {
    return;
  }
  const opk::Device device = gpu_of(lists);
  check_numbers(coefficients, DType::float32, params.size(), device);
  const Hyper hyper =
      hyper_of(beta1, beta2, eps, weight_decay, eps_inside_sqrt, bias_correction, maximize, min_coeff,
               max_coeff, numbers_of(device, lr, lr_tensor, grad_scale, found_inf));
  const DevicePlan planned = write_plan(HostPlan(lists, device), device);
  enqueue(hyper, planned.plan, coefficients, device);
}

// The two halves of a step. Between them the caller may add to the sums of squares: two numbers per item, of
// the item and of its update. The first half does not count the step.
void fused_lamb_average_(const TensorList& params, const TensorList& grads, TensorList& exp_avgs,
                         TensorList& exp_avg_sqs, const TensorList& masters, const TensorList& steps,
                         Tensor& squares, double beta1, double beta2, double eps, double weight_decay,
                         bool eps_inside_sqrt, bool bias_correction, bool maximize,
                         const OptionalTensor& grad_scale, const OptionalTensor& found_inf) {
  const Lists lists{params, grads, exp_avgs, &exp_avg_sqs, masters, steps};
  lists.check();
  if (steps.empty()) {
    return;
  }
  const opk::Device device = gpu_of(lists);
  check_numbers(squares, DType::float64, 2 * params.size(), device);
  const Hyper hyper = hyper_of(beta1, beta2, eps, weight_decay, eps_inside_sqrt, bias_correction,
                               maximize, 0, 0, numbers_of(device, 0, {}, grad_scale, found_inf));
  const DevicePlan planned = write_plan(HostPlan(lists, device), device);
  const Plan& plan = planned.plan;
  Tensor memory = allocate_sums(plan, device);
  const Sums sums = sums_at(memory, plan);
  enqueue_averages<false>(hyper, plan, sums);
  opk::launch(squares_kernel, plan.sizes.items, kThreads, 0, plan, sums, squares.data<double>());
}

void fused_lamb_move_(TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
                      const TensorList& exp_avg_sqs, TensorList& masters, TensorList& steps,
                      const Tensor& squares, Tensor& coefficients, double lr, double beta1, double beta2,
                      double eps, double weight_decay, bool eps_inside_sqrt, bool bias_correction,
                      double min_coeff, double max_coeff, const OptionalTensor& lr_tensor,
                      const OptionalTensor& found_inf) {
  const Lists lists{params, grads, exp_avgs, &exp_avg_sqs, masters, steps};
  lists.check();
  if (steps.empty()) {
    return;
  }
  const opk::Device device = gpu_of(lists);
  check_numbers(coefficients, DType::float32, params.size(), device);
  check_numbers(squares, DType::float64, 2 * params.size(), device);
  const Hyper hyper = hyper_of(beta1, beta2, eps, weight_decay, eps_inside_sqrt, bias_correction,
                               /*maximize=*/false, min_coeff, max_coeff,
                               numbers_of(device, lr, lr_tensor, {}, found_inf));
  const DevicePlan planned = write_plan(HostPlan(lists, device), device);
  float* const out = coefficients.data<float>();
  enqueue_prepare<Coefficients>(hyper, planned.plan);
  opk::launch(given_kernel, (planned.plan.sizes.items + kThreads - 1) / kThreads, kThreads, 0,
              planned.plan, squares.data<const double>(), hyper, out);
  enqueue_apply(planned.plan, out);
}

opk::tuple<Tensor, Tensor> fused_lamb_keep(const TensorList& params, const TensorList& grads,
                                           const TensorList& exp_avgs, const TensorList& exp_avg_sqs,
                                           const TensorList& masters, const TensorList& steps) {
  return make_plan({params, grads, exp_avgs, &exp_avg_sqs, masters, steps});
}

int64_t fused_lamb_kept_(Tensor& plan, const Tensor& ticket, const TensorList& grads, Tensor& coefficients,
                            double lr, double beta1, double beta2, double eps, double weight_decay,
                            bool eps_inside_sqrt, bool bias_correction, bool maximize, double min_coeff,
                            double max_coeff, const OptionalTensor& lr_tensor,
                            const OptionalTensor& grad_scale, const OptionalTensor& found_inf) {
  const opk::Device device = plan.device();
  check_numbers(coefficients, DType::float32, grads.size(), device);
  const Hyper hyper =
      hyper_of(beta1, beta2, eps, weight_decay, eps_inside_sqrt, bias_correction, maximize, min_coeff,
               max_coeff, numbers_of(device, lr, lr_tensor, grad_scale, found_inf));
  Plan here;
  const int64_t found = replan(plan, ticket, grads, here);
  if (found == status::kMade) {
    enqueue(hyper, here, coefficients, device);
  }
  return found;
}

void fused_lamb_forget(const Tensor&, const Tensor& ticket) {
  KeptLists::forget(ticket);
}

OPKILN_OP(fused_lamb_, cuda);
OPKILN_OP(fused_lamb_average_, cuda);
OPKILN_OP(fused_lamb_move_, cuda);
OPKILN_OP(fused_lamb_keep, cuda);
OPKILN_OP(fused_lamb_kept_, cuda);
OPKILN_OP(fused_lamb_forget, cuda);

}  // namespace
