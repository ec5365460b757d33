// LAMB in place on host memory, in two passes. The arithmetic is reference.py's, in
// fp32 for all dtypes; narrow types are rounded once, when stored.

#include <opkiln/factor.h>
#include <opkiln/optimizing/host_lists.h>

namespace {

using namespace opkiln;

enum : size_t { kParam, kGrad, kExpAvg, kExpAvgSq, kStreams };

struct Hyper {
  int64_t step;
  double lr, beta1, beta2, eps, weight_decay;
  bool eps_inside_sqrt, bias_correction, maximize;
  double min_coeff, max_coeff, grad_scale;
};

// Sums of squares of a parameter and of its update.
struct Squares {
  double params = 0, updates = 0;
};

double correction(const Hyper& h, double beta) {
  return h.bias_correction ? 1 - __builtin_pow(beta, static_cast<double>(h.step)) : 1;
}

// The coefficients of both passes, computed in double.
struct Coefficients {
  explicit Coefficients(const Hyper& h)
      : inside(h.eps_inside_sqrt),
        grad_factor(all((h.maximize ? -1 : 1) / h.grad_scale)),
        beta1(h.beta1),
        beta2(h.beta2),
        one_minus_beta1(all(1 - h.beta1)),
        one_minus_beta2(all(1 - h.beta2)),
        average_factor(all(1 / correction(h, h.beta1))),
        root_factor(all(inside ? 1 / correction(h, h.beta2)
                               : 1 / __builtin_sqrt(correction(h, h.beta2)))),
        eps(all(h.eps)),
        weight_decay(all(h.weight_decay)) {}

  Vec update(Vec param, Vec exp_avg, Vec exp_avg_sq) const {
    const Vec root = inside ? sqrt(multiply_add(exp_avg_sq, root_factor, eps))
                            : multiply_add(sqrt(exp_avg_sq), root_factor, eps);
    return multiply_add(weight_decay, param, average_factor * exp_avg / root);
  }

  bool inside;
  Vec grad_factor;
  Factor beta1, beta2;
  Vec one_minus_beta1, one_minus_beta2, average_factor, root_factor, eps, weight_decay;
};

// A block of an item as floats. The last register of each stream is padded with zeros.
struct Block {
  alignas(64) float at[kStreams][kBlock];

  void read(const Item<kStreams>& item, size_t stream, int64_t begin, int64_t count) {
    widen(item.streams[stream], begin, count, at[stream]);
  }
  void write(const Item<kStreams>& item, size_t stream, int64_t begin, int64_t count) const {
    narrow(at[stream], item.streams[stream], begin, count);
  }
};

// Sums only `count` values: the padding may be NaN, from 0 / 0 if eps is 0.
double squares(const float* values, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    sum += static_cast<double>(values[i]) * values[i];
  }
  return sum;
}

// Computes the new averages of the elements [begin, end) of an item,
// and the sums of squares. Only reads the parameter.
Squares average(const Hyper& hyper, const Item<kStreams>& item, int64_t begin, int64_t end) {
  const Coefficients c(hyper);
  Squares sums;
  Block block;
  alignas(64) float updates[kBlock];
  for (; begin < end; begin += kBlock) {
    const int64_t count = end - begin < kBlock ? end - begin : kBlock;
    for (size_t stream = 0; stream < kStreams; ++stream) {
      block.read(item, stream, begin, count);
    }
    for (int64_t i = 0; i < count; i += Vec::kLanes) {
      const Vec p = Vec::load(block.at[kParam] + i);
      const Vec g = Vec::load(block.at[kGrad] + i) * c.grad_factor;
      Vec m = Vec::load(block.at[kExpAvg] + i);
      Vec v = Vec::load(block.at[kExpAvgSq] + i);
      m = c.beta1.times_plus(m, c.one_minus_beta1 * g);
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

// The factor for the update of a tensor with these sums.
double trust(const Hyper& hyper, const Squares& sums) {
  if (sums.params == 0 || sums.updates == 0) {
    return 1;
  }
  const double ratio = __builtin_sqrt(sums.params) / __builtin_sqrt(sums.updates);
  return ratio < hyper.min_coeff ? hyper.min_coeff
                                 : ratio > hyper.max_coeff ? hyper.max_coeff : ratio;
}

// Updates the elements [begin, end) of the parameter, from the averages after the step.
void apply(const Hyper& hyper, double trust, const Item<kStreams>& item, int64_t begin, int64_t end) {
  const Coefficients c(hyper);
  const Vec rate = all(-hyper.lr * trust);
  Block block;
  for (; begin < end; begin += kBlock) {
    const int64_t count = end - begin < kBlock ? end - begin : kBlock;
    for (const size_t stream : {kParam, kExpAvg, kExpAvgSq}) {
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

OPK_PLAIN_BEGIN

// A part of a tensor that one thread sums up. The parts do not depend
// on the number of threads, so the sums do not either.
struct Part {
  int64_t item, begin, end;
  Squares sums;
};
constexpr int64_t kPart = 64 * kBlock;

// The items and parts of a step, after every check of the lists.
struct Work {
  opk::List<float*> counts;
  opk::List<Item<kStreams>> items;
  opk::List<Hyper> hypers;  // one per item: their step counts may differ
  opk::List<Part> parts;

  Work(const Lists& lists, const Hyper& hyper)
      : counts(step_pointers(lists.steps, kHost)),
        items(host_items<kStreams>(lists)),
        hypers(items.size()) {
    int64_t count = 0;
    for (int64_t i = 0; i < items.size(); ++i) {
      hypers[i] = hyper;
      hypers[i].step = next_step(counts, i);
      count += (items[i].numel + kPart - 1) / kPart;
    }
    parts = opk::List<Part>(count);
    Part* part = parts.begin();
    for (int64_t i = 0; i < items.size(); ++i) {
      const int64_t numel = items[i].numel;
      for (int64_t begin = 0; begin < numel; begin += kPart) {
        *part++ = {i, begin, numel - begin < kPart ? numel : begin + kPart, {}};
      }
    }
  }

  template <class Body>
  void parallel_parts(const Body& body) {
    opk::parallel_for(0, parts.size(), 1, [&](int64_t low, int64_t high) {
      for (Part* part = parts.begin() + low; part < parts.begin() + high; ++part) {
        body(*part);
      }
    });
  }

  opk::List<Squares> compute_averages() {
    parallel_parts([&](Part& part) {
      part.sums = average(hypers[part.item], items[part.item], part.begin, part.end);
    });
    opk::List<Squares> sums(items.size());
    for (const Part& part : parts) {
      sums[part.item].params += part.sums.params;
      sums[part.item].updates += part.sums.updates;
    }
    return sums;
  }

  void move(const opk::List<Squares>& sums, Tensor& coefficients) {
    opk::List<double> trusts(items.size());
    float* const out = coefficients.data<float>();
    for (int64_t i = 0; i < items.size(); ++i) {
      trusts[i] = trust(hypers[i], sums[i]);
      out[i] = static_cast<float>(trusts[i]);
    }
    parallel_parts([&](Part& part) {
      apply(hypers[part.item], trusts[part.item], items[part.item], part.begin, part.end);
    });
    count_up(counts);
  }
};

void fused_lamb_(TensorList& params, const TensorList& grads, TensorList& exp_avgs,
                 TensorList& exp_avg_sqs, TensorList& masters, TensorList& steps, Tensor& coefficients,
                 double lr, double beta1, double beta2, double eps, double weight_decay,
                 bool eps_inside_sqrt, bool bias_correction, bool maximize, double min_coeff,
                 double max_coeff, const OptionalTensor& lr_tensor, const OptionalTensor& grad_scale,
                 const OptionalTensor& found_inf) {
  const Lists lists{params, grads, exp_avgs, &exp_avg_sqs, masters, steps};
  lists.check();
  check_numbers(coefficients, DType::float32, params.size(), kHost);
  const Hyper hyper{0, read_number(lr_tensor, lr, /*or_double=*/true), beta1, beta2, eps, weight_decay,
                    eps_inside_sqrt, bias_correction, maximize, min_coeff, max_coeff,
                    read_number(grad_scale, 1)};
  const bool skip = read_number(found_inf, 0) != 0;
  Work work(lists, hyper);
  if (!skip) {
    work.move(work.compute_averages(), coefficients);
  }
}

void fused_lamb_average_(const TensorList& params, const TensorList& grads, TensorList& exp_avgs,
                         TensorList& exp_avg_sqs, const TensorList& masters, const TensorList& steps,
                         Tensor& squares, double beta1, double beta2, double eps, double weight_decay,
                         bool eps_inside_sqrt, bool bias_correction, bool maximize,
                         const OptionalTensor& grad_scale, const OptionalTensor& found_inf) {
  const Lists lists{params, grads, exp_avgs, &exp_avg_sqs, masters, steps};
  lists.check();
  check_numbers(squares, DType::float64, 2 * params.size(), kHost);
  const Hyper hyper{0, 0, beta1, beta2, eps, weight_decay, eps_inside_sqrt, bias_correction,
                    maximize, 0, 0, read_number(grad_scale, 1)};
  const bool skip = read_number(found_inf, 0) != 0;
  Work work(lists, hyper);
  if (skip) {
    return;
  }
  double* out = squares.data<double>();
  for (const Squares& sums : work.compute_averages()) {
    *out++ = sums.params;
    *out++ = sums.updates;
  }
}

void fused_lamb_move_(TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
                      const TensorList& exp_avg_sqs, TensorList& masters, TensorList& steps,
                      const Tensor& squares, Tensor& coefficients, double lr, double beta1, double beta2,
                      double eps, double weight_decay, bool eps_inside_sqrt, bool bias_correction,
                      double min_coeff, double max_coeff, const OptionalTensor& lr_tensor,
                      const OptionalTensor& found_inf) {
  const Lists lists{params, grads, exp_avgs, &exp_avg_sqs, masters, steps};
  lists.check();
  check_numbers(coefficients, DType::float32, params.size(), kHost);
  check_numbers(squares, DType::float64, 2 * params.size(), kHost);
  const Hyper hyper{0, read_number(lr_tensor, lr, /*or_double=*/true), beta1, beta2, eps, weight_decay,
                    eps_inside_sqrt, bias_correction, /*maximize=*/false, min_coeff, max_coeff,
                    /*grad_scale=*/1};
  const bool skip = read_number(found_inf, 0) != 0;
  Work work(lists, hyper);
  if (skip) {
    return;
  }
  opk::List<Squares> sums(params.size());
  const double* given = squares.data<const double>();
  for (Squares& each : sums) {
    each.params = *given++;
    each.updates = *given++;
  }
  work.move(sums, coefficients);
}

OPKILN_OP(fused_lamb_, cpu);
OPKILN_OP(fused_lamb_average_, cpu);
OPKILN_OP(fused_lamb_move_, cpu);

OPK_PLAIN_END

}  // namespace
