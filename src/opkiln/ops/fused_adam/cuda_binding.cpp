// The binding of the kernel: checks, the stream and registration.

#include <opkiln/optimizing/device.h>

#include <cmath>

#include "kernel.h"

namespace {

using namespace opkiln;
using torch::stable::accelerator::DeviceGuard;

constexpr const char* kName = "fused_adam";

Lists lists_of(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
               const TensorList& exp_avg_sqs, const TensorList& masters, const TensorList& steps) {
  return {{"params", params},
          {"grads", grads},
          {{"exp_avgs", exp_avgs}, {"exp_avg_sqs", exp_avg_sqs}},
          {"masters", masters},
          {"steps", steps}};
}

fused_adam::Hyper hyper_of(double beta1, double beta2, double eps, double weight_decay,
                           bool adamw_mode, bool bias_correction, bool maximize,
                           const multi_tensor::Numbers& numbers) {
  return {.beta1 = beta1,
          .log_beta1 = std::log(beta1),
          .beta2 = beta2,
          .log_beta2 = std::log(beta2),
          .eps = eps,
          .weight_decay = weight_decay,
          .adamw_mode = adamw_mode,
          .bias_correction = bias_correction,
          .maximize = maximize,
          .numbers = numbers};
}

void step(TensorList params, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs,
          TensorList masters, TensorList steps, double lr, double beta1, double beta2, double eps,
          double weight_decay, bool adamw_mode, bool bias_correction, bool maximize,
          OptionalTensor lr_tensor, OptionalTensor grad_scale, OptionalTensor found_inf) {
  const Lists lists = lists_of(params, grads, exp_avgs, exp_avg_sqs, masters, steps);
  lists.check();
  if (steps.empty()) {
    return;
  }
  const int32_t device = gpu_of(lists);
  const fused_adam::Hyper hyper =
      hyper_of(beta1, beta2, eps, weight_decay, adamw_mode, bias_correction, maximize,
               numbers_of(device, lr, lr_tensor, grad_scale, found_inf));
  const Unpacked unpacked(lists, device);
  const DeviceGuard guard(device);
  void* const stream = current_stream(device);
  const Planned planned = write_plan(kName, lists, unpacked, device, stream);
  check_launch(kName, device, fused_adam::enqueue(hyper, planned.plan, stream));
}

std::tuple<Tensor, Tensor> plan(TensorList params, TensorList grads, TensorList exp_avgs,
                                TensorList exp_avg_sqs, TensorList masters, TensorList steps) {
  return make_plan(kName, lists_of(params, grads, exp_avgs, exp_avg_sqs, masters, steps));
}

int64_t planned_step(Tensor plan, Tensor ledger, StableListHandle grads, double lr, double beta1,
                     double beta2, double eps, double weight_decay, bool adamw_mode,
                     bool bias_correction, bool maximize, OptionalTensor lr_tensor,
                     OptionalTensor grad_scale, OptionalTensor found_inf) {
  RawList raw(grads);
  const int32_t device = plan.get_device_index();
  const fused_adam::Hyper hyper =
      hyper_of(beta1, beta2, eps, weight_decay, adamw_mode, bias_correction, maximize,
               numbers_of(device, lr, lr_tensor, grad_scale, found_inf));
  const DeviceGuard guard(device);
  void* const stream = current_stream(device);
  const auto here = replan(kName, plan, ledger, raw, stream);
  if (!here) {
    return status::kLayout;
  }
  check_launch(kName, device, fused_adam::enqueue(hyper, *here, stream));
  return status::kMade;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(opkiln, CUDA, m) {
  m.impl("fused_adam_", TORCH_BOX(&step));
  m.impl("fused_adam_plan", TORCH_BOX(&plan));
  m.impl("fused_adam_planned_", TORCH_BOX(&planned_step));
}
