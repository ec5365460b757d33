// The arithmetic of one element, in fp32 as in reference.py. Compiled for the device by nvcc and
// hipcc, and for the host by any C++ compiler: the tests run it there.
#pragma once

#include <opkiln/device_factor.h>

#include "kernel.h"

namespace opkiln {
namespace fused_lion {

// What an element needs of the hyperparameters, worked out in double once per count of steps.
struct Coefficients {
  static constexpr int kStates = 1;

  bool skip;
  bool decays;
  float grad_factor;
  device::Factor kept;  // of the parameter, by decoupled decay
  float one_minus_beta1, one_minus_beta2;
  float lr;

  OPKILN_HOST_DEVICE static Coefficients of(const Hyper& h, double /*steps_made*/, double lr,
                                            double grad_scale) {
    Coefficients c;
    c.skip = false;
    c.decays = h.weight_decay != 0;
    c.grad_factor = static_cast<float>((h.maximize ? -1 : 1) / grad_scale);
    c.kept = device::Factor::of(1 - lr * h.weight_decay);
    c.one_minus_beta1 = static_cast<float>(1 - h.beta1);
    c.one_minus_beta2 = static_cast<float>(1 - h.beta2);
    c.lr = static_cast<float>(lr);
    return c;
  }

  OPKILN_HOST_DEVICE void step(float grad, float& param, float (&states)[kStates]) const {
    float& exp_avg = states[0];
    const float g = grad * grad_factor;
    const float blend = fmaf(one_minus_beta1, g - exp_avg, exp_avg);
    // The sign of the blend; 0 and NaN stay what they are.
    const float change = blend > 0 ? -lr : blend < 0 ? lr : blend;
    param = decays ? kept.times_plus(param, change) : param + change;
    exp_avg = fmaf(one_minus_beta2, g - exp_avg, exp_avg);
  }
};

}  // namespace fused_lion
}  // namespace opkiln
