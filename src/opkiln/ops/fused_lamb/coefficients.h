// The tensor that receives a number per parameter.
#pragma once

#include <opkiln/tensors.h>

OPKILN_NAMESPACE_BEGIN

inline void check_coefficients(const Tensor& tensor, std::size_t count, int32_t device) {
  if (!is_on(tensor, device)) {
    refuse("coefficients is not on " + name_of(device));
  }
  const bool fits = tensor.scalar_type() == ScalarType::Float && tensor.is_contiguous() &&
      tensor.numel() == static_cast<int64_t>(count);
  if (!fits) {
    refuse("coefficients has dtype " +
           std::string(torch::headeronly::toString(tensor.scalar_type())) + " and " +
           std::to_string(tensor.numel()) + " elements, expected Float and " +
           std::to_string(count) + ", contiguous");
  }
}

OPKILN_NAMESPACE_END
