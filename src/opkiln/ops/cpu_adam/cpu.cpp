// Adam and AdamW in place on host memory, and the inverse of a step. The arithmetic is that of
// reference.py, in fp32 whatever the tensors' types; narrow types are rounded once, when stored.

#include "cpu.h"

#include <cmath>

namespace {

using namespace opkiln;

using Pointers = std::array<float*, kStreams>;

Vec all(double value) {
  return Vec::all(static_cast<float>(value));
}

double bias_correction(const Hyper& h, double beta) {
  return h.bias_correction ? 1 - std::pow(beta, static_cast<double>(h.step)) : 1;
}

// A multiplier near 1 as the sum of two floats. Rounded to one it would be off by up to 3e-8, always
// to the same side, which a hundred steps add up to more than 1e-6. The first part has few bits and
// the second is not small, so that without fused multiply-add, too, errors fall to both sides; both
// are positive, so that infinity times it is infinity and not infinity less infinity.
class Factor {
 public:
  explicit Factor(double value)
      : Factor(value, std::fmax(std::ceil(value * 256) - 2, 0) / 256) {}

  // this * x + y, rounded once where it matters.
  Vec times_plus(Vec x, Vec y) const {
    return multiply_add(x, high_, multiply_add(x, low_, y));
  }

 private:
  Factor(double value, double high) : high_(all(high)), low_(all(value - high)) {}

  Vec high_, low_;
};

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

[[gnu::noinline]] void step(const Coefficients& coefficients, const Pointers& at, int64_t count) {
  const Coefficients c = coefficients;  // a local: no store below can change it
  const Factor kept(c.kept), beta2(c.beta2);
  const auto [params, grads, exp_avgs, exp_avg_sqs] = at;
  for (int64_t i = 0; i < count; i += Vec::kLanes) {
    for (const float* stream : at) {
      prefetch_ahead(stream + i);
    }
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

[[gnu::noinline]] void rollback(const Coefficients& coefficients, const Pointers& at,
                                int64_t count) {
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
             [&](const Pointers& at, int64_t count) { step(coefficients, at, count); });
}

void adam_rollback(const Hyper& hyper, const Flat<kStreams>& list, int64_t low, int64_t high) {
  const Coefficients coefficients(hyper);
  list.sweep(low, high,
             [&](const Pointers& at, int64_t count) { rollback(coefficients, at, count); });
}

OPKILN_NAMESPACE_END
