// Gets the memory of tensors, with every check that keeps a kernel inside it.
// Messages name the argument: "grads[3] has 5 elements, params[3] has 6".
#pragma once

#if !defined(__CUDACC_RTC__)

#include <opkiln/arguments.h>
#include <opkiln/stream.h>

OPK_PLAIN_BEGIN
namespace opkiln __attribute__((visibility("hidden"))) {

using opk::DType;
using opk::NameOf;
using opk::raise_form;
using opk::Tensor;
using opk::TensorList;
using opk::name_of;
using OptionalTensor = opk::optional<Tensor>;

[[gnu::noinline]] inline void check_length(const char* name, const TensorList& list,
                                           const TensorList& params) {
  if (__builtin_expect(list.size() != params.size(), 0)) {
    raise_form("%s has %lld tensors, params has %lld", name, static_cast<long long>(list.size()),
               static_cast<long long>(params.size()));
  }
}

// Whether the elements fill a range of memory without gaps or overlap, in any
// order of the dimensions: contiguous, transposed or channels-last.
OPK_COLD inline bool is_dense(const Tensor& tensor) {
  const opk::Ints sizes = tensor.sizes(), strides = tensor.strides();
  int64_t filled = 1;  // elements that the dimensions found so far fill without gaps
  for (bool grown = true; grown;) {
    grown = false;
    for (int64_t d = 0; d < sizes.size(); ++d) {
      if (sizes[d] > 1 && strides[d] == filled) {
        filled *= sizes[d];
        grown = true;
      }
    }
  }
  return filled == tensor.numel();
}

OPK_COLD inline bool same_layout(const Tensor& a, const Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides();
}

// Whether a kernel can walk both together: both are contiguous, or both dense with the same strides.
OPK_COLD inline bool laid_out_alike(const Tensor& a, const Tensor& b) {
  return (a.is_contiguous() && b.is_contiguous()) || (is_dense(a) && same_layout(a, b));
}

// Drops the const: a step also writes tensors that are kept between calls, which its schema cannot express.
inline void* mutable_data(const Tensor& tensor) {
  return const_cast<Tensor&>(tensor).data();
}

// The tensor that others are compared with: the parameter. It caches the properties that are compared.
class Model {
 public:
  Model(const Tensor& tensor, opk::Device device)
      : tensor_(tensor),
        device_(device),
        type_(opk::element_of(tensor)),
        numel_(tensor.numel()),
        contiguous_(tensor.is_contiguous()) {}

  int64_t numel() const {
    return numel_;
  }
  ElementType type() const {
    return type_;
  }

  // The memory of a tensor with the model's device, number of elements and layout (both contiguous, or both
  // dense with the same strides), and a dtype that kernels support.
  [[gnu::noinline]] Stream stream(const Tensor& tensor, bool output) const {
    opk::check_on(tensor, device_);
    const ElementType type = opk::element_of(tensor);
    const int64_t numel = tensor.numel();
    if (__builtin_expect(numel != numel_, 0)) {
      raise_form("%s has %lld elements, %s has %lld", NameOf(tensor).text,
                 static_cast<long long>(numel), NameOf(tensor_).text, static_cast<long long>(numel_));
    }
    if (__builtin_expect(!(contiguous_ && tensor.is_contiguous()), 0)) {
      check_layout(tensor);
    }
    // Only the mutable accessor makes a private copy of copy-on-write memory.
    void* const data = output ? mutable_data(tensor) : const_cast<void*>(tensor.data());
    return {static_cast<std::byte*>(data), type, output};
  }

  // Like stream(), for an optimizer's state: float32 or the parameter's dtype.
  Stream state(const Tensor& tensor) const {
    const Stream out = stream(tensor, true);
    if (__builtin_expect(out.type != ElementType::kFloat && out.type != type_, 0)) {
      raise_form("%s has dtype %s, expected float32 or that of %s, %s", NameOf(tensor).text,
                 name_of(tensor.dtype()), NameOf(tensor_).text, name_of(tensor_.dtype()));
    }
    return out;
  }

  // Like stream(), for tensors that must be float32.
  Stream floats(const Tensor& tensor) const {
    const Stream out = stream(tensor, true);
    if (__builtin_expect(out.type != ElementType::kFloat, 0)) {
      raise_form("%s has dtype %s, expected float32", NameOf(tensor).text, name_of(tensor.dtype()));
    }
    return out;
  }

 private:
  OPK_COLD void check_layout(const Tensor& tensor) const {
    if (!is_dense(tensor)) {
      raise_form("%s is not contiguous: there are gaps between its elements", NameOf(tensor).text);
    }
    if (!same_layout(tensor, tensor_)) {
      raise_form("%s and %s are laid out differently: make both contiguous, or give both the same strides",
                 NameOf(tensor).text, NameOf(tensor_).text);
    }
  }

  const Tensor& tensor_;
  opk::Device device_;
  ElementType type_;
  int64_t numel_;
  bool contiguous_;
};

}  // namespace opkiln
OPK_PLAIN_END

#endif
