// From torch's tensors to the kernel: every check, the threads, the registration.

#include <opkiln/tensors.h>

#include <cstdio>

#include "cpu.h"

namespace {

using namespace opkiln;

// Every check of the tensors is made here, before anything is written.
std::vector<Item<kStreams>> unpack(const TensorList& params, const TensorList& grads,
                                   const TensorList& exp_avgs, const TensorList& exp_avg_sqs,
                                   const TensorList& copies) {
  const Argument param{"params", params}, grad{"grads", grads}, exp_avg{"exp_avgs", exp_avgs},
      exp_avg_sq{"exp_avg_sqs", exp_avg_sqs}, copy{"copies", copies};
  check_length(grad, param);
  check_length(exp_avg, param);
  check_length(exp_avg_sq, param);
  if (!copies.empty()) {
    check_length(copy, param);
  }
  std::vector<Item<kStreams>> items(params.size());
  for (std::size_t i = 0; i < params.size(); ++i) {
    const Model model(param, i);
    Item<kStreams>& item = items[i];
    item.numel = model.numel();
    item.streams[kParam] = model.stream(param, true);
    item.streams[kGrad] = model.stream(grad, false);
    item.streams[kExpAvg] = model.state(exp_avg);
    item.streams[kExpAvgSq] = model.state(exp_avg_sq);
    if (!copies.empty()) {
      item.copy = model.stream(copy, true);
    }
    item.traffic = traffic(item);
  }
  return items;
}

std::string shown(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", value);
  return text;
}

using Kernel = void(const Hyper&, const Flat<kStreams>&, int64_t, int64_t);

template <Kernel* kernel>
void run(TensorList params, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs,
         TensorList copies, int64_t step, double lr, double beta1, double beta2, double eps,
         double weight_decay, bool adamw_mode, bool bias_correction, bool maximize,
         double grad_scale) {
  if (step < 1) {
    refuse("step is " + std::to_string(step) + ", expected at least 1");
  }
  if (grad_scale == 0) {
    refuse("grad_scale is 0, expected a divisor");
  }
  if (kernel == adam_rollback && (beta1 == 0 || beta2 == 0 || (adamw_mode && lr * weight_decay == 1))) {
    refuse("a step with beta1 " + shown(beta1) + ", beta2 " + shown(beta2) +
           " and lr * weight_decay " + shown(lr * weight_decay) + " cannot be rolled back");
  }
  const Hyper hyper{step, lr, beta1, beta2, eps, weight_decay, adamw_mode,
                    bias_correction, maximize, grad_scale};
  parallel_over(unpack(params, grads, exp_avgs, exp_avg_sqs, copies),
                [&](const Flat<kStreams>& list, int64_t low, int64_t high) {
                  kernel(hyper, list, low, high);
                });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(opkiln, CPU, m) {
  m.impl("cpu_adam_", TORCH_BOX(&run<adam_step>));
  m.impl("cpu_adam_rollback_", TORCH_BOX(&run<adam_rollback>));
}
