// From torch's tensors to the kernel of cpu_lion: every check, the threads, the registration.

#include "../cpu_lion/cpu.h"

#include <opkiln/optimizing/host.h>

namespace {

using namespace opkiln;

void step(TensorList params, TensorList grads, TensorList exp_avgs, TensorList masters,
          TensorList steps, double lr, double beta1, double beta2, double weight_decay,
          bool maximize, OptionalTensor lr_tensor, OptionalTensor grad_scale,
          OptionalTensor found_inf) {
  const Lists lists{{"params", params},
                    {"grads", grads},
                    {{"exp_avgs", exp_avgs}},
                    {"masters", masters},
                    {"steps", steps}};
  lists.check();
  lr = read("lr_tensor", lr_tensor, lr, /*or_double=*/true);
  const double scale = read("grad_scale", grad_scale, 1);
  const bool skip = read("found_inf", found_inf, 0) != 0;
  const std::vector<float*> counts = step_pointers(lists.steps, kCPU);
  std::vector<Item<kStreams>> items;
  for (std::size_t i = 0; i < params.size(); ++i) {
    items.push_back(host_item<kStreams>(lists, i));
  }
  if (skip) {
    return;
  }
  const Hyper hyper{lr, beta1, beta2, weight_decay, maximize, scale};
  parallel_over(std::move(items), [&](const Flat<kStreams>& list, int64_t low, int64_t high) {
    lion_step(hyper, list, low, high);
  });
  for (float* made : counts) {
    *made += 1;
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(opkiln, CPU, m) {
  m.impl("fused_lion_", TORCH_BOX(&step));
}
