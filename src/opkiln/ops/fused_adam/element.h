// The arithmetic of one element, in fp32 as in reference.py. Compiled for the device by nvcc and
// hipcc, and for the host by any C++ compiler: the tests run it there.
#pragma once

#include <opkiln/device_factor.h>

#include "kernel.h"

namespace opkiln {
namespace fused_adam {

using device::Factor;

// What an element needs of the hyperparameters, worked out in double once per count of steps.
struct Coefficients {
  static constexpr int kStates = 2;

  bool skip;
  bool decoupled;
  float grad_factor;
  float l2;  // added to the gradient, times the parameter
  Factor kept;  // of the parameter, by decoupled decay
  Factor beta2;
  float one_minus_beta1, one_minus_beta2;
  float minus_step_size, root_factor, eps;

  // For the step that follows `steps_made` steps.
  OPKILN_HOST_DEVICE static Coefficients of(const Hyper& h, double steps_made, double lr,
                                            double grad_scale) {
    const double step = steps_made + 1;
    // 1 - beta^step, without the cancellation; log_beta of 0 is minus infinity, which gives 1.
    const double correction1 = h.bias_correction ? -expm1(step * h.log_beta1) : 1;
    const double correction2 = h.bias_correction ? -expm1(step * h.log_beta2) : 1;
    Coefficients c;
    c.skip = false;
    c.grad_factor = static_cast<float>((h.maximize ? -1 : 1) / grad_scale);
    c.l2 = h.adamw_mode ? 0 : static_cast<float>(h.weight_decay);
    c.decoupled = h.adamw_mode && h.weight_decay != 0;
    c.kept = Factor::of(1 - lr * h.weight_decay);
    c.beta2 = Factor::of(h.beta2);
    c.one_minus_beta1 = static_cast<float>(1 - h.beta1);
    c.one_minus_beta2 = static_cast<float>(1 - h.beta2);
    c.minus_step_size = static_cast<float>(-lr / correction1);
    c.root_factor = static_cast<float>(1 / sqrt(correction2));
    c.eps = static_cast<float>(h.eps);
    return c;
  }

  OPKILN_HOST_DEVICE void step(float grad, float& param, float (&states)[kStates]) const {
    auto& [exp_avg, exp_avg_sq] = states;
    float g = grad * grad_factor;
    if (l2 != 0) {
      g = fmaf(l2, param, g);
    }
    exp_avg = fmaf(one_minus_beta1, g - exp_avg, exp_avg);
    exp_avg_sq = beta2.times_plus(exp_avg_sq, one_minus_beta2 * g * g);
    const float change = minus_step_size * exp_avg / fmaf(sqrtf(exp_avg_sq), root_factor, eps);
    param = decoupled ? kept.times_plus(param, change) : param + change;
  }
};

}  // namespace fused_adam
}  // namespace opkiln
