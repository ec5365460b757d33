// The binding of the kernel: checks, threads and registration.

#include <opkiln/optimizing/host_step.h>
#include <opkiln/optimizing/kept_lists.h>
#include <opkiln/optimizing/status.h>

#include "cpu.h"

namespace {

using namespace opkiln;

using Kernel = void(const Hyper&, const Flat<kStreams>&, int64_t, int64_t);

// All lists but the gradients: passed in the call, or kept.
struct Rest {
  const TensorList &params, &exp_avgs, &copies;
};

StepLists<kStreams> lists_of(const Rest& rest, const TensorList& grads) {
  return {{{{"params", rest.params}, {"grads", grads}, {"exp_avgs", rest.exp_avgs}}},
          {"copies", rest.copies}};
}

void run(Kernel* kernel, const Hyper& hyper, std::vector<Item<kStreams>> items) {
  parallel_over(std::move(items), [&](const Flat<kStreams>& list, int64_t low, int64_t high) {
    kernel(hyper, list, low, high);
  });
}

void run_given(Kernel* kernel, const Rest& rest, const TensorList& grads, const Hyper& hyper) {
  check_scale(hyper.grad_scale);
  run(kernel, hyper, lists_of(rest, grads).items());
}

void step(TensorList params, TensorList grads, TensorList exp_avgs, TensorList copies, double lr,
          double beta1, double beta2, double weight_decay, bool maximize, double grad_scale) {
  run_given(lion_step, {params, exp_avgs, copies}, grads,
      {lr, beta1, beta2, weight_decay, maximize, grad_scale});
}

void rollback(TensorList params, TensorList grads, TensorList exp_avgs, TensorList copies,
              double lr, double beta1, double beta2, double weight_decay, bool maximize,
              double grad_scale) {
  if (beta2 == 0 || lr * weight_decay == 1) {
    refuse("a step with beta2 " + shown(beta2) + " and lr * weight_decay " +
           shown(lr * weight_decay) + " cannot be rolled back");
  }
  run_given(lion_rollback, {params, exp_avgs, copies}, grads,
      {lr, beta1, beta2, weight_decay, maximize, grad_scale});
}

Tensor keep(TensorList params, TensorList exp_avgs, TensorList copies) {
  return KeptLists::keep({std::move(params), std::move(exp_avgs), std::move(copies)});
}

int64_t kept_step(Tensor ticket, TensorList grads, double lr, double beta1, double beta2,
                  double weight_decay, bool maximize, double grad_scale) {
  const auto kept = KeptLists::find(ticket);
  if (kept == nullptr) {
    return status::kNotKept;
  }
  check_scale(grad_scale);
  auto items = lists_of({(*kept)[0], (*kept)[1], (*kept)[2]}, grads).items_if_laid_out_alike();
  if (!items) {
    return status::kLayout;
  }
  run(lion_step, {lr, beta1, beta2, weight_decay, maximize, grad_scale}, std::move(*items));
  return status::kMade;
}

void forget(Tensor ticket) {
  KeptLists::forget(ticket);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(opkiln, CPU, m) {
  m.impl("cpu_lion_", TORCH_BOX(&step));
  m.impl("cpu_lion_rollback_", TORCH_BOX(&rollback));
  m.impl("cpu_lion_keep", TORCH_BOX(&keep));
  m.impl("cpu_lion_kept_", TORCH_BOX(&kept_step));
  m.impl("cpu_lion_forget", TORCH_BOX(&forget));
}
