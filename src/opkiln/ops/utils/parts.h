// The op's arguments as stretches of bytes, with the checks that both bindings make.
#pragma once

#include <opkiln/tensors.h>

#include <algorithm>

#include "copy_parts.h"

OPKILN_NAMESPACE_BEGIN

inline void check_alike(const std::string& name, const Tensor& tensor, const Tensor& first,
                        int32_t device) {
  if (!is_on(tensor, device)) {
    refuse(name + " is not on " + name_of(device));
  }
  if (tensor.scalar_type() != first.scalar_type()) {
    refuse(name + " has dtype " + torch::headeronly::toString(tensor.scalar_type()) +
           ", expected that of tensors[0], " + torch::headeronly::toString(first.scalar_type()));
  }
}

inline int32_t device_of(const TensorList& tensors) {
  if (tensors.empty()) {
    refuse("tensors is empty, expected at least one");
  }
  return tensors[0].is_cuda() ? tensors[0].get_device_index() : kCPU;
}

inline int64_t count_checked(const Argument& list, int32_t device) {
  int64_t count = 0;
  for (std::size_t i = 0; i < list.tensors.size(); ++i) {
    check_alike(list.at(i), list.tensors[i], list.tensors[0], device);
    count += list.tensors[i].numel();
  }
  return count;
}

// A flat tensor's memory and what lies side by side in it; both keep the tensors alive.
struct Flattened {
  Tensor flat;
  TensorList kept;
  std::vector<Part> parts;

  // New memory for the elements of the list.
  static Flattened of(const TensorList& tensors, int32_t device) {
    const int64_t size[] = {count_checked({"tensors", tensors}, device)};
    Flattened out{torch::stable::new_empty(tensors[0], size), tensors, {}};
    for (Tensor& tensor : out.kept) {
      tensor = tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
    }
    auto* to = static_cast<std::byte*>(out.flat.mutable_data_ptr());
    for (const Tensor& tensor : out.kept) {
      const auto bytes = tensor.numel() * static_cast<int64_t>(tensor.element_size());
      out.parts.push_back({static_cast<const std::byte*>(tensor.const_data_ptr()), to, bytes});
      to += bytes;
    }
    return out;
  }

  // From a flat tensor to the list.
  static Flattened back(const TensorList& tensors, const Tensor& flat, int32_t device) {
    const Argument list{"tensors", tensors};
    const int64_t count = count_checked(list, device);
    check_alike("flat", flat, tensors[0], device);
    if (flat.numel() != count) {
      refuse("flat has " + std::to_string(flat.numel()) + " elements, tensors have " +
             std::to_string(count));
    }
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (!tensors[i].is_contiguous()) {
        refuse(list.at(i) + " is not contiguous");
      }
    }
    Flattened out{flat.is_contiguous() ? flat : torch::stable::contiguous(flat), tensors, {}};
    const auto* from = static_cast<const std::byte*>(out.flat.const_data_ptr());
    for (const Tensor& tensor : tensors) {
      const auto bytes = tensor.numel() * static_cast<int64_t>(tensor.element_size());
      out.parts.push_back({from, static_cast<std::byte*>(tensor.mutable_data_ptr()), bytes});
      from += bytes;
    }
    return out;
  }
};

OPKILN_NAMESPACE_END
