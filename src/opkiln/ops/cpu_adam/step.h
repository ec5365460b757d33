// The step of Adam and AdamW on host memory, for cpu_adam and fused_adam. The arithmetic is reference.py's,
// in fp32 for all dtypes; narrow types are rounded once, when stored.
#pragma once

#include <opkiln/factor.h>
#include <opkiln/optimizing/host_sweep.h>

namespace {

using namespace opkiln;

constexpr size_t kStreams = 4;  // parameter, gradient, average, average of squares

struct Hyper {
  int64_t step;
  double lr, beta1, beta2, eps, weight_decay;
  bool adamw_mode, bias_correction, maximize;
  double grad_scale;
};

double correction(const Hyper& h, double beta) {
  return h.bias_correction ? 1 - __builtin_pow(beta, static_cast<double>(h.step)) : 1;
}

// The coefficients of both directions, computed in double once per call.
struct Coefficients {
  Coefficients() = default;
  explicit Coefficients(const Hyper& h)
      : grad_factor(all((h.maximize ? -1 : 1) / h.grad_scale)),
        l2(!h.adamw_mode && h.weight_decay != 0),
        decoupled(h.adamw_mode && h.weight_decay != 0),
        weight_decay(all(h.weight_decay)),
        kept(decoupled ? 1 - h.lr * h.weight_decay : 1),
        beta1(h.beta1),
        beta2(h.beta2),
        one_minus_beta1(all(1 - h.beta1)),
        one_minus_beta2(all(1 - h.beta2)),
        minus_step_size(all(-h.lr / correction(h, h.beta1))),
        root_factor(all(1 / __builtin_sqrt(correction(h, h.beta2)))),
        eps(all(h.eps)) {}

  // The gradient that the averages use. With L2 it depends on the parameter before the step.
  Vec gradient(Vec grad, Vec param) const {
    grad = grad * grad_factor;
    return l2 ? multiply_add(weight_decay, param, grad) : grad;
  }

  // What a step adds to the parameter, from the averages after the step.
  Vec change(Vec exp_avg, Vec exp_avg_sq) const {
    return minus_step_size * exp_avg / multiply_add(sqrt(exp_avg_sq), root_factor, eps);
  }

  Vec grad_factor;
  bool l2, decoupled;
  Vec weight_decay;
  double kept, beta1, beta2;
  Vec one_minus_beta1, one_minus_beta2;
  Vec minus_step_size, root_factor, eps;
};

struct Step {
  const Coefficients& coefficients;

  template <class Streams>
  [[gnu::noinline]] void operator()(const Streams& at, int64_t count) const {
    const Coefficients c = coefficients;  // a local, so that the stores below cannot alias it
    const Factor kept(c.kept), beta1(c.beta1), beta2(c.beta2);
    const auto [params, grads, exp_avgs, exp_avg_sqs] = at;
    for (int64_t i = 0; i < count; i += Vec::kLanes) {
      prefetch_all(params + i, grads + i, exp_avgs + i, exp_avg_sqs + i);
      Vec p = Vec::load(params + i);
      const Vec g = c.gradient(Vec::load(grads + i), p);
      Vec m = Vec::load(exp_avgs + i);
      Vec v = Vec::load(exp_avg_sqs + i);
      m = beta1.times_plus(m, c.one_minus_beta1 * g);
      v = beta2.times_plus(v, c.one_minus_beta2 * g * g);
      const Vec change = c.change(m, v);
      p = c.decoupled ? kept.times_plus(p, change) : p + change;
      p.store(params + i);
      m.store(exp_avgs + i);
      v.store(exp_avg_sqs + i);
    }
  }
};

}  // namespace
