// From torch's tensors to a kernel's Signs: every check, and what is returned. Both bindings are made
// of this; a Backend says where tensors must be and runs the kernels. Messages are reference.py's.
#pragma once

#include <opkiln/tensors.h>

#include "kernel.h"

OPKILN_NAMESPACE_BEGIN

namespace packing {

using packbits::Signs;

inline Signs signs_of(ScalarType type, const std::string& what) {
  switch (type) {
    case ScalarType::Float:
      return {nullptr, nullptr, 0, true, 0x3f800000u};
    case ScalarType::BFloat16:
      return {nullptr, nullptr, 0, false, 0x3f80u};
    case ScalarType::Half:
      return {nullptr, nullptr, 0, false, 0x3c00u};
    default:
      refuse(what + torch::headeronly::toString(type) + ", expected Float, BFloat16 or Half");
  }
}

inline void check_contiguous(const char* name, const Tensor& tensor) {
  if (!tensor.is_contiguous()) {
    refuse(std::string(name) + " is not contiguous");
  }
}

// For a Backend with
//   static int32_t device_of(const char* name, const Tensor&);  // checked
//   static void pack(const Signs&, int32_t device);
//   static void unpack(const Signs&, int32_t device);
template <class Backend>
struct Functions {
  static Tensor pack(Tensor x) {
    const int32_t device = Backend::device_of("x", x);
    Signs signs = signs_of(x.scalar_type(), "x has dtype ");
    check_contiguous("x", x);
    const Tensor out = torch::stable::new_empty(x, {(x.numel() + 7) / 8}, ScalarType::Byte);
    signs.elements = const_cast<void*>(x.const_data_ptr());
    signs.bytes = static_cast<uint8_t*>(out.mutable_data_ptr());
    signs.numel = x.numel();
    Backend::pack(signs, device);
    return out;
  }

  static Tensor unpack(Tensor packed, int64_t numel, ScalarType dtype) {
    const int32_t device = Backend::device_of("packed", packed);
    Signs signs = signs_of(dtype, "dtype is ");
    if (numel < 0) {
      refuse("numel is " + std::to_string(numel) + ", expected at least 0");
    }
    if (packed.scalar_type() != ScalarType::Byte) {
      refuse(std::string("packed has dtype ") +
             torch::headeronly::toString(packed.scalar_type()) + ", expected Byte");
    }
    if (packed.numel() != (numel + 7) / 8) {
      refuse("packed has " + std::to_string(packed.numel()) + " elements, expected " +
             std::to_string((numel + 7) / 8));
    }
    check_contiguous("packed", packed);
    const Tensor out = torch::stable::new_empty(packed, {numel}, dtype);
    signs.elements = out.mutable_data_ptr();
    signs.bytes = static_cast<uint8_t*>(const_cast<void*>(packed.const_data_ptr()));
    signs.numel = numel;
    Backend::unpack(signs, device);
    return out;
  }

  template <class Library>
  static void implement(Library& m) {
    m.impl("packbits", TORCH_BOX(&Functions::pack));
    m.impl("unpackbits", TORCH_BOX(&Functions::unpack));
  }
};

}  // namespace packing

OPKILN_NAMESPACE_END
