// Turns lists of tensors into Streams, with every check that keeps a kernel inside its memory.
// Messages name the argument: "grads[3] has 5 elements, params[3] has 6".
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <string>
#include <vector>

#include "streams.h"

OPKILN_NAMESPACE_BEGIN

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using TensorList = std::vector<Tensor>;

// All errors are thrown here, because the check macro's string stream is slow to compile.
[[noreturn, gnu::noinline, gnu::cold]] inline void refuse(const std::string& message) {
  STD_TORCH_CHECK(false, message);
  __builtin_unreachable();
}

// An argument of the op: its name in the schema, for messages, and its tensors.
struct Argument {
  const char* name;
  const TensorList& tensors;

  std::string at(std::size_t i) const {
    return std::string(name) + "[" + std::to_string(i) + "]";
  }
  std::string dtype(std::size_t i) const {
    return torch::headeronly::toString(tensors[i].scalar_type());
  }
};

inline void check_length(const Argument& list, const Argument& like) {
  if (list.tensors.size() != like.tensors.size()) {
    refuse(std::string(list.name) + " has " + std::to_string(list.tensors.size()) + " tensors, " +
           like.name + " has " + std::to_string(like.tensors.size()));
  }
}

// Whether the elements fill a range of memory without gaps or overlap, in any order of the dimensions:
// contiguous, transposed, channels-last.
[[gnu::cold]] inline bool is_dense(const Tensor& tensor) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  int64_t filled = 1;  // elements in the range that the dimensions found so far fill
  for (bool grown = true; grown;) {
    grown = false;
    for (std::size_t d = 0; d < sizes.size(); ++d) {
      if (sizes[d] > 1 && strides[d] == filled) {
        filled *= sizes[d];
        grown = true;
      }
    }
  }
  return filled == tensor.numel();
}

[[gnu::cold]] inline bool same_layout(const Tensor& a, const Tensor& b) {
  const auto sizes_a = a.sizes(), sizes_b = b.sizes();
  const auto strides_a = a.strides(), strides_b = b.strides();
  return std::equal(sizes_a.begin(), sizes_a.end(), sizes_b.begin(), sizes_b.end()) &&
      std::equal(strides_a.begin(), strides_a.end(), strides_b.begin(), strides_b.end());
}

// Whether a kernel can walk both together: both are contiguous, or both dense with the same strides.
[[gnu::cold]] inline bool laid_out_alike(const Tensor& a, const Tensor& b) {
  return (a.is_contiguous() && b.is_contiguous()) || (is_dense(a) && same_layout(a, b));
}

inline Type type_of(const Argument& list, std::size_t i) {
  switch (list.tensors[i].scalar_type()) {
    case ScalarType::Float:
      return Type::kFloat;
    case ScalarType::BFloat16:
      return Type::kBFloat16;
    case ScalarType::Half:
      return Type::kFloat16;
    default:
      refuse(list.at(i) + " has dtype " + list.dtype(i) + ", expected Float, BFloat16 or Half");
  }
}

constexpr int32_t kCPU = -1;  // in place of the index of a GPU

inline bool is_on(const Tensor& tensor, int32_t device) {
  return device == kCPU ? tensor.is_cpu() : tensor.is_cuda() && tensor.get_device_index() == device;
}

inline std::string name_of(int32_t device) {
  return device == kCPU ? "the CPU" : "cuda:" + std::to_string(device);
}

// A tensor that others are walked together with. It keeps the properties that are compared with each.
class Model {
 public:
  Model(const Argument& list, std::size_t i, int32_t device = kCPU)
      : list_(list),
        index_(i),
        device_(device),
        type_(type_of(list, i)),
        numel_(list.tensors[i].numel()),
        contiguous_(list.tensors[i].is_contiguous()) {}

  int64_t numel() const {
    return numel_;
  }

  // The memory of list[i]. The tensor must be on the device, have a known dtype and as many elements
  // as the model, and have the same layout (both contiguous, or both dense with the same strides).
  Stream stream(const Argument& list, bool output) const {
    const Tensor& tensor = list.tensors[index_];
    if (!is_on(tensor, device_)) {
      refuse(list.at(index_) + " is not on " + name_of(device_));
    }
    const Type type = type_of(list, index_);
    if (tensor.numel() != numel_) {
      refuse(list.at(index_) + " has " + std::to_string(tensor.numel()) + " elements, " + name() +
             " has " + std::to_string(numel_));
    }
    if (!(contiguous_ && tensor.is_contiguous())) {
      check_layout(list);
    }
    // Only the mutable accessor makes a private copy of copy-on-write memory.
    void* data = output ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr());
    return {static_cast<std::byte*>(data), type, output};
  }

  // Like stream(), for an optimizer's state: fp32 or the parameter's own type.
  Stream state(const Argument& list) const {
    const Stream out = stream(list, true);
    if (out.type != Type::kFloat && out.type != type_) {
      refuse(list.at(index_) + " has dtype " + list.dtype(index_) +
             ", expected Float or that of " + name() + ", " + list_.dtype(index_));
    }
    return out;
  }

 private:
  std::string name() const {
    return list_.at(index_);
  }

  [[gnu::cold]] void check_layout(const Argument& list) const {
    const Tensor& tensor = list.tensors[index_];
    if (!is_dense(tensor)) {
      refuse(list.at(index_) + " is not contiguous: there are gaps between its elements");
    }
    if (!same_layout(tensor, list_.tensors[index_])) {
      refuse(list.at(index_) + " and " + name() +
             " are laid out differently: make both contiguous, or give both the same strides");
    }
  }

  const Argument& list_;
  std::size_t index_;
  int32_t device_;
  Type type_;
  int64_t numel_;
  bool contiguous_;
};

// Below this much traffic, waking another thread gains nothing.
constexpr int64_t kGrainBytes = 512 * 1024;

OPKILN_NAMESPACE_END
