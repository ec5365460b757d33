// Adam and AdamW over the tensors of a plan. sweep.h has the loop. The arithmetic is reference.py's, in fp32.

#include <opkiln/device_factor.h>
#include <opkiln/op.h>
#include <opkiln/optimizing/plan_lists.h>
#include <opkiln/optimizing/sweep.h>

namespace {

using namespace opkiln;
using namespace opkiln::multi_tensor;
using device::Factor;

struct Hyper {
  double beta1, log_beta1, beta2, log_beta2, eps, weight_decay;
  bool adamw_mode, bias_correction, maximize;
  Numbers numbers;
};

// The coefficients of a step, computed in double once per step count.
struct Coefficients {
  static constexpr int kStates = 2;

  bool skip;
  bool decoupled;
  float grad_factor;
  float l2;  // times the parameter, is added to the gradient
  Factor kept;  // decoupled weight decay multiplies the parameter by it
  Factor beta1, beta2;
  float one_minus_beta1, one_minus_beta2;
  float minus_step_size, root_factor, eps;

  // For the step that follows `steps_made` steps.
  __device__ static Coefficients of(const Hyper& h, double steps_made, double lr, double grad_scale) {
    const double step = steps_made + 1;
    // 1 - beta^step without cancellation. For beta = 0, log_beta is minus infinity, which gives 1.
    const double correction1 = h.bias_correction ? -expm1(step * h.log_beta1) : 1;
    const double correction2 = h.bias_correction ? -expm1(step * h.log_beta2) : 1;
    Coefficients c;
    c.skip = false;
    c.grad_factor = static_cast<float>((h.maximize ? -1 : 1) / grad_scale);
    c.l2 = h.adamw_mode ? 0 : static_cast<float>(h.weight_decay);
    c.decoupled = h.adamw_mode && h.weight_decay != 0;
    c.kept = Factor::of(1 - lr * h.weight_decay);
    c.beta1 = Factor::of(h.beta1);
    c.beta2 = Factor::of(h.beta2);
    c.one_minus_beta1 = static_cast<float>(1 - h.beta1);
    c.one_minus_beta2 = static_cast<float>(1 - h.beta2);
    c.minus_step_size = static_cast<float>(-lr / correction1);
    c.root_factor = static_cast<float>(1 / sqrt(correction2));
    c.eps = static_cast<float>(h.eps);
    return c;
  }

  __device__ void step(float grad, float& param, float (&states)[kStates]) const {
    auto& [exp_avg, exp_avg_sq] = states;
    float g = grad * grad_factor;
    if (l2 != 0) {
      g = fmaf(l2, param, g);
    }
    exp_avg = beta1.times_plus(exp_avg, one_minus_beta1 * g);
    exp_avg_sq = beta2.times_plus(exp_avg_sq, one_minus_beta2 * g * g);
    const float change = minus_step_size * exp_avg / fmaf(sqrtf(exp_avg_sq), root_factor, eps);
    param = decoupled ? kept.times_plus(param, change) : param + change;
  }
};

Hyper hyper_of(double beta1, double beta2, double eps, double weight_decay, bool adamw_mode,
               bool bias_correction, bool maximize, const Numbers& numbers) {
  return {beta1, __builtin_log(beta1), beta2, __builtin_log(beta2), eps, weight_decay, adamw_mode,
          bias_correction, maximize, numbers};
}

void fused_adam_(TensorList& params, const TensorList& grads, TensorList& exp_avgs,
                 TensorList& exp_avg_sqs, TensorList& masters, TensorList& steps, double lr, double beta1,
                 double beta2, double eps, double weight_decay, bool adamw_mode, bool bias_correction,
                 bool maximize, const OptionalTensor& lr_tensor, const OptionalTensor& grad_scale,
                 const OptionalTensor& found_inf) {
  const Lists lists{params, grads, exp_avgs, &exp_avg_sqs, masters, steps};
  lists.check();
  if (steps.empty()) {
    return;
  }
  const opk::Device device = gpu_of(lists);
  const Hyper hyper = hyper_of(beta1, beta2, eps, weight_decay, adamw_mode, bias_correction, maximize,
                               numbers_of(device, lr, lr_tensor, grad_scale, found_inf));
  const DevicePlan planned = write_plan(HostPlan(lists, device), device);
  enqueue_step<Coefficients>(hyper, planned.plan);
}

opk::tuple<Tensor, Tensor> fused_adam_keep(const TensorList& params, const TensorList& grads,
                                           const TensorList& exp_avgs, const TensorList& exp_avg_sqs,
                                           const TensorList& masters, const TensorList& steps) {
  return make_plan({params, grads, exp_avgs, &exp_avg_sqs, masters, steps});
}

int64_t fused_adam_kept_(Tensor& plan, const Tensor& ticket, const TensorList& grads, double lr,
                            double beta1, double beta2, double eps, double weight_decay,
                            bool adamw_mode, bool bias_correction, bool maximize,
                            const OptionalTensor& lr_tensor, const OptionalTensor& grad_scale,
                            const OptionalTensor& found_inf) {
  const Hyper hyper = hyper_of(beta1, beta2, eps, weight_decay, adamw_mode, bias_correction, maximize,
                               numbers_of(plan.device(), lr, lr_tensor, grad_scale, found_inf));
  Plan here;
  const int64_t found = replan(plan, ticket, grads, here);
  if (found == status::kMade) {
    enqueue_step<Coefficients>(hyper, here);
  }
  return found;
}

void fused_adam_forget(const Tensor&, const Tensor& ticket) {
  KeptLists::forget(ticket);
}

OPKILN_OP(fused_adam_, cuda);
OPKILN_OP(fused_adam_keep, cuda);
OPKILN_OP(fused_adam_kept_, cuda);
OPKILN_OP(fused_adam_forget, cuda);

}  // namespace
