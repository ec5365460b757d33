// The lists of tensors of a fused optimizer, and the checks that both its bindings make.
#pragma once

#include <opkiln/tensors.h>

#include <algorithm>
#include <optional>

OPKILN_NAMESPACE_BEGIN

using OptionalTensor = std::optional<Tensor>;

struct Lists {
  Argument params, grads;
  std::vector<Argument> states;
  Argument masters, steps;

  // Checks the lengths of the lists.
  void check() const {
    check_length(grads, params);
    for (const Argument& list : states) {
      check_length(list, params);
    }
    if (!masters.tensors.empty()) {
      check_length(masters, params);
    }
    if (steps.tensors.size() != 1) {
      check_length(steps, params);
    }
  }

  // The device of the first parameter. All tensors must be on it.
  int32_t device() const {
    const Tensor& first = params.tensors.empty() ? steps.tensors[0] : params.tensors[0];
    return first.is_cuda() ? first.get_device_index() : kCPU;
  }

  bool has_master(std::size_t i) const {
    return !masters.tensors.empty() && masters.tensors[i].numel() != 0;
  }

  Stream master(const Model& model, std::size_t i) const {
    if (type_of(params, i) == Type::kFloat) {
      refuse(masters.at(i) + " is given, but " + params.at(i) +
             " has dtype Float: expected an empty tensor");
    }
    return only_float(model, masters, i);
  }

  Stream state(const Model& model, std::size_t which, std::size_t i) const {
    return only_float(model, states[which], i);
  }

 private:
  static Stream only_float(const Model& model, const Argument& list, std::size_t i) {
    const Stream stream = model.stream(list, true);
    if (stream.type != Type::kFloat) {
      refuse(list.at(i) + " has dtype " + list.dtype(i) + ", expected Float");
    }
    return stream;
  }
};

// Raises unless the tensor is one number of an expected dtype on the device.
inline void check_number(const std::string& name, const Tensor& tensor, int32_t device,
                         bool or_double = false) {
  if (!is_on(tensor, device)) {
    refuse(name + " is not on " + name_of(device));
  }
  const ScalarType type = tensor.scalar_type();
  if (type != ScalarType::Float && !(or_double && type == ScalarType::Double)) {
    refuse(name + " has dtype " + torch::headeronly::toString(type) +
           (or_double ? ", expected Float or Double" : ", expected Float"));
  }
  if (tensor.numel() != 1) {
    refuse(name + " has " + std::to_string(tensor.numel()) + " elements, expected one");
  }
}

// The addresses of the counts of steps. All must differ, or a count would be counted up twice.
inline std::vector<float*> step_pointers(const Argument& steps, int32_t device) {
  std::vector<float*> out(steps.tensors.size());
  for (std::size_t i = 0; i < out.size(); ++i) {
    check_number(steps.at(i), steps.tensors[i], device);
    out[i] = static_cast<float*>(steps.tensors[i].mutable_data_ptr());
  }
  std::vector<float*> sorted = out;
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
    refuse("steps has a tensor twice, expected one for all parameters or one for each");
  }
  return out;
}

OPKILN_NAMESPACE_END
