// From torch's tensors to the kernel of cpu_adam: every check, the threads, the registration.

#include "../cpu_adam/cpu.h"

#include <opkiln/optimizing/host.h>

namespace {

using namespace opkiln;

void step(TensorList params, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs,
          TensorList masters, TensorList steps, double lr, double beta1, double beta2, double eps,
          double weight_decay, bool adamw_mode, bool bias_correction, bool maximize,
          OptionalTensor lr_tensor, OptionalTensor grad_scale, OptionalTensor found_inf) {
  const Lists lists{{"params", params},
                    {"grads", grads},
                    {{"exp_avgs", exp_avgs}, {"exp_avg_sqs", exp_avg_sqs}},
                    {"masters", masters},
                    {"steps", steps}};
  lists.check();
  lr = read("lr_tensor", lr_tensor, lr, /*or_double=*/true);
  const double scale = read("grad_scale", grad_scale, 1);
  const bool skip = read("found_inf", found_inf, 0) != 0;
  const std::vector<float*> counts = step_pointers(lists.steps, kCPU);
  auto parts = host_items<kStreams>(lists, counts);
  if (skip) {
    return;
  }
  for (auto& [steps_made, items] : parts) {
    const Hyper hyper{steps_made + 1, lr, beta1, beta2, eps, weight_decay, adamw_mode,
                      bias_correction, maximize, scale};
    parallel_over(std::move(items), [&](const Flat<kStreams>& list, int64_t low, int64_t high) {
      adam_step(hyper, list, low, high);
    });
  }
  for (float* made : counts) {
    *made += 1;
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(opkiln, CPU, m) {
  m.impl("fused_adam_", TORCH_BOX(&step));
}
