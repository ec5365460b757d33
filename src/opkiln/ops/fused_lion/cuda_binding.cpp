// The binding of the kernel: checks, the stream and registration.

#include <opkiln/optimizing/device.h>

#include "kernel.h"

namespace {

using namespace opkiln;
using torch::stable::accelerator::DeviceGuard;

constexpr const char* kName = "fused_lion";

Lists lists_of(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
               const TensorList& masters, const TensorList& steps) {
  return {{"params", params},
          {"grads", grads},
          {{"exp_avgs", exp_avgs}},
          {"masters", masters},
          {"steps", steps}};
}

void step(TensorList params, TensorList grads, TensorList exp_avgs, TensorList masters,
          TensorList steps, double lr, double beta1, double beta2, double weight_decay,
          bool maximize, OptionalTensor lr_tensor, OptionalTensor grad_scale,
          OptionalTensor found_inf) {
  const Lists lists = lists_of(params, grads, exp_avgs, masters, steps);
  lists.check();
  if (steps.empty()) {
    return;
  }
  const int32_t device = gpu_of(lists);
  const fused_lion::Hyper hyper{beta1, beta2, weight_decay, maximize,
                                numbers_of(device, lr, lr_tensor, grad_scale, found_inf)};
  const Unpacked unpacked(lists, device);
  const DeviceGuard guard(device);
  void* const stream = current_stream(device);
  const Planned planned = write_plan(kName, lists, unpacked, device, stream);
  check_launch(kName, device, fused_lion::enqueue(hyper, planned.plan, stream));
}

std::tuple<Tensor, Tensor> plan(TensorList params, TensorList grads, TensorList exp_avgs,
                                TensorList masters, TensorList steps) {
  return make_plan(kName, lists_of(params, grads, exp_avgs, masters, steps));
}

int64_t planned_step(Tensor plan, Tensor ledger, StableListHandle grads, double lr, double beta1,
                     double beta2, double weight_decay, bool maximize, OptionalTensor lr_tensor,
                     OptionalTensor grad_scale, OptionalTensor found_inf) {
  RawList raw(grads);
  const int32_t device = plan.get_device_index();
  const fused_lion::Hyper hyper{beta1, beta2, weight_decay, maximize,
                                numbers_of(device, lr, lr_tensor, grad_scale, found_inf)};
  const DeviceGuard guard(device);
  void* const stream = current_stream(device);
  const auto here = replan(kName, plan, ledger, raw, stream);
  if (!here) {
    return status::kLayout;
  }
  check_launch(kName, device, fused_lion::enqueue(hyper, *here, stream));
  return status::kMade;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(opkiln, CUDA, m) {
  m.impl("fused_lion_", TORCH_BOX(&step));
  m.impl("fused_lion_plan", TORCH_BOX(&plan));
  m.impl("fused_lion_planned_", TORCH_BOX(&planned_step));
}
