// From torch's tensors to the kernel: every check, the threads, the registration.

#include <opkiln/host_step.h>
#include <opkiln/kept_lists.h>

#include "cpu.h"

namespace {

using namespace opkiln;

using Kernel = void(const Hyper&, const Flat<kStreams>&, int64_t, int64_t);

// Parameters, states and copies: given, or kept.
struct Rest {
  const TensorList &params, &exp_avgs, &exp_avg_sqs, &copies;
};

void run(Kernel* kernel, const Rest& rest, const TensorList& grads, const Hyper& hyper) {
  check_step(hyper.step);
  check_scale(hyper.grad_scale);
  const StepLists<kStreams> lists{{{{"params", rest.params},
                                    {"grads", grads},
                                    {"exp_avgs", rest.exp_avgs},
                                    {"exp_avg_sqs", rest.exp_avg_sqs}}},
                                  {"copies", rest.copies}};
  parallel_over(lists.items(), [&](const Flat<kStreams>& list, int64_t low, int64_t high) {
    kernel(hyper, list, low, high);
  });
}

void step(TensorList params, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs,
          TensorList copies, int64_t step, double lr, double beta1, double beta2, double eps,
          double weight_decay, bool adamw_mode, bool bias_correction, bool maximize,
          double grad_scale) {
  run(adam_step, {params, exp_avgs, exp_avg_sqs, copies}, grads,
      {step, lr, beta1, beta2, eps, weight_decay, adamw_mode, bias_correction, maximize,
       grad_scale});
}

void rollback(TensorList params, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs,
              TensorList copies, int64_t step, double lr, double beta1, double beta2, double eps,
              double weight_decay, bool adamw_mode, bool bias_correction, bool maximize,
              double grad_scale) {
  if (beta1 == 0 || beta2 == 0 || (adamw_mode && lr * weight_decay == 1)) {
    refuse("a step with beta1 " + shown(beta1) + ", beta2 " + shown(beta2) +
           " and lr * weight_decay " + shown(lr * weight_decay) + " cannot be rolled back");
  }
  run(adam_rollback, {params, exp_avgs, exp_avg_sqs, copies}, grads,
      {step, lr, beta1, beta2, eps, weight_decay, adamw_mode, bias_correction, maximize,
       grad_scale});
}

Tensor keep(TensorList params, TensorList exp_avgs, TensorList exp_avg_sqs, TensorList copies) {
  return KeptLists::keep({std::move(params), std::move(exp_avgs), std::move(exp_avg_sqs),
                          std::move(copies)});
}

void kept_step(Tensor ticket, TensorList grads, int64_t step, double lr, double beta1, double beta2,
               double eps, double weight_decay, bool adamw_mode, bool bias_correction,
               bool maximize, double grad_scale) {
  const auto kept = KeptLists::of(ticket);
  run(adam_step, {(*kept)[0], (*kept)[1], (*kept)[2], (*kept)[3]}, grads,
      {step, lr, beta1, beta2, eps, weight_decay, adamw_mode, bias_correction, maximize,
       grad_scale});
}

void forget(Tensor ticket) {
  KeptLists::forget(ticket);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(opkiln, CPU, m) {
  m.impl("cpu_adam_", TORCH_BOX(&step));
  m.impl("cpu_adam_rollback_", TORCH_BOX(&rollback));
  m.impl("cpu_adam_keep", TORCH_BOX(&keep));
  m.impl("cpu_adam_kept_", TORCH_BOX(&kept_step));
  m.impl("cpu_adam_forget", TORCH_BOX(&forget));
}
