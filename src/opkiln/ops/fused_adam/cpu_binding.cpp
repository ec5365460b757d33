// From torch's tensors to the kernel of cpu_adam: every check, the threads, the registration.

#include "../cpu_adam/cpu.h"

#include <map>

#include "arguments.h"

namespace {

using namespace opkiln;

using Items = std::vector<Item<kStreams>>;

double read(const char* name, const OptionalTensor& tensor, double otherwise,
            bool or_double = false) {
  if (!tensor) {
    return otherwise;
  }
  check_number(name, *tensor, kCPU, or_double);
  const void* const at = tensor->const_data_ptr();
  return tensor->scalar_type() == ScalarType::Float ? *static_cast<const float*>(at)
                                                    : *static_cast<const double*>(at);
}

// The items, by how many steps were made before this one. Everything is checked before the first of
// them is stepped.
std::map<int64_t, Items> unpack(const Lists& lists, const std::vector<float*>& steps) {
  std::map<int64_t, Items> out;
  for (std::size_t i = 0; i < lists.params.tensors.size(); ++i) {
    const Model model(lists.params, i);
    Item<kStreams> item;
    item.numel = model.numel();
    item.streams[kParam] = model.stream(lists.params, true);
    item.streams[kGrad] = model.stream(lists.grads, false);
    item.streams[kExpAvg] = lists.exp_avg(model, i);
    item.streams[kExpAvgSq] = lists.exp_avg_sq(model, i);
    if (lists.has_master(i)) {
      item.copy = item.streams[kParam];
      item.streams[kParam] = lists.master(model, i);
    }
    item.traffic = traffic(item);
    out[static_cast<int64_t>(*steps[steps.size() == 1 ? 0 : i])].push_back(item);
  }
  return out;
}

void step(TensorList params, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs,
          TensorList masters, TensorList steps, double lr, double beta1, double beta2, double eps,
          double weight_decay, bool adamw_mode, bool bias_correction, bool maximize,
          OptionalTensor lr_tensor, OptionalTensor grad_scale, OptionalTensor found_inf) {
  const Lists lists{{"params", params},           {"grads", grads},     {"exp_avgs", exp_avgs},
                    {"exp_avg_sqs", exp_avg_sqs}, {"masters", masters}, {"steps", steps}};
  lists.check();
  lr = read("lr_tensor", lr_tensor, lr, /*or_double=*/true);
  const double scale = read("grad_scale", grad_scale, 1);
  const bool skip = read("found_inf", found_inf, 0) != 0;
  const std::vector<float*> counts = step_pointers(lists.steps, kCPU);
  std::map<int64_t, Items> parts = unpack(lists, counts);
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
