// Adagrad in place on host memory, and the inverse of a step. The arithmetic is that of
// reference.py, in fp32 whatever the tensors' types; narrow types are rounded once, when stored.

#include "cpu.h"

#include <opkiln/factor.h>

namespace {

using namespace opkiln;

// What both directions need of the hyperparameters, worked out in double once per call.
struct Coefficients {
  explicit Coefficients(const Hyper& h)
      : grad_factor(all((h.maximize ? -1 : 1) / h.grad_scale)),
        l2(h.weight_decay != 0),
        weight_decay(all(h.weight_decay)),
        step_size(all(h.lr / (1 + static_cast<double>(h.step - 1) * h.lr_decay))),
        eps(all(h.eps)) {}

  // The gradient that the sum sees. With L2 it depends on the parameter before the step.
  Vec gradient(Vec grad, Vec param) const {
    return l2 ? multiply_add(weight_decay, param, grad) : grad;
  }

  Vec grad_factor;
  bool l2;
  Vec weight_decay, step_size, eps;
};

template <class Streams>
[[gnu::noinline]] void step(const Coefficients& coefficients, const Streams& at, int64_t count) {
  const Coefficients c = coefficients;  // a local: no store below can change it
  const auto [params, grads, sums] = at;
  for (int64_t i = 0; i < count; i += Vec::kLanes) {
    prefetch_ahead(at, i);
    Vec p = Vec::load(params + i);
    const Vec g = c.gradient(Vec::load(grads + i) * c.grad_factor, p);
    const Vec s = multiply_add(g, g, Vec::load(sums + i));
    p = p - c.step_size * g / (sqrt(s) + c.eps);
    p.store(params + i);
    s.store(sums + i);
  }
}

[[gnu::noinline]] void rollback(const Coefficients& coefficients,
                                const std::array<float*, kStreams>& at, int64_t count) {
  const Coefficients c = coefficients;
  const Vec zero = all(0), one = all(1);
  const auto [params, grads, sums] = at;
  for (int64_t i = 0; i < count; i += Vec::kLanes) {
    const Vec root = sqrt(Vec::load(sums + i)) + c.eps;
    Vec g = Vec::load(grads + i) * c.grad_factor;
    Vec p = Vec::load(params + i) + c.step_size * g / root;
    if (c.l2) {
      p = p / (one - c.step_size * c.weight_decay / root);
    }
    g = c.gradient(g, p);
    // Rounding may leave less than nothing of a small sum.
    const Vec s = at_least(zero, subtract_product(Vec::load(sums + i), g, g));
    p.store(params + i);
    s.store(sums + i);
  }
}

struct Step {
  Coefficients coefficients;

  template <class Streams>
  void operator()(const Streams& at, int64_t count) const {
    step(coefficients, at, count);
  }
};

struct Rollback {
  Coefficients coefficients;

  void operator()(const std::array<float*, kStreams>& at, int64_t count) const {
    rollback(coefficients, at, count);
  }
};

template <class Body>
void sweep_rows(const Rows& rows, int64_t low, int64_t high, const Body& body) {
  const auto moved = [](Stream stream, int64_t elements) {
    if (stream.data != nullptr) {
      stream.data += elements * size_of(stream.type);
    }
    return stream;
  };
  for (int64_t r = low; r < high; ++r) {
    const int64_t there = rows.indices[r] * rows.width;
    Item<kStreams> row = rows.item;
    row.streams[kParam] = moved(row.streams[kParam], there);
    row.streams[kGrad] = moved(row.streams[kGrad], r * rows.width);
    row.streams[kSum] = moved(row.streams[kSum], there);
    row.copy = moved(row.copy, there);
    sweep(row, 0, rows.width, body);
  }
}

}  // namespace

OPKILN_NAMESPACE_BEGIN

void adagrad_step(const Hyper& hyper, const Flat<kStreams>& list, int64_t low, int64_t high) {
  list.sweep(low, high, Step{Coefficients(hyper)});
}

void adagrad_rollback(const Hyper& hyper, const Flat<kStreams>& list, int64_t low, int64_t high) {
  list.sweep(low, high, Rollback{Coefficients(hyper)});
}

void adagrad_step_rows(const Hyper& hyper, const Rows& rows, int64_t low, int64_t high) {
  sweep_rows(rows, low, high, Step{Coefficients(hyper)});
}

void adagrad_rollback_rows(const Hyper& hyper, const Rows& rows, int64_t low, int64_t high) {
  sweep_rows(rows, low, high, Rollback{Coefficients(hyper)});
}

OPKILN_NAMESPACE_END
