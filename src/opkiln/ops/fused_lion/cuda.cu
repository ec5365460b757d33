// Lion over the tensors of a plan. sweep.h has the loop. The arithmetic is reference.py's, in fp32.

#include <opkiln/device_factor.h>
#include <opkiln/op.h>
#include <opkiln/optimizing/plan_lists.h>
#include <opkiln/optimizing/sweep.h>

namespace {

using namespace opkiln;
using namespace opkiln::multi_tensor;
using device::Factor;

struct Hyper {
  double beta1, beta2, weight_decay;
  bool maximize;
  Numbers numbers;
};

// The coefficients of a step, computed in double once per step count.
struct Coefficients {
  static constexpr int kStates = 1;

  bool skip;
  bool decays;
  float grad_factor;
  Factor kept;  // decoupled weight decay multiplies the parameter by it
  Factor beta1, beta2;
  float one_minus_beta1, one_minus_beta2;
  float lr;

  __device__ static Coefficients of(const Hyper& h, double /*steps_made*/, double lr,
                                    double grad_scale) {
    Coefficients c;
    c.skip = false;
    c.decays = h.weight_decay != 0;
    c.grad_factor = static_cast<float>((h.maximize ? -1 : 1) / grad_scale);
    c.kept = Factor::of(1 - lr * h.weight_decay);
    c.beta1 = Factor::of(h.beta1);
    c.beta2 = Factor::of(h.beta2);
    c.one_minus_beta1 = static_cast<float>(1 - h.beta1);
    c.one_minus_beta2 = static_cast<float>(1 - h.beta2);
    c.lr = static_cast<float>(lr);
    return c;
  }

  __device__ void step(float grad, float& param, float (&states)[kStates]) const {
    float& exp_avg = states[0];
    const float g = grad * grad_factor;
    const float blend = beta1.times_plus(exp_avg, one_minus_beta1 * g);
    // The sign of the blend, times -lr. 0 and NaN stay as they are.
    const float change = blend > 0 ? -lr : blend < 0 ? lr : blend;
    param = decays ? kept.times_plus(param, change) : param + change;
    exp_avg = beta2.times_plus(exp_avg, one_minus_beta2 * g);
  }
};

void fused_lion_(TensorList& params, const TensorList& grads, TensorList& exp_avgs, TensorList& masters,
                 TensorList& steps, double lr, double beta1, double beta2, double weight_decay,
                 bool maximize, const OptionalTensor& lr_tensor, const OptionalTensor& grad_scale,
                 const OptionalTensor& found_inf) {
  const Lists lists{params, grads, exp_avgs, nullptr, masters, steps};
  lists.check();
  if (steps.empty()) {
    return;
  }
  const opk::Device device = gpu_of(lists);
  const Hyper hyper{beta1, beta2, weight_decay, maximize,
                    numbers_of(device, lr, lr_tensor, grad_scale, found_inf)};
  const DevicePlan planned = write_plan(HostPlan(lists, device), device);
  enqueue_step<Coefficients>(hyper, planned.plan);
}

opk::tuple<Tensor, Tensor> fused_lion_keep(const TensorList& params, const TensorList& grads,
                                           const TensorList& exp_avgs, const TensorList& masters,
                                           const TensorList& steps) {
  return make_plan({params, grads, exp_avgs, nullptr, masters, steps});
}

int64_t fused_lion_kept_(Tensor& plan, const Tensor& ticket, const TensorList& grads, double lr,
                            double beta1, double beta2, double weight_decay, bool maximize,
                            const OptionalTensor& lr_tensor, const OptionalTensor& grad_scale,
                            const OptionalTensor& found_inf) {
  const Hyper hyper{beta1, beta2, weight_decay, maximize,
                    numbers_of(plan.device(), lr, lr_tensor, grad_scale, found_inf)};
  Plan here;
  const int64_t found = replan(plan, ticket, grads, here);
  if (found == status::kMade) {
    enqueue_step<Coefficients>(hyper, here);
  }
  return found;
}

void fused_lion_forget(const Tensor&, const Tensor& ticket) {
  KeptLists::forget(ticket);
}

OPKILN_OP(fused_lion_, cuda);
OPKILN_OP(fused_lion_keep, cuda);
OPKILN_OP(fused_lion_kept_, cuda);
OPKILN_OP(fused_lion_forget, cuda);

}  // namespace
