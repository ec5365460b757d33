// Lion in place on host memory, and the inverse of a step.

#include <opkiln/optimizing/host_step.h>
#include <opkiln/optimizing/kept_lists.h>
#include <opkiln/optimizing/status.h>

#include "step.h"

namespace {

struct Undo {
  const Coefficients& coefficients;

  [[gnu::noinline]] void operator()(float* const (&at)[kStreams], int64_t count) const {
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
};

OPK_PLAIN_BEGIN

StepLists<kStreams> lists_of(const TensorList& params, const TensorList& grads,
                             const TensorList& exp_avgs, const TensorList& copies) {
  return {{{"params", params}, {"grads", grads}, {"exp_avgs", exp_avgs}}, copies};
}

void cpu_lion_(TensorList& params, const TensorList& grads, TensorList& exp_avgs, TensorList& copies,
               double lr, double beta1, double beta2, double weight_decay, bool maximize,
               double grad_scale) {
  check_scale(grad_scale);
  parallel_sweep<Step>(lists_of(params, grads, exp_avgs, copies).items(),
                       Coefficients({lr, beta1, beta2, weight_decay, maximize, grad_scale}));
}

void cpu_lion_rollback_(TensorList& params, const TensorList& grads, TensorList& exp_avgs,
                        TensorList& copies, double lr, double beta1, double beta2, double weight_decay,
                        bool maximize, double grad_scale) {
  OPK_CHECK(beta2 != 0 && lr * weight_decay != 1, "a step with beta2 ", beta2,
            " and lr * weight_decay ", lr * weight_decay, " cannot be rolled back");
  check_scale(grad_scale);
  parallel_sweep<Undo>(lists_of(params, grads, exp_avgs, copies).items(),
                       Coefficients({lr, beta1, beta2, weight_decay, maximize, grad_scale}));
}

Tensor cpu_lion_keep(const TensorList& params, const TensorList&, const TensorList& exp_avgs,
                     const TensorList& copies) {
  return KeptLists::keep({params, exp_avgs, copies});
}

int64_t cpu_lion_kept_(const Tensor& ticket, const TensorList& grads, double lr, double beta1,
                       double beta2, double weight_decay, bool maximize, double grad_scale) {
  const KeptLists::Kept kept(ticket);
  if (!kept) {
    return status::kNotKept;
  }
  check_scale(grad_scale);
  const auto items = lists_of(kept[0], grads, kept[1], kept[2]).items_if_laid_out_alike();
  if (!items) {
    return status::kLayout;
  }
  parallel_sweep<Step>(*items, Coefficients({lr, beta1, beta2, weight_decay, maximize, grad_scale}));
  return status::kMade;
}

void cpu_lion_forget(const Tensor& ticket) {
  KeptLists::forget(ticket);
}

OPKILN_OP(cpu_lion_, cpu);
OPKILN_OP(cpu_lion_rollback_, cpu);
OPKILN_OP(cpu_lion_keep, cpu);
OPKILN_OP(cpu_lion_kept_, cpu);
OPKILN_OP(cpu_lion_forget, cpu);

OPK_PLAIN_END

}  // namespace
