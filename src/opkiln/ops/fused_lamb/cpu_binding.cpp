// From torch's tensors to the kernel: every check, the threads, the registration.

#include <opkiln/optimizing/host.h>
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

Lists lists_of(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
               const TensorList& exp_avg_sqs, const TensorList& masters, const TensorList& steps) {
  return {{"params", params},
          {"grads", grads},
          {{"exp_avgs", exp_avgs}, {"exp_avg_sqs", exp_avg_sqs}},
          {"masters", masters},
          {"steps", steps}};
}

// What is to be done, after every check of the lists.
struct Work {
  std::vector<float*> counts;
  std::vector<Item<kStreams>> items;
  std::vector<Hyper> hypers;  // one per item; their steps are others where the counts are
  std::vector<Part> parts;

  Work(const Lists& lists, const Hyper& hyper) : counts(step_pointers(lists.steps, kCPU)) {
    for (std::size_t i = 0; i < lists.params.tensors.size(); ++i) {
      items.push_back(host_item<kStreams>(lists, i));
      hypers.push_back(hyper);
      hypers[i].step = static_cast<int64_t>(*counts[counts.size() == 1 ? 0 : i]) + 1;
    }
    parts = parts_of(items);
  }

  std::vector<Squares> average() {
    over(parts, [&](Part& part) {
      part.sums = lamb_average(hypers[part.item], items[part.item], part.begin, part.end);
    });
    std::vector<Squares> sums(items.size());
    for (const Part& part : parts) {
      sums[part.item].params += part.sums.params;
      sums[part.item].updates += part.sums.updates;
    }
    return sums;
  }

  void move(const std::vector<Squares>& sums, const Tensor& coefficients) {
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
};

void step(TensorList params, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs,
          TensorList masters, TensorList steps, Tensor coefficients, double lr, double beta1,
          double beta2, double eps, double weight_decay, bool eps_inside_sqrt,
          bool bias_correction, bool maximize, double min_coeff, double max_coeff,
          OptionalTensor lr_tensor, OptionalTensor grad_scale, OptionalTensor found_inf) {
  const Lists lists = lists_of(params, grads, exp_avgs, exp_avg_sqs, masters, steps);
  lists.check();
  check_coefficients(coefficients, params.size(), kCPU);
  const Hyper hyper{0, read("lr_tensor", lr_tensor, lr, /*or_double=*/true), beta1, beta2, eps,
                    weight_decay, eps_inside_sqrt, bias_correction, maximize, min_coeff, max_coeff,
                    read("grad_scale", grad_scale, 1)};
  const bool skip = read("found_inf", found_inf, 0) != 0;
  Work work(lists, hyper);
  if (!skip) {
    work.move(work.average(), coefficients);
  }
}

void average(TensorList params, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs,
             TensorList masters, TensorList steps, Tensor squares, double beta1, double beta2,
             double eps, double weight_decay, bool eps_inside_sqrt, bool bias_correction,
             bool maximize, OptionalTensor grad_scale, OptionalTensor found_inf) {
  const Lists lists = lists_of(params, grads, exp_avgs, exp_avg_sqs, masters, steps);
  lists.check();
  double* const out = check_squares(squares, params.size(), kCPU);
  const Hyper hyper{0, 0, beta1, beta2, eps, weight_decay, eps_inside_sqrt, bias_correction,
                    maximize, 0, 0, read("grad_scale", grad_scale, 1)};
  const bool skip = read("found_inf", found_inf, 0) != 0;
  Work work(lists, hyper);
  if (skip) {
    return;
  }
  const std::vector<Squares> sums = work.average();
  for (std::size_t i = 0; i < sums.size(); ++i) {
    out[2 * i] = sums[i].params;
    out[2 * i + 1] = sums[i].updates;
  }
}

void move(TensorList params, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs,
          TensorList masters, TensorList steps, Tensor squares, Tensor coefficients, double lr,
          double beta1, double beta2, double eps, double weight_decay, bool eps_inside_sqrt,
          bool bias_correction, double min_coeff, double max_coeff, OptionalTensor lr_tensor,
          OptionalTensor found_inf) {
  const Lists lists = lists_of(params, grads, exp_avgs, exp_avg_sqs, masters, steps);
  lists.check();
  check_coefficients(coefficients, params.size(), kCPU);
  const double* const given = check_squares(squares, params.size(), kCPU);
  const Hyper hyper{0, read("lr_tensor", lr_tensor, lr, /*or_double=*/true), beta1, beta2, eps,
                    weight_decay, eps_inside_sqrt, bias_correction, /*maximize=*/false, min_coeff,
                    max_coeff, /*grad_scale=*/1};
  const bool skip = read("found_inf", found_inf, 0) != 0;
  Work work(lists, hyper);
  if (skip) {
    return;
  }
  std::vector<Squares> sums(params.size());
  for (std::size_t i = 0; i < sums.size(); ++i) {
    sums[i] = {given[2 * i], given[2 * i + 1]};
  }
  work.move(sums, coefficients);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(opkiln, CPU, m) {
  m.impl("fused_lamb_", TORCH_BOX(&step));
  m.impl("fused_lamb_average_", TORCH_BOX(&average));
  m.impl("fused_lamb_move_", TORCH_BOX(&move));
}
