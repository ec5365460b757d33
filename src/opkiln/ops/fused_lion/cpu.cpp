// Lion on host memory, with the kernel of cpu_lion.

#include "../cpu_lion/step.h"

#include <opkiln/optimizing/host_lists.h>

namespace {

OPK_PLAIN_BEGIN

void fused_lion_(TensorList& params, const TensorList& grads, TensorList& exp_avgs, TensorList& masters,
                 TensorList& steps, double lr, double beta1, double beta2, double weight_decay,
                 bool maximize, const OptionalTensor& lr_tensor, const OptionalTensor& grad_scale,
                 const OptionalTensor& found_inf) {
  const Lists lists{params, grads, exp_avgs, nullptr, masters, steps};
  lists.check();
  const Hyper hyper{read_number(lr_tensor, lr, /*or_double=*/true), beta1, beta2, weight_decay, maximize,
                    read_number(grad_scale, 1)};
  const bool skip = read_number(found_inf, 0) != 0;
  const opk::List<float*> counts = step_pointers(steps, kHost);
  const auto items = host_items<kStreams>(lists);
  if (skip) {
    return;
  }
  parallel_sweep<Step>(items, Coefficients(hyper));
  count_up(counts);
}

OPKILN_OP(fused_lion_, cpu);

OPK_PLAIN_END

}  // namespace
