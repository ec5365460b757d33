// The arithmetic of one element, in fp32 as in reference.py. Compiled for the device by nvcc and
// hipcc, and for the host by any C++ compiler: the tests run it there.
#pragma once

#include <math.h>

#include "kernel.h"

#if defined(__CUDACC__) || defined(__HIPCC__)
#define OPKILN_HOST_DEVICE __host__ __device__
#else
#define OPKILN_HOST_DEVICE
#endif

namespace opkiln {
namespace fused_adam {

// A multiplier near 1 as the sum of two floats. Rounded to one it would be off by up to 3e-8, always
// to the same side, which a hundred steps add up to more than 1e-6. The first part has few bits, so
// that errors fall to both sides; both are positive, so that infinity times it is infinity.
struct Factor {
  float high, low;

  OPKILN_HOST_DEVICE static Factor of(double value) {
    const double high = fmax(ceil(value * 256) - 2, 0.0) / 256;
    return {static_cast<float>(high), static_cast<float>(value - high)};
  }

  // this * x + y, rounded once where it matters.
  OPKILN_HOST_DEVICE float times_plus(float x, float y) const {
    return fmaf(x, high, fmaf(x, low, y));
  }
};

// What an element needs of the hyperparameters, worked out in double once per thread block.
struct Coefficients {
  float grad_factor;
  float l2;  // added to the gradient, times the parameter
  bool decoupled;
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

  OPKILN_HOST_DEVICE void step(float grad, float& param, float& exp_avg, float& exp_avg_sq) const {
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
