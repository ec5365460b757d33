// Lion in place on host memory, and the inverse of a step. The arithmetic is that of reference.py,
// in fp32 whatever the tensors' types; narrow types are rounded once, when stored.

#include "cpu.h"

#include <opkiln/factor.h>

namespace {

using namespace opkiln;

// What both directions need of the hyperparameters, worked out in double once per call.
struct Coefficients {
  explicit Coefficients(const Hyper& h)
      : grad_factor(all((h.maximize ? -1 : 1) / h.grad_scale)),
        decoupled(h.weight_decay != 0),
        kept(1 - h.lr * h.weight_decay),
        beta2(h.beta2),
        one_minus_beta1(all(1 - h.beta1)),
        one_minus_beta2(all(1 - h.beta2)),
        minus_lr(all(-h.lr)) {}

  // What a step adds to the parameter, from the average before the step.
  Vec change(Vec exp_avg, Vec grad) const {
    return minus_lr * sign(multiply_add(one_minus_beta1, grad - exp_avg, exp_avg));
  }

  Vec grad_factor;
  bool decoupled;
  double kept, beta2;
  Vec one_minus_beta1, one_minus_beta2, minus_lr;
};

template <class Streams>
[[gnu::noinline]] void step(const Coefficients& coefficients, const Streams& at, int64_t count) {
  const Coefficients c = coefficients;  // a local: no store below can change it
  const Factor kept(c.kept);
  const auto [params, grads, exp_avgs] = at;
  for (int64_t i = 0; i < count; i += Vec::kLanes) {
    prefetch_ahead(at, i);
    Vec p = Vec::load(params + i);
    const Vec g = Vec::load(grads + i) * c.grad_factor;
    Vec m = Vec::load(exp_avgs + i);
    const Vec change = c.change(m, g);
    p = c.decoupled ? kept.times_plus(p, change) : p + change;
    m = multiply_add(c.one_minus_beta2, g - m, m);
    p.store(params + i);
    m.store(exp_avgs + i);
  }
}

[[gnu::noinline]] void rollback(const Coefficients& coefficients,
                                const std::array<float*, kStreams>& at, int64_t count) {
  const Coefficients c = coefficients;
  const Vec kept = all(c.kept), beta2 = all(c.beta2);
  const auto [params, grads, exp_avgs] = at;
  for (int64_t i = 0; i < count; i += Vec::kLanes) {
    const Vec g = Vec::load(grads + i) * c.grad_factor;
    const Vec m = subtract_product(Vec::load(exp_avgs + i), c.one_minus_beta2, g) / beta2;
    const Vec p = (Vec::load(params + i) - c.change(m, g)) / kept;
    p.store(params + i);
    m.store(exp_avgs + i);
  }
}

}  // namespace

OPKILN_NAMESPACE_BEGIN

void lion_step(const Hyper& hyper, const Flat<kStreams>& list, int64_t low, int64_t high) {
  const Coefficients coefficients(hyper);
  list.sweep(low, high,
             [&](const auto& at, int64_t count) { step(coefficients, at, count); });
}

void lion_rollback(const Hyper& hyper, const Flat<kStreams>& list, int64_t low, int64_t high) {
  const Coefficients coefficients(hyper);
  list.sweep(low, high, [&](const std::array<float*, kStreams>& at, int64_t count) {
    rollback(coefficients, at, count);
  });
}

OPKILN_NAMESPACE_END
