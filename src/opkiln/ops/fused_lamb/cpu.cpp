// LAMB in place on host memory, in two passes. The arithmetic is that of reference.py, in fp32
// whatever the tensors' types; narrow types are rounded once, when stored.

#include "cpu.h"

#include <opkiln/factor.h>

namespace {

using namespace opkiln;

double correction(const Hyper& h, double beta) {
  return h.bias_correction ? 1 - std::pow(beta, static_cast<double>(h.step)) : 1;
}

// What both passes need of the hyperparameters, worked out in double.
struct Coefficients {
  explicit Coefficients(const Hyper& h)
      : inside(h.eps_inside_sqrt),
        grad_factor(all((h.maximize ? -1 : 1) / h.grad_scale)),
        beta2(h.beta2),
        one_minus_beta1(all(1 - h.beta1)),
        one_minus_beta2(all(1 - h.beta2)),
        average_factor(all(1 / correction(h, h.beta1))),
        root_factor(all(inside ? 1 / correction(h, h.beta2)
                               : 1 / std::sqrt(correction(h, h.beta2)))),
        eps(all(h.eps)),
        weight_decay(all(h.weight_decay)) {}

  Vec update(Vec param, Vec exp_avg, Vec exp_avg_sq) const {
    const Vec root = inside ? sqrt(multiply_add(exp_avg_sq, root_factor, eps))
                            : multiply_add(sqrt(exp_avg_sq), root_factor, eps);
    return multiply_add(weight_decay, param, average_factor * exp_avg / root);
  }

  bool inside;
  Vec grad_factor;
  Factor beta2;
  Vec one_minus_beta1, one_minus_beta2, average_factor, root_factor, eps, weight_decay;
};

// A block of an item as floats, each stream's last register padded with zeros.
struct Block {
  alignas(64) float at[kStreams][kBlock];

  void read(const Item<kStreams>& item, std::size_t stream, int64_t begin, int64_t count) {
    widen(item.streams[stream], begin, count, at[stream]);
  }
  void write(const Item<kStreams>& item, std::size_t stream, int64_t begin, int64_t count) const {
    narrow(at[stream], item.streams[stream], begin, count);
  }
};

// Padding may be anything here: 0 / 0 where eps is 0.
double squares(const float* values, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    sum += static_cast<double>(values[i]) * values[i];
  }
  return sum;
}

}  // namespace

OPKILN_NAMESPACE_BEGIN

Squares lamb_average(const Hyper& hyper, const Item<kStreams>& item, int64_t begin, int64_t end) {
  const Coefficients c(hyper);
  Squares sums;
  Block block;
  alignas(64) float updates[kBlock];
  for (; begin < end; begin += kBlock) {
    const int64_t count = std::min(end - begin, kBlock);
    for (std::size_t stream = 0; stream < kStreams; ++stream) {
      block.read(item, stream, begin, count);
    }
    for (int64_t i = 0; i < count; i += Vec::kLanes) {
      const Vec p = Vec::load(block.at[kParam] + i);
      const Vec g = Vec::load(block.at[kGrad] + i) * c.grad_factor;
      Vec m = Vec::load(block.at[kExpAvg] + i);
      Vec v = Vec::load(block.at[kExpAvgSq] + i);
      m = multiply_add(c.one_minus_beta1, g - m, m);
      v = c.beta2.times_plus(v, c.one_minus_beta2 * g * g);
      c.update(p, m, v).store(updates + i);
      m.store(block.at[kExpAvg] + i);
      v.store(block.at[kExpAvgSq] + i);
    }
    block.write(item, kExpAvg, begin, count);
    block.write(item, kExpAvgSq, begin, count);
    sums.params += squares(block.at[kParam], count);
    sums.updates += squares(updates, count);
  }
  return sums;
}

double lamb_trust(const Hyper& hyper, const Squares& sums) {
  if (sums.params == 0 || sums.updates == 0) {
    return 1;
  }
  const double ratio = std::sqrt(sums.params) / std::sqrt(sums.updates);
  return ratio < hyper.min_coeff ? hyper.min_coeff
                                 : ratio > hyper.max_coeff ? hyper.max_coeff : ratio;
}

void lamb_apply(const Hyper& hyper, double trust, const Item<kStreams>& item, int64_t begin,
                int64_t end) {
  const Coefficients c(hyper);
  const Vec rate = all(-hyper.lr * trust);
  Block block;
  for (; begin < end; begin += kBlock) {
    const int64_t count = std::min(end - begin, kBlock);
    for (const std::size_t stream : {kParam, kExpAvg, kExpAvgSq}) {
      block.read(item, stream, begin, count);
    }
    for (int64_t i = 0; i < count; i += Vec::kLanes) {
      const Vec p = Vec::load(block.at[kParam] + i);
      const Vec m = Vec::load(block.at[kExpAvg] + i);
      const Vec v = Vec::load(block.at[kExpAvgSq] + i);
      multiply_add(rate, c.update(p, m, v), p).store(block.at[kParam] + i);
    }
    block.write(item, kParam, begin, count);
    if (item.copy.data != nullptr) {
      narrow(block.at[kParam], item.copy, begin, count);
    }
  }
}

OPKILN_NAMESPACE_END
