// Adam and AdamW on host memory, with the kernel of cpu_adam.

#include "../cpu_adam/step.h"

#include <opkiln/optimizing/host_lists.h>

namespace {

OPK_PLAIN_BEGIN

void fused_adam_(TensorList& params, const TensorList& grads, TensorList& exp_avgs,
                 TensorList& exp_avg_sqs, TensorList& masters, TensorList& steps, double lr, double beta1,
                 double beta2, double eps, double weight_decay, bool adamw_mode, bool bias_correction,
                 bool maximize, const OptionalTensor& lr_tensor, const OptionalTensor& grad_scale,
                 const OptionalTensor& found_inf) {
  const Lists lists{params, grads, exp_avgs, &exp_avg_sqs, masters, steps};
  lists.check();
  Hyper hyper{0, read_number(lr_tensor, lr, /*or_double=*/true), beta1, beta2, eps, weight_decay, adamw_mode,
              bias_correction, maximize, read_number(grad_scale, 1)};
  const bool skip = read_number(found_inf, 0) != 0;
  const opk::List<float*> counts = step_pointers(steps, kHost);
  const auto items = host_items<kStreams>(lists);
  if (skip) {
    return;
  }
  // One per step count. Neighbouring counts are mostly equal, so the last result is reused.
  opk::List<Coefficients> each(counts.size());
  for (int64_t i = 0; i < each.size(); ++i) {
    const int64_t step = next_step(counts, i);
    each[i] = i > 0 && step == hyper.step ? each[i - 1] : (hyper.step = step, Coefficients(hyper));
  }
  parallel_sweep(items, [&](int64_t i) { return Step{each[each.size() == 1 ? 0 : i]}; });
  count_up(counts);
}

OPKILN_OP(fused_adam_, cpu);

OPK_PLAIN_END

}  // namespace
