// Adam and AdamW in place on host memory, and the inverse of a step. The arithmetic is that of
// reference.py, in fp32 whatever the tensors' types; narrow types are rounded once, when stored.

#include "cpu.h"

#include <opkiln/factor.h>

namespace {

using namespace opkiln;

double bias_correction(const Hyper& h, double beta) {
  return h.bias_correction ? 1 - std::pow(beta, static_cast<double>(h.step)) : 1;
}

// What both directions need of the hyperparameters, worked out in double once per call.
struct Coefficients {
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
        minus_step_size(all(-h.lr / bias_correction(h, h.beta1))),
        root_factor(all(1 / std::sqrt(bias_correction(h, h.beta2)))),
        eps(all(h.eps)) {}

  // The gradient that the averages see. With L2 it depends on the parameter before the step.
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

template <class Streams>
[[gnu::noinline]] void step(const Coefficients& coefficients, const Streams& at, int64_t count) {
  const Coefficients c = coefficients;  // a local: no store below can change it
  const Factor kept(c.kept), beta2(c.beta2);
  const auto [params, grads, exp_avgs, exp_avg_sqs] = at;
  for (int64_t i = 0; i < count; i += Vec::kLanes) {
    prefetch_ahead(at, i);
    Vec p = Vec::load(params + i);
    const Vec g = c.gradient(Vec::load(grads + i), p);
    Vec m = Vec::load(exp_avgs + i);
    Vec v = Vec::load(exp_avg_sqs + i);
    m = multiply_add(c.one_minus_beta1, g - m, m);
    v = beta2.times_plus(v, c.one_minus_beta2 * g * g);
    const Vec change = c.change(m, v);
    p = c.decoupled ? kept.times_plus(p, change) : p + change;
    p.store(params + i);
    m.store(exp_avgs + i);
    v.store(exp_avg_sqs + i);
  }
}

[[gnu::noinline]] void rollback(const Coefficients& coefficients,
                                const std::array<float*, kStreams>& at, int64_t count) {
  const Coefficients c = coefficients;
  const Vec kept = all(c.kept), beta1 = all(c.beta1), beta2 = all(c.beta2), zero = all(0);
  const auto [params, grads, exp_avgs, exp_avg_sqs] = at;
  for (int64_t i = 0; i < count; i += Vec::kLanes) {
    Vec m = Vec::load(exp_avgs + i);
    Vec v = Vec::load(exp_avg_sqs + i);
    const Vec p = (Vec::load(params + i) - c.change(m, v)) / kept;
    const Vec g = c.gradient(Vec::load(grads + i), p);
    m = subtract_product(m, c.one_minus_beta1, g) / beta1;
    // Rounding may leave less than nothing of a small average.
    v = at_least(zero, subtract_product(v, c.one_minus_beta2 * g, g) / beta2);
    p.store(params + i);
    m.store(exp_avgs + i);
    v.store(exp_avg_sqs + i);
  }
}

}  // namespace

OPKILN_NAMESPACE_BEGIN

void adam_step(const Hyper& hyper, const Flat<kStreams>& list, int64_t low, int64_t high) {
  const Coefficients coefficients(hyper);
  list.sweep(low, high,
             [&](const auto& at, int64_t count) { step(coefficients, at, count); });
}

void adam_rollback(const Hyper& hyper, const Flat<kStreams>& list, int64_t low, int64_t high) {
  const Coefficients coefficients(hyper);
  list.sweep(low, high, [&](const std::array<float*, kStreams>& at, int64_t count) {
    rollback(coefficients, at, count);
  });
}

OPKILN_NAMESPACE_END
