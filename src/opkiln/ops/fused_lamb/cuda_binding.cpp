// The binding of the kernels: checks, the stream and registration.

#include <opkiln/optimizing/device.h>

#include <cmath>

#include "coefficients.h"
#include "kernel.h"

namespace {

using namespace opkiln;
using torch::stable::accelerator::DeviceGuard;

constexpr const char* kName = "fused_lamb";

Lists lists_of(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
               const TensorList& exp_avg_sqs, const TensorList& masters, const TensorList& steps) {
  return {{"params", params},
          {"grads", grads},
          {{"exp_avgs", exp_avgs}, {"exp_avg_sqs", exp_avg_sqs}},
          {"masters", masters},
          {"steps", steps}};
}

fused_lamb::Hyper hyper_of(double beta1, double beta2, double eps, double weight_decay,
                           bool eps_inside_sqrt, bool bias_correction, bool maximize,
                           double min_coeff, double max_coeff,
                           const multi_tensor::Numbers& numbers) {
  return {.beta1 = beta1,
          .log_beta1 = std::log(beta1),
          .beta2 = beta2,
          .log_beta2 = std::log(beta2),
          .eps = eps,
          .weight_decay = weight_decay,
          .min_coeff = min_coeff,
          .max_coeff = max_coeff,
          .eps_inside_sqrt = eps_inside_sqrt,
          .bias_correction = bias_correction,
          .maximize = maximize,
          .numbers = numbers};
}

// Memory for a step's sums, which torch keeps from others until this stream is done with it.
Tensor room_for_sums(const multi_tensor::Plan& plan, const Tensor& like) {
  const auto words = static_cast<int64_t>(fused_lamb::sum_words(plan.sizes));
  return torch::stable::new_empty(like, {words}, ScalarType::Long);
}

void enqueue(const fused_lamb::Hyper& hyper, const multi_tensor::Plan& plan,
             const Tensor& coefficients, int32_t device, void* stream) {
  const Tensor sums = room_for_sums(plan, coefficients);
  check_launch(kName, device,
               fused_lamb::enqueue(hyper, plan, sums.mutable_data_ptr(),
                                   static_cast<float*>(coefficients.mutable_data_ptr()), stream));
}

void step(TensorList params, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs,
          TensorList masters, TensorList steps, Tensor coefficients, double lr, double beta1,
          double beta2, double eps, double weight_decay, bool eps_inside_sqrt,
          bool bias_correction, bool maximize, double min_coeff, double max_coeff,
          OptionalTensor lr_tensor, OptionalTensor grad_scale, OptionalTensor found_inf) {
  const Lists lists = lists_of(params, grads, exp_avgs, exp_avg_sqs, masters, steps);
  lists.check();
  if (steps.empty()) {
    return;
  }
  const int32_t device = gpu_of(lists);
  check_coefficients(coefficients, params.size(), device);
  const fused_lamb::Hyper hyper =
      hyper_of(beta1, beta2, eps, weight_decay, eps_inside_sqrt, bias_correction, maximize,
               min_coeff, max_coeff, numbers_of(device, lr, lr_tensor, grad_scale, found_inf));
  const Unpacked unpacked(lists, device);
  const DeviceGuard guard(device);
  void* const stream = current_stream(device);
  const Planned planned = write_plan(kName, lists, unpacked, device, stream);
  enqueue(hyper, planned.plan, coefficients, device, stream);
}

void average(TensorList params, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs,
             TensorList masters, TensorList steps, Tensor squares, double beta1, double beta2,
             double eps, double weight_decay, bool eps_inside_sqrt, bool bias_correction,
             bool maximize, OptionalTensor grad_scale, OptionalTensor found_inf) {
  const Lists lists = lists_of(params, grads, exp_avgs, exp_avg_sqs, masters, steps);
  lists.check();
  if (steps.empty()) {
    return;
  }
  const int32_t device = gpu_of(lists);
  double* const out = check_squares(squares, params.size(), device);
  const fused_lamb::Hyper hyper =
      hyper_of(beta1, beta2, eps, weight_decay, eps_inside_sqrt, bias_correction, maximize, 0, 0,
               numbers_of(device, 0, {}, grad_scale, found_inf));
  const Unpacked unpacked(lists, device);
  const DeviceGuard guard(device);
  void* const stream = current_stream(device);
  const Planned planned = write_plan(kName, lists, unpacked, device, stream);
  const Tensor sums = room_for_sums(planned.plan, squares);
  check_launch(kName, device,
               fused_lamb::enqueue_average(hyper, planned.plan, sums.mutable_data_ptr(), out,
                                           stream));
}

void move(TensorList params, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs,
          TensorList masters, TensorList steps, Tensor squares, Tensor coefficients, double lr,
          double beta1, double beta2, double eps, double weight_decay, bool eps_inside_sqrt,
          bool bias_correction, double min_coeff, double max_coeff, OptionalTensor lr_tensor,
          OptionalTensor found_inf) {
  const Lists lists = lists_of(params, grads, exp_avgs, exp_avg_sqs, masters, steps);
  lists.check();
  if (steps.empty()) {
    return;
  }
  const int32_t device = gpu_of(lists);
  check_coefficients(coefficients, params.size(), device);
  const double* const given = check_squares(squares, params.size(), device);
  const fused_lamb::Hyper hyper =
      hyper_of(beta1, beta2, eps, weight_decay, eps_inside_sqrt, bias_correction,
               /*maximize=*/false, min_coeff, max_coeff,
               numbers_of(device, lr, lr_tensor, {}, found_inf));
  const Unpacked unpacked(lists, device);
  const DeviceGuard guard(device);
  void* const stream = current_stream(device);
  const Planned planned = write_plan(kName, lists, unpacked, device, stream);
  check_launch(kName, device,
               fused_lamb::enqueue_move(hyper, planned.plan, given,
                                        static_cast<float*>(coefficients.mutable_data_ptr()),
                                        stream));
}

std::tuple<Tensor, Tensor> plan(TensorList params, TensorList grads, TensorList exp_avgs,
                                TensorList exp_avg_sqs, TensorList masters, TensorList steps) {
  return make_plan(kName, lists_of(params, grads, exp_avgs, exp_avg_sqs, masters, steps));
}

int64_t planned_step(Tensor plan, Tensor ledger, StableListHandle grads, Tensor coefficients,
                     double lr, double beta1, double beta2, double eps, double weight_decay,
                     bool eps_inside_sqrt, bool bias_correction, bool maximize, double min_coeff,
                     double max_coeff, OptionalTensor lr_tensor, OptionalTensor grad_scale,
                     OptionalTensor found_inf) {
  RawList raw(grads);
  const int32_t device = plan.get_device_index();
  check_coefficients(coefficients, raw.size(), device);
  const fused_lamb::Hyper hyper =
      hyper_of(beta1, beta2, eps, weight_decay, eps_inside_sqrt, bias_correction, maximize,
               min_coeff, max_coeff, numbers_of(device, lr, lr_tensor, grad_scale, found_inf));
  const DeviceGuard guard(device);
  void* const stream = current_stream(device);
  const auto here = replan(kName, plan, ledger, raw, stream);
  if (!here) {
    return status::kLayout;
  }
  enqueue(hyper, *here, coefficients, device, stream);
  return status::kMade;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(opkiln, CUDA, m) {
  m.impl("fused_lamb_", TORCH_BOX(&step));
  m.impl("fused_lamb_average_", TORCH_BOX(&average));
  m.impl("fused_lamb_move_", TORCH_BOX(&move));
  m.impl("fused_lamb_plan", TORCH_BOX(&plan));
  m.impl("fused_lamb_planned_", TORCH_BOX(&planned_step));
}
