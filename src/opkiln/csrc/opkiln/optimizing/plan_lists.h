// Turns an optimizer's lists of tensors on a GPU into a plan in the
// GPU's memory. Works for ROCm, too: torch calls its devices CUDA.
#pragma once

#include "kept_lists.h"
#include "lists.h"
#include "plan.h"
#include "status.h"

#if !defined(__CUDACC_RTC__)

OPK_PLAIN_BEGIN
namespace opkiln __attribute__((visibility("hidden"))) {

inline bool takes_fours(const Stream& stream) {  // true if the stream is absent
  return reinterpret_cast<size_t>(stream.data) % static_cast<size_t>(4 * size_of(stream.type)) == 0;
}

inline const float* number(const OptionalTensor& tensor, opk::Device device) {
  if (!tensor) {
    return nullptr;
  }
  check_number(*tensor, device);
  return tensor->data<const float>();
}

inline multi_tensor::Numbers numbers_of(opk::Device device, double lr, const OptionalTensor& lr_tensor,
                                        const OptionalTensor& grad_scale,
                                        const OptionalTensor& found_inf) {
  multi_tensor::Numbers out{lr, nullptr, nullptr, number(grad_scale, device), number(found_inf, device)};
  if (lr_tensor) {
    check_number(*lr_tensor, device, /*or_double=*/true);
    if (lr_tensor->dtype() == DType::float32) {
      out.lr_float = lr_tensor->data<const float>();
    } else {
      out.lr_double = lr_tensor->data<const double>();
    }
  }
  return out;
}

// The device of the first parameter. All tensors must be on it.
inline opk::Device gpu_of(const Lists& lists) {
  return opk::device_of(lists.params.empty() ? lists.steps[0] : lists.params[0]);
}

// The lists in the form of a plan, in host memory. The constructor makes every check.
struct HostPlan {
  opk::List<multi_tensor::Item> items;
  opk::List<uint64_t> gradients;
  opk::List<float*> steps;
  multi_tensor::Sizes sizes{0, 0, 0};
  bool plain = true;

  HostPlan(const Lists& lists, opk::Device device)
      : items(lists.params.size()),
        gradients(items.size()),
        steps(step_pointers(lists.steps, device)) {
    uint32_t chunks = 0;
    for (int64_t i = 0; i < items.size(); ++i) {
      const Model model(lists.params[i], device);
      const Stream param = model.stream(lists.params[i], true);
      const Stream grad = model.stream(lists.grads[i], false);
      const Stream master = lists.has_master(i) ? lists.master(model, i) : Stream{};
      const Stream first = model.floats(lists.exp_avgs[i]);
      const Stream second = lists.exp_avg_sqs ? model.floats((*lists.exp_avg_sqs)[i]) : Stream{};
      multi_tensor::Item& item = items[i];
      item = {};
      item.param = param.data;
      item.states[0] = first.at<float>(0);
      item.states[1] = second.at<float>(0);
      item.master = master.at<float>(0);
      item.numel = model.numel();
      item.first = chunks;
      item.step = steps.size() == 1 ? 0 : static_cast<uint32_t>(i);
      item.param_type = param.type;
      item.fours = takes_fours(param) && takes_fours(master) && takes_fours(first) && takes_fours(second);
      gradients[i] = multi_tensor::gradient(grad.data, grad.type);
      plain = plain && param.type == ElementType::kFloat && grad.type == ElementType::kFloat;
      chunks += static_cast<uint32_t>((item.numel + multi_tensor::kChunk - 1) / multi_tensor::kChunk);
    }
    sizes = {static_cast<uint32_t>(items.size()), static_cast<uint32_t>(steps.size()), chunks};
  }
};

// A plan in device memory. torch does not reuse the memory before this stream has finished with it.
struct DevicePlan {
  Tensor memory;
  multi_tensor::Plan plan;
};

inline DevicePlan write_plan(const HostPlan& host, opk::Device device) {
  const auto words = static_cast<int64_t>(multi_tensor::plan_words(host.sizes));
  DevicePlan out{opk::empty({words}, DType::int64, device), {}};
  out.plan = multi_tensor::plan_at(out.memory.data<int64_t>(), host.sizes, host.plain);
  multi_tensor::write_items(out.plan, host.items.data(), host.steps.data());
  multi_tensor::write_gradients(out.plan, host.gradients.data());
  return out;
}

inline int64_t address_of(const Tensor& tensor) {
  return reinterpret_cast<int64_t>(mutable_data(tensor));
}

// What is noted of a plan with the lists that it is for: for each item its number of elements and the
// gradient that was written last, and the address of each tensor of these lists.
struct Ledger {
  enum : int64_t { kItems, kSteps, kChunks, kPlain, kHead };

  int64_t* at;

  static opk::List<int64_t> of(const HostPlan& host, const opk::List<TensorList>& kept) {
    const multi_tensor::Sizes& sizes = host.sizes;
    const int64_t count = host.items.size();
    int64_t tensors = 0;
    for (const TensorList& list : kept) {
      tensors += list.size();
    }
    opk::List<int64_t> out(kHead + 2 * count + tensors);
    const Ledger ledger{out.begin()};
    out[kItems] = sizes.items;
    out[kSteps] = sizes.steps;
    out[kChunks] = sizes.chunks;
    out[kPlain] = 1;
    for (int64_t i = 0; i < count; ++i) {
      const multi_tensor::Item& item = host.items[i];
      out[kPlain] &= item.param_type == ElementType::kFloat;
      out[kHead + i] = item.numel;
      ledger.gradients()[i] = static_cast<int64_t>(host.gradients[i]);
    }
    int64_t* address = ledger.addresses();
    for (const TensorList& list : kept) {
      for (const Tensor& tensor : list) {
        *address++ = address_of(tensor);
      }
    }
    return out;
  }

  multi_tensor::Sizes sizes() const {
    return {static_cast<uint32_t>(at[kItems]), static_cast<uint32_t>(at[kSteps]),
            static_cast<uint32_t>(at[kChunks])};
  }
  int64_t numel(int64_t i) const {
    return at[kHead + i];
  }
  int64_t* gradients() const {
    return at + kHead + at[kItems];
  }
  int64_t* addresses() const {
    return gradients() + at[kItems];
  }

  // Whether each tensor is where it was, which an assignment to its `data` changes.
  bool holds(const opk::List<TensorList>& kept) const {
    const int64_t* address = addresses();
    for (const TensorList& list : kept) {
      for (const Tensor& tensor : list) {
        if (address_of(tensor) != *address++) {
          return false;
        }
      }
    }
    return true;
  }
};

// Returns the plan, and a ticket for the lists that it is for.
inline opk::tuple<Tensor, Tensor> make_plan(const Lists& lists) {
  lists.check();
  if (lists.steps.empty()) {
    raise_form("params is empty: there is nothing to plan");
  }
  const opk::Device device = gpu_of(lists);
  const HostPlan host(lists, device);
  opk::List<TensorList> kept{lists.params, lists.exp_avgs, lists.exp_avg_sqs ? *lists.exp_avg_sqs : TensorList(),
                             lists.masters, lists.steps};
  opk::List<int64_t> notes = Ledger::of(host, kept);
  return {write_plan(host, device).memory, KeptLists::keep(static_cast<opk::List<TensorList>&&>(kept),
                                                           static_cast<opk::List<int64_t>&&>(notes))};
}

// The gradient in the form of a plan, or 0 if it is not contiguous,
// or its size, device or dtype does not fit.
inline uint64_t planned_gradient(const Tensor& grad, int64_t numel, opk::Device device) {
  const DType dtype = grad.dtype();
  const bool known = dtype == DType::float32 || dtype == DType::bfloat16 || dtype == DType::float16;
  if (!known || grad.device() != device || grad.numel() != numel || !grad.is_contiguous()) {
    return 0;
  }
  return multi_tensor::gradient(grad.data(), opk::element_of(dtype));
}

// Raises an error that names the gradient that does not fit the plan.
// Returns if some gradients are merely not contiguous.
OPK_COLD inline void check_gradients(const TensorList& grads, const Ledger& ledger, opk::Device device) {
  bool contiguous = true;
  for (int64_t i = 0; i < grads.size(); ++i) {
    const Tensor& grad = grads[i];
    opk::check_on(grad, device);
    opk::element_of(grad);
    if (grad.numel() != ledger.numel(i)) {
      raise_form("%s has %lld elements, params[%lld] has %lld", NameOf(grad).text,
                 static_cast<long long>(grad.numel()), static_cast<long long>(i),
                 static_cast<long long>(ledger.numel(i)));
    }
    contiguous = contiguous && grad.is_contiguous();
  }
  if (contiguous) {
    raise_form("grads has a tensor that does not fit the plan");
  }
}

#if defined(OPKILN_EMULATED)
// Registers memory with the emulator that the kernels reach by addresses from an earlier call.
inline void add_tensors(const multi_tensor::Plan& plan) {
  const auto add = [](const void* at, int64_t numel, int64_t size) {
    if (at) opk::emulator::add_tensor(at, static_cast<size_t>(numel * size), static_cast<size_t>(size));
  };
  for (uint32_t i = 0; i < plan.sizes.items; ++i) {
    const multi_tensor::Item& item = plan.items[i];
    add(item.param, item.numel, size_of(item.param_type));
    for (const float* const floats : {item.states[0], item.states[1], item.master}) {
      add(floats, item.numel, 4);
    }
  }
  for (uint32_t i = 0; i < plan.sizes.steps; ++i) {
    add(plan.steps[i], 1, 4);
  }
}
#endif

// Gives a kept plan these gradients and returns it in `plan`. Otherwise nothing is written, and the status says
// why: one of the gradients is not contiguous, or a kept tensor has moved. The gradients' addresses are written
// only if they changed. The other checks that were made for the plan are not repeated.
inline int64_t replan(Tensor& memory, const Tensor& ticket, const TensorList& grads,
                      multi_tensor::Plan& plan) {
  const KeptLists::Kept kept(ticket);
  if (!kept) {
    return status::kNotKept;
  }
  const opk::Device device = memory.device();
  const Ledger ledger{kept.notes()};
  const int64_t count = ledger.at[Ledger::kItems];
  if (grads.size() != count) {
    raise_form("grads has %lld tensors, the plan has %lld", static_cast<long long>(grads.size()),
               static_cast<long long>(count));
  }
  if (memory.numel() != static_cast<int64_t>(multi_tensor::plan_words(ledger.sizes()))) {
    raise_form("plan and ticket do not belong together");
  }
  if (!ledger.holds(kept.lists())) {
    return status::kNotKept;
  }
  bool plain = ledger.at[Ledger::kPlain] != 0;
  bool changed = false;
  opk::List<uint64_t> words(count);
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t word = planned_gradient(grads[i], ledger.numel(i), device);
    if (word == 0) {
      check_gradients(grads, ledger, device);
      return status::kLayout;
    }
    words[i] = word;
    plain = plain && word >> multi_tensor::kTypeShift == 0;
    changed = changed || word != static_cast<uint64_t>(ledger.gradients()[i]);
  }
  plan = multi_tensor::plan_at(memory.data<int64_t>(), ledger.sizes(), plain);
#if defined(OPKILN_EMULATED)
  add_tensors(plan);
#endif
  if (changed) {
    multi_tensor::write_gradients(plan, words.data());
    __builtin_memcpy(ledger.gradients(), words.data(), static_cast<size_t>(count) * 8);
  }
  return status::kMade;
}

}  // namespace opkiln
OPK_PLAIN_END

#endif
