// From torch's tensors to the kernel: every check, the threads, the registration.

#include <opkiln/host_step.h>

#include "cpu.h"

namespace {

using namespace opkiln;

using Kernel = void(const Hyper&, const Flat<kStreams>&, int64_t, int64_t);

template <Kernel* kernel>
void run(TensorList params, TensorList grads, TensorList exp_avgs, TensorList copies, double lr,
         double beta1, double beta2, double weight_decay, bool maximize, double grad_scale) {
  check_scale(grad_scale);
  if (kernel == lion_rollback && (beta2 == 0 || lr * weight_decay == 1)) {
    refuse("a step with beta2 " + shown(beta2) + " and lr * weight_decay " +
           shown(lr * weight_decay) + " cannot be rolled back");
  }
  const Hyper hyper{lr, beta1, beta2, weight_decay, maximize, grad_scale};
  const StepLists<kStreams> lists{
      {{{"params", params}, {"grads", grads}, {"exp_avgs", exp_avgs}}}, {"copies", copies}};
  parallel_over(lists.items(), [&](const Flat<kStreams>& list, int64_t low, int64_t high) {
    kernel(hyper, list, low, high);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(opkiln, CPU, m) {
  m.impl("cpu_lion_", TORCH_BOX(&run<lion_step>));
  m.impl("cpu_lion_rollback_", TORCH_BOX(&run<lion_rollback>));
}
