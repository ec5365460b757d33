// Adam and AdamW in place on host memory, and the inverse of a step. The arithmetic is that of
// reference.py, in fp32 whatever the tensors' types; narrow types are rounded once, when stored.

#include <opkiln/tensors.h>

#include <cmath>
#include <cstdio>

namespace {

using namespace opkiln;

enum : std::size_t { kParam, kGrad, kExpAvg, kExpAvgSq, kStreams };
using Pointers = std::array<float*, kStreams>;

struct Hyper {
  int64_t step;
  double lr, beta1, beta2, eps, weight_decay;
  bool adamw_mode, bias_correction, maximize;
  double grad_scale;
};

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

// Every check of the tensors is made here, before anything is written.
std::vector<Item<kStreams>> unpack(const TensorList& params, const TensorList& grads,
                                   const TensorList& exp_avgs, const TensorList& exp_avg_sqs,
                                   const TensorList& copies) {
  const Argument param{"params", params}, grad{"grads", grads}, exp_avg{"exp_avgs", exp_avgs},
      exp_avg_sq{"exp_avg_sqs", exp_avg_sqs}, copy{"copies", copies};
  check_length(grad, param);
  check_length(exp_avg, param);
  check_length(exp_avg_sq, param);
  if (!copies.empty()) {
    check_length(copy, param);
  }
  std::vector<Item<kStreams>> items(params.size());
  for (std::size_t i = 0; i < params.size(); ++i) {
    const Model model(param, i);
    Item<kStreams>& item = items[i];
    item.numel = model.numel();
    item.streams[kParam] = model.stream(param, true);
    item.streams[kGrad] = model.stream(grad, false);
    item.streams[kExpAvg] = model.state(exp_avg);
    item.streams[kExpAvgSq] = model.state(exp_avg_sq);
    if (!copies.empty()) {
      item.copy = model.stream(copy, true);
    }
    item.traffic = traffic(item);
  }
  return items;
}

std::string shown(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", value);
  return text;
}

using Kernel = void(const Coefficients&, const Pointers&, int64_t);

template <Kernel* kernel>
void run(TensorList params, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs,
         TensorList copies, int64_t step, double lr, double beta1, double beta2, double eps,
         double weight_decay, bool adamw_mode, bool bias_correction, bool maximize,
         double grad_scale) {
  if (step < 1) {
    refuse("step is " + std::to_string(step) + ", expected at least 1");
  }
  if (grad_scale == 0) {
    refuse("grad_scale is 0, expected a divisor");
  }
  if (kernel == rollback && (beta1 == 0 || beta2 == 0 || (adamw_mode && lr * weight_decay == 1))) {
    refuse("a step with beta1 " + shown(beta1) + ", beta2 " + shown(beta2) +
           " and lr * weight_decay " + shown(lr * weight_decay) + " cannot be rolled back");
  }
  const Coefficients coefficients(Hyper{step, lr, beta1, beta2, eps, weight_decay, adamw_mode,
                                        bias_correction, maximize, grad_scale});
  parallel_sweep(unpack(params, grads, exp_avgs, exp_avg_sqs, copies),
                 [&](const Pointers& at, int64_t count) { kernel(coefficients, at, count); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(opkiln, CPU, m) {
  m.impl("cpu_adam_", TORCH_BOX(&run<step>));
  m.impl("cpu_adam_rollback_", TORCH_BOX(&run<rollback>));
}
