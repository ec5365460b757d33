// The step of Lion on host memory, for cpu_lion and fused_lion. The arithmetic is reference.py's, in
// fp32 for all dtypes; narrow types are rounded once, when stored.
#pragma once

#include <opkiln/factor.h>
#include <opkiln/optimizing/host_sweep.h>

namespace {

using namespace opkiln;

constexpr size_t kStreams = 3;  // parameter, gradient, average

struct Hyper {
  double lr, beta1, beta2, weight_decay;
  bool maximize;
  double grad_scale;
};

// The coefficients of both directions, computed in double once per call.
struct Coefficients {
  explicit Coefficients(const Hyper& h)
      : grad_factor(all((h.maximize ? -1 : 1) / h.grad_scale)),
        decoupled(h.weight_decay != 0),
        kept(1 - h.lr * h.weight_decay),
        beta1(h.beta1),
        beta2(h.beta2),
        one_minus_beta1(all(1 - h.beta1)),
        one_minus_beta2(all(1 - h.beta2)),
        minus_lr(all(-h.lr)) {}

  // What a step adds to the parameter, from the average before the step.
  Vec change(Vec exp_avg, Vec grad) const {
    return minus_lr * sign(beta1.times_plus(exp_avg, one_minus_beta1 * grad));
  }

  Vec grad_factor;
  bool decoupled;
  double kept;
  Factor beta1;
  double beta2;
  Vec one_minus_beta1, one_minus_beta2, minus_lr;
};

struct Step {
  const Coefficients& coefficients;

  template <class Streams>
  [[gnu::noinline]] void operator()(const Streams& at, int64_t count) const {
    const Coefficients c = coefficients;  // a local, so that the stores below cannot alias it
    const Factor kept(c.kept), beta2(c.beta2);
    const auto [params, grads, exp_avgs] = at;
    for (int64_t i = 0; i < count; i += Vec::kLanes) {
      prefetch_all(params + i, grads + i, exp_avgs + i);
      Vec p = Vec::load(params + i);
      const Vec g = Vec::load(grads + i) * c.grad_factor;
      Vec m = Vec::load(exp_avgs + i);
      const Vec change = c.change(m, g);
      p = c.decoupled ? kept.times_plus(p, change) : p + change;
      m = beta2.times_plus(m, c.one_minus_beta2 * g);
      p.store(params + i);
      m.store(exp_avgs + i);
    }
  }
};

}  // namespace
