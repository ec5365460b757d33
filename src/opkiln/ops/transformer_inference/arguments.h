// Argument checks that the families of this op share.
#pragma once

#include <opkiln/arguments.h>

#if !defined(__CUDACC_RTC__)
OPK_PLAIN_BEGIN

namespace {

using opk::Tensor;
using MaybeTensor = opk::optional<Tensor>;

// A tensor, or a contiguous copy that lives as long as this object.
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

// The same for an optional argument; `data` is null if it is None. It must
// have x's dtype and device, and x's shape or one element per column.
class OptionalInput {
 public:
  enum Form { kSame, kRow };

  OptionalInput(const Tensor& x, const MaybeTensor& other, Form form) {
    if (other.has_value()) take(x, *other, form);
  }
  OptionalInput(const Tensor& x, const Tensor& other, Form form) { take(x, other, form); }
  OptionalInput(const OptionalInput&) = delete;

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
