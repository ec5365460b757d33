// Adam and AdamW in place on host memory, and the inverse of a step.

#include <opkiln/optimizing/host_step.h>
#include <opkiln/optimizing/kept_lists.h>
#include <opkiln/optimizing/status.h>

#include "step.h"

namespace {

struct Undo {
  const Coefficients& coefficients;

  [[gnu::noinline]] void operator()(float* const (&at)[kStreams], int64_t count) const {
    const Coefficients c = coefficients;
    const Vec kept = all(c.kept), beta1 = all(c.beta1), beta2 = all(c.beta2), zero = all(0);
    const auto [params, grads, exp_avgs, exp_avg_sqs] = at;
    for (int64_t i = 0; i < count; i += Vec::kLanes) {
      Vec m = Vec::load(exp_avgs + i);
      Vec v = Vec::load(exp_avg_sqs + i);
      const Vec p = (Vec::load(params + i) - c.change(m, v)) / kept;
      const Vec g = c.gradient(Vec::load(grads + i), p);
      m = subtract_product(m, c.one_minus_beta1, g) / beta1;
      // Rounding can make a small average negative.
      v = at_least(zero, subtract_product(v, c.one_minus_beta2 * g, g) / beta2);
      p.store(params + i);
      m.store(exp_avgs + i);
      v.store(exp_avg_sqs + i);
    }
  }
};

OPK_PLAIN_BEGIN

StepLists<kStreams> lists_of(const TensorList& params, const TensorList& grads,
                             const TensorList& exp_avgs, const TensorList& exp_avg_sqs,
                             const TensorList& copies) {
  return {{{"params", params}, {"grads", grads}, {"exp_avgs", exp_avgs}, {"exp_avg_sqs", exp_avg_sqs}},
          copies};
}

Hyper hyper_of(int64_t step, double lr, double beta1, double beta2, double eps, double weight_decay,
               bool adamw_mode, bool bias_correction, bool maximize, double grad_scale) {
  check_step(step);
  check_scale(grad_scale);
  return {step, lr, beta1, beta2, eps, weight_decay, adamw_mode, bias_correction, maximize, grad_scale};
}

void cpu_adam_(TensorList& params, const TensorList& grads, TensorList& exp_avgs,
               TensorList& exp_avg_sqs, TensorList& copies, int64_t step, double lr, double beta1,
               double beta2, double eps, double weight_decay, bool adamw_mode, bool bias_correction,
               bool maximize, double grad_scale) {
  const Hyper hyper = hyper_of(step, lr, beta1, beta2, eps, weight_decay, adamw_mode, bias_correction,
                               maximize, grad_scale);
  parallel_sweep<Step>(lists_of(params, grads, exp_avgs, exp_avg_sqs, copies).items(), Coefficients(hyper));
}

void cpu_adam_rollback_(TensorList& params, const TensorList& grads, TensorList& exp_avgs,
                        TensorList& exp_avg_sqs, TensorList& copies, int64_t step, double lr,
                        double beta1, double beta2, double eps, double weight_decay, bool adamw_mode,
                        bool bias_correction, bool maximize, double grad_scale) {
  OPK_CHECK(beta1 != 0 && beta2 != 0 && !(adamw_mode && lr * weight_decay == 1), "a step with beta1 ",
            beta1, ", beta2 ", beta2, " and lr * weight_decay ", lr * weight_decay,
            " cannot be rolled back");
  const Hyper hyper = hyper_of(step, lr, beta1, beta2, eps, weight_decay, adamw_mode, bias_correction,
                               maximize, grad_scale);
  parallel_sweep<Undo>(lists_of(params, grads, exp_avgs, exp_avg_sqs, copies).items(), Coefficients(hyper));
}

Tensor cpu_adam_keep(const TensorList& params, const TensorList&, const TensorList& exp_avgs,
                     const TensorList& exp_avg_sqs, const TensorList& copies) {
  return KeptLists::keep({params, exp_avgs, exp_avg_sqs, copies});
}

int64_t cpu_adam_kept_(const Tensor& ticket, const TensorList& grads, int64_t step, double lr,
                       double beta1, double beta2, double eps, double weight_decay, bool adamw_mode,
                       bool bias_correction, bool maximize, double grad_scale) {
  const KeptLists::Kept kept(ticket);
  if (!kept) {
    return status::kNotKept;
  }
  const Hyper hyper = hyper_of(step, lr, beta1, beta2, eps, weight_decay, adamw_mode, bias_correction,
                               maximize, grad_scale);
  const auto items = lists_of(kept[0], grads, kept[1], kept[2], kept[3]).items_if_laid_out_alike();
  if (!items) {
    return status::kLayout;
  }
  parallel_sweep<Step>(*items, Coefficients(hyper));
  return status::kMade;
}

void cpu_adam_forget(const Tensor& ticket) {
  KeptLists::forget(ticket);
}

OPKILN_OP(cpu_adam_, cpu);
OPKILN_OP(cpu_adam_rollback_, cpu);
OPKILN_OP(cpu_adam_keep, cpu);
OPKILN_OP(cpu_adam_kept_, cpu);
OPKILN_OP(cpu_adam_forget, cpu);

OPK_PLAIN_END

}  // namespace
