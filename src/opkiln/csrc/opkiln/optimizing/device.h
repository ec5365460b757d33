// Turns an optimizer's lists of tensors on a GPU into a plan in the GPU's memory. torch also calls
// ROCm's devices CUDA, so this works for both. It needs the headers of neither.
#pragma once

#include <opkiln/cuda_stream.h>
#include <torch/csrc/stable/accelerator.h>

#include <tuple>
#include <utility>

#include "lists.h"
#include "plan.h"
#include "status.h"

OPKILN_NAMESPACE_BEGIN

inline bool takes_fours(const Stream& stream) {  // also true for an absent one
  return reinterpret_cast<std::size_t>(stream.data) % (4 * size_of(stream.type)) == 0;
}

inline const float* number(const char* name, const OptionalTensor& tensor, int32_t device) {
  if (!tensor) {
    return nullptr;
  }
  check_number(name, *tensor, device);
  return static_cast<const float*>(tensor->const_data_ptr());
}

inline multi_tensor::Numbers numbers_of(int32_t device, double lr, const OptionalTensor& lr_tensor,
                                        const OptionalTensor& grad_scale,
                                        const OptionalTensor& found_inf) {
  multi_tensor::Numbers out{lr, nullptr, nullptr, number("grad_scale", grad_scale, device),
                            number("found_inf", found_inf, device)};
  if (lr_tensor) {
    check_number("lr_tensor", *lr_tensor, device, /*or_double=*/true);
    const void* const at = lr_tensor->const_data_ptr();
    if (lr_tensor->scalar_type() == ScalarType::Float) {
      out.lr_float = static_cast<const float*>(at);
    } else {
      out.lr_double = static_cast<const double*>(at);
    }
  }
  return out;
}

// The lists in the form of a plan, still in host memory. Every check is made here.
struct Unpacked {
  std::vector<multi_tensor::Item> items;
  std::vector<uint64_t> gradients;
  std::vector<float*> steps;
  multi_tensor::Sizes sizes{0, 0, 0};
  bool plain = true;

  Unpacked(const Lists& lists, int32_t device)
      : items(lists.params.tensors.size()),
        gradients(items.size()),
        steps(step_pointers(lists.steps, device)) {
    uint32_t chunks = 0;
    for (std::size_t i = 0; i < items.size(); ++i) {
      const Model model(lists.params, i, device);
      const Stream param = model.stream(lists.params, true);
      const Stream grad = model.stream(lists.grads, false);
      const Stream master = lists.has_master(i) ? lists.master(model, i) : Stream{};
      multi_tensor::Item& item = items[i];
      item = {};
      item.param = param.data;
      item.master = master.at<float>(0);
      item.numel = model.numel();
      item.first = chunks;
      item.step = steps.size() == 1 ? 0 : static_cast<uint32_t>(i);
      item.param_type = param.type;
      item.fours = takes_fours(param) && takes_fours(master);
      for (std::size_t s = 0; s < lists.states.size(); ++s) {
        const Stream state = lists.state(model, s, i);
        item.states[s] = state.at<float>(0);
        item.fours = item.fours && takes_fours(state);
      }
      gradients[i] = multi_tensor::gradient(grad.data, grad.type);
      plain = plain && param.type == Type::kFloat && grad.type == Type::kFloat;
      chunks += static_cast<uint32_t>((item.numel + multi_tensor::kChunk - 1) / multi_tensor::kChunk);
    }
    sizes = {static_cast<uint32_t>(items.size()), static_cast<uint32_t>(steps.size()), chunks};
  }
};

// Raises CUDA's error for a launch that failed.
inline void check_launch(const char* op, int32_t device, const char* error) {
  if (error != nullptr) {
    refuse(std::string(op) + " was not launched on " + name_of(device) + ": " + error);
  }
}

inline int32_t gpu_of(const Lists& lists) {
  const int32_t device = lists.device();
  if (device == kCPU) {
    refuse("params[0] is not on a GPU");
  }
  return device;
}

// The plan of the lists. torch does not reuse its memory before this stream has finished with it.
struct Planned {
  Tensor memory;
  multi_tensor::Plan plan;
};

inline Planned write_plan(const char* op, const Lists& lists, const Unpacked& unpacked,
                          int32_t device, void* stream) {
  const Tensor& like = lists.steps.tensors[0];
  const auto words = static_cast<int64_t>(multi_tensor::plan_words(unpacked.sizes));
  Planned out{torch::stable::new_empty(like, {words}, ScalarType::Long), {}};
  out.plan = multi_tensor::plan_at(out.memory.mutable_data_ptr(), unpacked.sizes, unpacked.plain);
  check_launch(op, device, multi_tensor::write_items(out.plan, unpacked.items.data(),
                                                     unpacked.steps.data(), stream));
  check_launch(op, device,
               multi_tensor::write_gradients(out.plan, unpacked.gradients.data(), stream));
  return out;
}

// The data, in int64, that the host needs about a plan that outlives the call. Each item has its number
// of elements and the gradient that was written last.
struct Ledger {
  enum : int64_t { kItems, kSteps, kChunks, kPlain, kHead };

  int64_t* at;

  static Tensor of(const Unpacked& unpacked) {
    const multi_tensor::Sizes& sizes = unpacked.sizes;
    const auto count = static_cast<int64_t>(unpacked.items.size());
    Tensor out = torch::stable::empty({kHead + 2 * count}, ScalarType::Long);
    auto* const at = static_cast<int64_t*>(out.mutable_data_ptr());
    at[kItems] = sizes.items;
    at[kSteps] = sizes.steps;
    at[kChunks] = sizes.chunks;
    at[kPlain] = 1;
    for (int64_t i = 0; i < count; ++i) {
      const multi_tensor::Item& item = unpacked.items[i];
      at[kPlain] &= item.param_type == ElementType::kFloat;
      at[kHead + i] = item.numel;
      at[kHead + count + i] = static_cast<int64_t>(unpacked.gradients[i]);
    }
    return out;
  }

  explicit Ledger(const Tensor& tensor) {
    if (!tensor.is_cpu() || tensor.scalar_type() != ScalarType::Long || tensor.numel() < kHead ||
        !tensor.is_contiguous()) {
      refuse("ledger does not come from a plan");
    }
    at = static_cast<int64_t*>(tensor.mutable_data_ptr());
    if (tensor.numel() != kHead + 2 * at[kItems]) {
      refuse("ledger does not come from a plan");
    }
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
};

// The plan and its ledger, for a binding to return.
inline std::tuple<Tensor, Tensor> make_plan(const char* op, const Lists& lists) {
  lists.check();
  if (lists.steps.tensors.empty()) {
    refuse("params is empty: there is nothing to plan");
  }
  const int32_t device = gpu_of(lists);
  const Unpacked unpacked(lists, device);
  const torch::stable::accelerator::DeviceGuard guard(device);
  return {write_plan(op, lists, unpacked, device, current_stream(device)).memory,
          Ledger::of(unpacked)};
}

// The tensors of a list, as torch's C interface passes them. As Tensors they would cost 50% more,
// because each allocates a reference counter.
class RawList {
 public:
  explicit RawList(StableListHandle list) {
    std::size_t size = 0;
    bool failed = torch_list_size(list, &size) != 0;
    handles_.reserve(size);
    for (std::size_t i = 0; i < size && !failed; ++i) {
      StableIValue element;
      failed = torch_list_get_item(list, i, &element) != 0;
      if (!failed) {
        handles_.push_back(torch::stable::detail::to<AtenTensorHandle>(element));
      }
    }
    if (torch_delete_list(list) != 0 || failed) {
      refuse("torch did not pass a list of tensors");
    }
  }
  RawList(const RawList&) = delete;
  RawList& operator=(const RawList&) = delete;
  ~RawList() {
    for (AtenTensorHandle handle : handles_) {
      aoti_torch_delete_tensor_object(handle);
    }
  }

  int64_t size() const {
    return static_cast<int64_t>(handles_.size());
  }

  AtenTensorHandle operator[](int64_t i) const {
    return handles_[i];
  }

  // The same as Tensors. This list is empty afterwards.
  TensorList taken() {
    TensorList out;
    for (AtenTensorHandle handle : std::exchange(handles_, {})) {
      out.emplace_back(handle);
    }
    return out;
  }

 private:
  std::vector<AtenTensorHandle> handles_;
};

// The gradient in the form of a plan. It is 0 if the gradient is not contiguous, or has another size,
// another device or an unknown type.
inline uint64_t planned_gradient(AtenTensorHandle grad, int64_t numel, int32_t device) {
  static const int32_t cuda = aoti_torch_device_type_cuda();
  static const int32_t types[] = {aoti_torch_dtype_float32(), aoti_torch_dtype_bfloat16(),
                                  aoti_torch_dtype_float16()};
  static_assert(static_cast<int>(ElementType::kBFloat16) == 1 &&
                static_cast<int>(ElementType::kFloat16) == 2);
  int64_t found = 0;
  int32_t kind = 0, index = 0, dtype = 0;
  bool contiguous = false;
  const void* data = nullptr;
  const bool known = aoti_torch_get_device_type(grad, &kind) == 0 && kind == cuda &&
      aoti_torch_get_device_index(grad, &index) == 0 && index == device &&
      aoti_torch_get_numel(grad, &found) == 0 && found == numel &&
      aoti_torch_get_dtype(grad, &dtype) == 0 &&
      aoti_torch_is_contiguous(grad, &contiguous) == 0 && contiguous &&
      torch_get_const_data_ptr(grad, &data) == 0;
  for (int type = 0; known && type < 3; ++type) {
    if (dtype == types[type]) {
      // A gradient without elements has no address, but it fits.
      return data == nullptr ? multi_tensor::kAddress
                             : multi_tensor::gradient(data, static_cast<ElementType>(type));
    }
  }
  return 0;
}

// Raises an error that names the gradient that does not fit the plan. Returns if the only problem is
// that some are not contiguous.
[[gnu::cold]] inline void check_gradients(const Argument& grads, const Ledger& ledger,
                                          int32_t device) {
  bool contiguous = true;
  for (std::size_t i = 0; i < grads.tensors.size(); ++i) {
    const Tensor& grad = grads.tensors[i];
    if (!is_on(grad, device)) {
      refuse(grads.at(i) + " is not on " + name_of(device));
    }
    type_of(grads, i);
    if (grad.numel() != ledger.numel(i)) {
      refuse(grads.at(i) + " has " + std::to_string(grad.numel()) + " elements, params[" +
             std::to_string(i) + "] has " + std::to_string(ledger.numel(i)));
    }
    contiguous = contiguous && grad.is_contiguous();
  }
  if (contiguous) {
    refuse("grads has a tensor that does not fit the plan");
  }
}

// A kept plan with these gradients in it. Their addresses are written only if they changed. The checks
// that were made for the plan are not repeated. If a gradient is not contiguous, returns nothing and
// writes nothing.
inline std::optional<multi_tensor::Plan> replan(const char* op, const Tensor& memory,
                                                const Tensor& ledger_tensor, RawList& grads,
                                                void* stream) {
  const int32_t device = memory.get_device_index();
  const Ledger ledger(ledger_tensor);
  const auto count = ledger.at[Ledger::kItems];
  if (grads.size() != count) {
    refuse("grads has " + std::to_string(grads.size()) + " tensors, the plan has " +
           std::to_string(count));
  }
  if (memory.numel() != static_cast<int64_t>(multi_tensor::plan_words(ledger.sizes()))) {
    refuse("plan and ledger do not belong together");
  }
  bool plain = ledger.at[Ledger::kPlain] != 0;
  bool changed = false;
  std::vector<uint64_t> words(count);
  for (int64_t i = 0; i < count; ++i) {
    words[i] = planned_gradient(grads[i], ledger.numel(i), device);
    if (words[i] == 0) {
      const TensorList tensors = grads.taken();
      check_gradients({"grads", tensors}, ledger, device);
      return std::nullopt;
    }
    plain = plain && words[i] >> multi_tensor::kTypeShift == 0;
    changed = changed || words[i] != static_cast<uint64_t>(ledger.gradients()[i]);
  }
  const multi_tensor::Plan plan =
      multi_tensor::plan_at(memory.mutable_data_ptr(), ledger.sizes(), plain);
  if (changed) {
    check_launch(op, device, multi_tensor::write_gradients(plan, words.data(), stream));
    std::copy(words.begin(), words.end(), ledger.gradients());
  }
  return plan;
}

OPKILN_NAMESPACE_END
