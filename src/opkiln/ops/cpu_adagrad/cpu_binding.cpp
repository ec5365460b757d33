// The binding of the kernel: checks, threads and registration.

#include <opkiln/optimizing/host_step.h>
#include <opkiln/optimizing/kept_lists.h>
#include <opkiln/optimizing/status.h>

#include "cpu.h"

namespace {

using namespace opkiln;

using Kernel = void(const Hyper&, const Flat<kStreams>&, int64_t, int64_t);
using RowsKernel = void(const Hyper&, const Rows&, int64_t, int64_t);

// All lists but the gradients: passed in the call, or kept.
struct Rest {
  const TensorList &params, &sums, &copies;
};

StepLists<kStreams> lists_of(const Rest& rest, const TensorList& grads) {
  return {{{{"params", rest.params}, {"grads", grads}, {"sums", rest.sums}}},
          {"copies", rest.copies}};
}

void check(const Hyper& hyper) {
  check_step(hyper.step);
  check_scale(hyper.grad_scale);
}

void run(Kernel* kernel, const Hyper& hyper, std::vector<Item<kStreams>> items) {
  parallel_over(std::move(items), [&](const Flat<kStreams>& list, int64_t low, int64_t high) {
    kernel(hyper, list, low, high);
  });
}

template <Kernel* kernel>
void run_given(TensorList params, TensorList grads, TensorList sums, TensorList copies,
               int64_t step, double lr, double lr_decay, double eps, double weight_decay,
               bool maximize, double grad_scale) {
  const Hyper hyper{step, lr, lr_decay, eps, weight_decay, maximize, grad_scale};
  check(hyper);
  run(kernel, hyper, lists_of({params, sums, copies}, grads).items());
}

Tensor keep(TensorList params, TensorList sums, TensorList copies) {
  return KeptLists::keep({std::move(params), std::move(sums), std::move(copies)});
}

int64_t kept_step(Tensor ticket, TensorList grads, int64_t step, double lr, double lr_decay,
                  double eps, double weight_decay, bool maximize, double grad_scale) {
  const auto kept = KeptLists::find(ticket);
  if (kept == nullptr) {
    return status::kNotKept;
  }
  const Hyper hyper{step, lr, lr_decay, eps, weight_decay, maximize, grad_scale};
  check(hyper);
  auto items = lists_of({(*kept)[0], (*kept)[1], (*kept)[2]}, grads).items_if_laid_out_alike();
  if (!items) {
    return status::kLayout;
  }
  run(adagrad_step, hyper, std::move(*items));
  return status::kMade;
}

void forget(Tensor ticket) {
  KeptLists::forget(ticket);
}

void check_contiguous(const Argument& list, std::size_t i) {
  if (!list.tensors[i].is_contiguous()) {
    refuse(list.at(i) + " is not contiguous");
  }
}

// The memory of list[i], which has its parameter's size and is laid out in rows.
Stream whole_rows(const Argument& list, const Model& model, std::size_t i, bool state = false) {
  const Stream out = state ? model.state(list) : model.stream(list, true);
  check_contiguous(list, i);
  return out;
}

// Indices of `rows` rows, none of them named twice or beyond the last.
const int64_t* checked_indices(const Argument& indices, std::size_t i, int64_t rows) {
  const Tensor& tensor = indices.tensors[i];
  if (!tensor.is_cpu()) {
    refuse(indices.at(i) + " is not on the CPU");
  }
  if (tensor.scalar_type() != ScalarType::Long) {
    refuse(indices.at(i) + " has dtype " + indices.dtype(i) + ", expected Long");
  }
  check_contiguous(indices, i);
  const auto* const at = static_cast<const int64_t*>(tensor.const_data_ptr());
  for (int64_t r = 0; rows != 0 && r < tensor.numel(); ++r) {
    if (at[r] < 0 || at[r] >= rows) {
      refuse(indices.at(i) + " names row " + std::to_string(at[r]) + " of " +
             std::to_string(rows));
    }
    if (r > 0 && at[r] <= at[r - 1]) {
      refuse(indices.at(i) + " is not in ascending order without duplicates");
    }
  }
  return at;
}

Rows rows_at(const Argument& params, const Argument& indices, const Argument& values,
             const Argument& sums, const Argument& copies, std::size_t i) {
  const Model param(params, i), value(values, i);
  Rows out;
  out.item.streams[kParam] = whole_rows(params, param, i);
  out.item.streams[kGrad] = value.stream(values, false);
  check_contiguous(values, i);
  out.item.streams[kSum] = whole_rows(sums, param, i, /*state=*/true);
  if (!copies.tensors.empty()) {
    out.item.copy = whole_rows(copies, param, i);
  }
  out.item.numel = value.numel();
  out.item.traffic = traffic(out.item);
  out.count = indices.tensors[i].numel();
  out.width = out.count == 0 ? 0 : value.numel() / out.count;
  if (out.width * out.count != value.numel() ||
      (out.width != 0 && param.numel() % out.width != 0)) {
    refuse(values.at(i) + " has " + std::to_string(value.numel()) + " elements, which are not " +
           std::to_string(out.count) + " rows of " + params.at(i));
  }
  out.indices = checked_indices(indices, i, out.width == 0 ? 0 : param.numel() / out.width);
  return out;
}

template <RowsKernel* kernel>
void run_rows(TensorList params, TensorList indices, TensorList values, TensorList sums,
              TensorList copies, int64_t step, double lr, double lr_decay, double eps,
              bool maximize, double grad_scale) {
  const Hyper hyper{step, lr, lr_decay, eps, 0, maximize, grad_scale};
  check(hyper);
  const Argument param{"params", params}, index{"indices", indices}, value{"values", values},
      sum{"sums", sums}, copy{"copies", copies};
  for (const Argument* list : {&index, &value, &sum}) {
    check_length(*list, param);
  }
  if (!copies.empty()) {
    check_length(copy, param);
  }
  std::vector<Rows> all;
  all.reserve(params.size());
  for (std::size_t i = 0; i < params.size(); ++i) {
    all.push_back(rows_at(param, index, value, sum, copy, i));
  }
  for (const Rows& rows : all) {
    if (rows.width == 0) {
      continue;
    }
    const int64_t grain = kGrainBytes / (rows.width * rows.item.traffic) + 1;
    torch::stable::parallel_for(0, rows.count, grain, [&](int64_t low, int64_t high) {
      kernel(hyper, rows, low, high);
    });
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(opkiln, CPU, m) {
  m.impl("cpu_adagrad_", TORCH_BOX(&run_given<adagrad_step>));
  m.impl("cpu_adagrad_rollback_", TORCH_BOX(&run_given<adagrad_rollback>));
  m.impl("cpu_adagrad_keep", TORCH_BOX(&keep));
  m.impl("cpu_adagrad_kept_", TORCH_BOX(&kept_step));
  m.impl("cpu_adagrad_forget", TORCH_BOX(&forget));
  m.impl("cpu_adagrad_rows_", TORCH_BOX(&run_rows<adagrad_step_rows>));
  m.impl("cpu_adagrad_rows_rollback_", TORCH_BOX(&run_rows<adagrad_rollback_rows>));
}
