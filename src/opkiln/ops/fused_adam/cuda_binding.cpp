// From torch's tensors to the kernel: every check, the stream, the registration. Torch calls ROCm's
// devices CUDA, too, so this serves both, and it needs neither's headers.

#include <opkiln/cuda_stream.h>
#include <torch/csrc/stable/accelerator.h>

#include <cmath>

#include "arguments.h"
#include "kernel.h"

namespace {

using namespace opkiln;

fused_adam::Type kernel_type(const Stream& stream) {
  switch (stream.type) {
    case Type::kFloat:
      return fused_adam::Type::kFloat;
    case Type::kBFloat16:
      return fused_adam::Type::kBFloat16;
    case Type::kFloat16:
      return fused_adam::Type::kFloat16;
  }
  __builtin_unreachable();
}

std::vector<fused_adam::Item> unpack(const Lists& lists, const std::vector<float*>& steps,
                                     int32_t device) {
  std::vector<fused_adam::Item> items(lists.params.tensors.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    const Model model(lists.params, i, device);
    const Stream param = model.stream(lists.params, true);
    const Stream grad = model.stream(lists.grads, false);
    const Stream exp_avg = lists.exp_avg(model, i);
    const Stream exp_avg_sq = lists.exp_avg_sq(model, i);
    const Stream master = lists.has_master(i) ? lists.master(model, i) : Stream{};
    items[i] = {
        .param = param.data,
        .grad = grad.data,
        .exp_avg = exp_avg.at<float>(0),
        .exp_avg_sq = exp_avg_sq.at<float>(0),
        .master = master.at<float>(0),
        .step = steps[steps.size() == 1 ? 0 : i],
        .numel = model.numel(),
        .param_type = kernel_type(param),
        .grad_type = kernel_type(grad),
        .fours = false,
    };
  }
  return items;
}

const float* number(const char* name, const OptionalTensor& tensor, int32_t device) {
  if (!tensor) {
    return nullptr;
  }
  check_number(name, *tensor, device);
  return static_cast<const float*>(tensor->const_data_ptr());
}

void step(TensorList params, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs,
          TensorList masters, TensorList steps, double lr, double beta1, double beta2, double eps,
          double weight_decay, bool adamw_mode, bool bias_correction, bool maximize,
          OptionalTensor lr_tensor, OptionalTensor grad_scale, OptionalTensor found_inf) {
  const Lists lists{{"params", params},           {"grads", grads},     {"exp_avgs", exp_avgs},
                    {"exp_avg_sqs", exp_avg_sqs}, {"masters", masters}, {"steps", steps}};
  lists.check();
  if (steps.empty()) {
    return;
  }
  const int32_t device = lists.device();
  if (device == kCPU) {
    refuse("params[0] is not on a GPU");
  }
  fused_adam::Hyper hyper{
      .beta1 = beta1,
      .log_beta1 = std::log(beta1),
      .beta2 = beta2,
      .log_beta2 = std::log(beta2),
      .eps = eps,
      .weight_decay = weight_decay,
      .lr = lr,
      .lr_float = nullptr,
      .lr_double = nullptr,
      .grad_scale = number("grad_scale", grad_scale, device),
      .found_inf = number("found_inf", found_inf, device),
      .adamw_mode = adamw_mode,
      .bias_correction = bias_correction,
      .maximize = maximize,
  };
  if (lr_tensor) {
    check_number("lr_tensor", *lr_tensor, device, /*or_double=*/true);
    const void* const at = lr_tensor->const_data_ptr();
    if (lr_tensor->scalar_type() == ScalarType::Float) {
      hyper.lr_float = static_cast<const float*>(at);
    } else {
      hyper.lr_double = static_cast<const double*>(at);
    }
  }
  const std::vector<float*> counts = step_pointers(lists.steps, device);
  const std::vector<fused_adam::Item> items = unpack(lists, counts, device);

  const torch::stable::accelerator::DeviceGuard guard(device);
  const char* const error = fused_adam::enqueue(hyper, items.data(), items.size(), counts.data(),
                                                counts.size(), current_stream(device));
  if (error != nullptr) {
    refuse("fused_adam was not launched on " + name_of(device) + ": " + error);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(opkiln, CUDA, m) {
  m.impl("fused_adam_", TORCH_BOX(&step));
}
