// Checks of arguments that the families of this op share.
#pragma once

#include <opkiln/arguments.h>

#if !defined(__CUDACC_RTC__)
OPK_PLAIN_BEGIN

namespace {

using opk::Tensor;
using MaybeTensor = opk::optional<Tensor>;

// A tensor, or a contiguous copy of it, which lives as long as this.
class Contiguous {
 public:
  explicit Contiguous(const Tensor& tensor) : used_(&tensor) {
    if (!tensor.is_contiguous()) {
      copy_ = opk::contiguous(tensor);
      used_ = &copy_;
    }
  }
  Contiguous(const Contiguous&) = delete;

  const Tensor& operator*() const { return *used_; }
  const void* data() const { return used_->data(); }

 private:
  Tensor copy_;
  const Tensor* used_;
};

// The same of an argument that may be None: then `data` is null. It has the dtype of `x`, is on its
// device, and has its shape, or an element for each of its columns.
class Beside {
 public:
  enum Form { kSame, kRow };

  Beside(const Tensor& x, const MaybeTensor& other, Form form) {
    if (other.has_value()) take(x, *other, form);
  }
  Beside(const Tensor& x, const Tensor& other, Form form) { take(x, other, form); }
  Beside(const Beside&) = delete;

  const void* data() const { return data_; }

 private:
  void take(const Tensor& x, const Tensor& other, Form form) {
    opk::check_same_dtype(x, other);
    opk::check_same_device(x, other);
    if (form == kSame) {
      opk::check_same_shape(x, other);
    } else {
      opk::check_shape(other, {x.size(-1)});
    }
    if (!other.is_contiguous()) copy_ = opk::contiguous(other);
    data_ = (other.is_contiguous() ? other : const_cast<const Tensor&>(copy_)).data();
  }

  Tensor copy_;
  const void* data_ = nullptr;
};

inline bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

}  // namespace

OPK_PLAIN_END
#endif
