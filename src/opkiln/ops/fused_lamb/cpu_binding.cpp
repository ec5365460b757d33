// From torch's tensors to the kernel: every check, the threads, the registration.

#include "../multi_tensor/host.h"
#include "coefficients.h"
#include "cpu.h"

namespace {

using namespace opkiln;

// A part of a tensor that one thread sums up: the parts do not depend on the number of threads, so
// neither do the sums.
struct Part {
  std::size_t item;
  int64_t begin, end;
  Squares sums;
};

std::vector<Part> parts_of(const std::vector<Item<kStreams>>& items) {
  constexpr int64_t kPart = 64 * kBlock;
  std::vector<Part> parts;
  for (std::size_t i = 0; i < items.size(); ++i) {
    for (int64_t begin = 0; begin < items[i].numel; begin += kPart) {
      parts.push_back({i, begin, std::min(items[i].numel, begin + kPart), {}});
    }
  }
  return parts;
}

template <class Body>
void over(std::vector<Part>& parts, const Body& body) {
  const auto all = [&](int64_t low, int64_t high) {
    for (int64_t i = low; i < high; ++i) {
      body(parts[i]);
    }
  };
  torch::stable::parallel_for(0, static_cast<int64_t>(parts.size()), 1, all);
}

void step(TensorList params, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs,
          TensorList masters, TensorList steps, Tensor coefficients, double lr, double beta1,
          double beta2, double eps, double weight_decay, bool eps_inside_sqrt,
          bool bias_correction, bool maximize, double min_coeff, double max_coeff,
          OptionalTensor lr_tensor, OptionalTensor grad_scale, OptionalTensor found_inf) {
  const Lists lists{{"params", params},
                    {"grads", grads},
                    {{"exp_avgs", exp_avgs}, {"exp_avg_sqs", exp_avg_sqs}},
                    {"masters", masters},
                    {"steps", steps}};
  lists.check();
  check_coefficients(coefficients, params.size(), kCPU);
  lr = read("lr_tensor", lr_tensor, lr, /*or_double=*/true);
  const double scale = read("grad_scale", grad_scale, 1);
  const bool skip = read("found_inf", found_inf, 0) != 0;
  const std::vector<float*> counts = step_pointers(lists.steps, kCPU);
  std::vector<Item<kStreams>> items;
  std::vector<Hyper> hypers;
  for (std::size_t i = 0; i < params.size(); ++i) {
    items.push_back(host_item<kStreams>(lists, i));
    const auto made = static_cast<int64_t>(*counts[counts.size() == 1 ? 0 : i]);
    hypers.push_back({made + 1, lr, beta1, beta2, eps, weight_decay, eps_inside_sqrt,
                      bias_correction, maximize, min_coeff, max_coeff, scale});
  }
  if (skip) {
    return;
  }
  std::vector<Part> parts = parts_of(items);
  over(parts, [&](Part& part) {
    part.sums = lamb_average(hypers[part.item], items[part.item], part.begin, part.end);
  });
  std::vector<Squares> sums(items.size());
  for (const Part& part : parts) {
    sums[part.item].params += part.sums.params;
    sums[part.item].updates += part.sums.updates;
  }
  std::vector<double> trusts(items.size());
  auto* const out = static_cast<float*>(coefficients.mutable_data_ptr());
  for (std::size_t i = 0; i < items.size(); ++i) {
    trusts[i] = lamb_trust(hypers[i], sums[i]);
    out[i] = static_cast<float>(trusts[i]);
  }
  over(parts, [&](Part& part) {
    lamb_apply(hypers[part.item], trusts[part.item], items[part.item], part.begin, part.end);
  });
  for (float* made : counts) {
    *made += 1;
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(opkiln, CPU, m) {
  m.impl("fused_lamb_", TORCH_BOX(&step));
}
