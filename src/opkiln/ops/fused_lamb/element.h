// The arithmetic of one element, in fp32 as in reference.py. Compiled for the device by nvcc and
// hipcc, and for the host by any C++ compiler: the tests run it there.
#pragma once

#include <opkiln/device_factor.h>

#include "kernel.h"

namespace opkiln {
namespace fused_lamb {

// What an element needs of the hyperparameters, worked out in double once per count of steps.
struct Coefficients {
  bool skip;
  bool eps_inside_sqrt;
  float grad_factor;
  device::Factor beta2;
  float one_minus_beta1, one_minus_beta2;
  float average_factor;  // of the average, for its start at 0
  float root_factor;     // of the average of squares, or of its root
  float eps, weight_decay;
  float minus_lr;

  // For the step that follows `steps_made` steps.
  OPKILN_HOST_DEVICE static Coefficients of(const Hyper& h, double steps_made, double lr,
                                            double grad_scale) {
    const double step = steps_made + 1;
    // 1 - beta^step, without the cancellation; log_beta of 0 is minus infinity, which gives 1.
    const double correction1 = h.bias_correction ? -expm1(step * h.log_beta1) : 1;
    const double correction2 = h.bias_correction ? -expm1(step * h.log_beta2) : 1;
    Coefficients c;
    c.skip = false;
    c.eps_inside_sqrt = h.eps_inside_sqrt;
    c.grad_factor = static_cast<float>((h.maximize ? -1 : 1) / grad_scale);
    c.beta2 = device::Factor::of(h.beta2);
    c.one_minus_beta1 = static_cast<float>(1 - h.beta1);
    c.one_minus_beta2 = static_cast<float>(1 - h.beta2);
    c.average_factor = static_cast<float>(1 / correction1);
    c.root_factor = static_cast<float>(h.eps_inside_sqrt ? 1 / correction2 : 1 / sqrt(correction2));
    c.eps = static_cast<float>(h.eps);
    c.weight_decay = static_cast<float>(h.weight_decay);
    c.minus_lr = static_cast<float>(-lr);
    return c;
  }

  OPKILN_HOST_DEVICE void average(float grad, float& exp_avg, float& exp_avg_sq) const {
    const float g = grad * grad_factor;
    exp_avg = fmaf(one_minus_beta1, g - exp_avg, exp_avg);
    exp_avg_sq = beta2.times_plus(exp_avg_sq, one_minus_beta2 * g * g);
  }

  // From the averages after the step.
  OPKILN_HOST_DEVICE float update(float param, float exp_avg, float exp_avg_sq) const {
    const float root = eps_inside_sqrt ? sqrtf(fmaf(exp_avg_sq, root_factor, eps))
                                       : fmaf(sqrtf(exp_avg_sq), root_factor, eps);
    return fmaf(weight_decay, param, average_factor * exp_avg / root);
  }
};

// By which a tensor's update is multiplied, from the sums of squares of it and its update. NaN in
// either is to be seen.
OPKILN_HOST_DEVICE inline float trust(const Hyper& h, double params, double updates) {
  if (params == 0 || updates == 0) {
    return 1;
  }
  const double ratio = sqrt(params) / sqrt(updates);
  return static_cast<float>(ratio < h.min_coeff ? h.min_coeff
                                                : ratio > h.max_coeff ? h.max_coeff : ratio);
}

}  // namespace fused_lamb
}  // namespace opkiln
