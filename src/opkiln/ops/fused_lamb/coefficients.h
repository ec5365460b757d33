// The tensors that have numbers per parameter.
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

// Two for each: the sums of squares of it and of its update.
inline double* check_squares(const Tensor& tensor, std::size_t count, int32_t device) {
  if (!is_on(tensor, device)) {
    refuse("squares is not on " + name_of(device));
  }
  const bool fits = tensor.scalar_type() == ScalarType::Double && tensor.is_contiguous() &&
      tensor.numel() == 2 * static_cast<int64_t>(count);
  if (!fits) {
    refuse("squares has dtype " +
           std::string(torch::headeronly::toString(tensor.scalar_type())) + " and " +
           std::to_string(tensor.numel()) + " elements, expected Double and " +
           std::to_string(2 * count) + ", contiguous");
  }
  return static_cast<double*>(tensor.mutable_data_ptr());
}

OPKILN_NAMESPACE_END
