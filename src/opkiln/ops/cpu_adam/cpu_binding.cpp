// From torch's tensors to the kernel: every check, the threads, the registration.

#include <opkiln/host_step.h>

#include "cpu.h"

namespace {

using namespace opkiln;

using Kernel = void(const Hyper&, const Flat<kStreams>&, int64_t, int64_t);

template <Kernel* kernel>
void run(TensorList params, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs,
         TensorList copies, int64_t step, double lr, double beta1, double beta2, double eps,
         double weight_decay, bool adamw_mode, bool bias_correction, bool maximize,
         double grad_scale) {
  check_step(step);
  check_scale(grad_scale);
  if (kernel == adam_rollback && (beta1 == 0 || beta2 == 0 || (adamw_mode && lr * weight_decay == 1))) {
    refuse("a step with beta1 " + shown(beta1) + ", beta2 " + shown(beta2) +
           " and lr * weight_decay " + shown(lr * weight_decay) + " cannot be rolled back");
  }
  const Hyper hyper{step, lr, beta1, beta2, eps, weight_decay, adamw_mode,
                    bias_correction, maximize, grad_scale};
  const StepLists<kStreams> lists{{{{"params", params},
                                    {"grads", grads},
                                    {"exp_avgs", exp_avgs},
                                    {"exp_avg_sqs", exp_avg_sqs}}},
                                  {"copies", copies}};
  parallel_over(lists.items(), [&](const Flat<kStreams>& list, int64_t low, int64_t high) {
    kernel(hyper, list, low, high);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(opkiln, CPU, m) {
  m.impl("cpu_adam_", TORCH_BOX(&run<adam_step>));
  m.impl("cpu_adam_rollback_", TORCH_BOX(&run<adam_rollback>));
}
