// The op's arguments as both bindings take them, and the checks that both make.
#pragma once

#include <opkiln/tensors.h>

#include <optional>
#include <tuple>

#include "number.h"

OPKILN_NAMESPACE_BEGIN

using OptionalTensor = std::optional<Tensor>;
using Sizes = std::vector<int64_t>;

inline std::string shown(ScalarType type) {
  return torch::headeronly::toString(type);
}

inline void check_device(const char* name, const Tensor& tensor, int32_t device) {
  if (!is_on(tensor, device)) {
    refuse(std::string(name) + " is not on " + name_of(device));
  }
}

inline void check_dtype(const char* name, const Tensor& tensor, ScalarType expected) {
  if (tensor.scalar_type() != expected) {
    refuse(std::string(name) + " has dtype " + shown(tensor.scalar_type()) + ", expected " +
           shown(expected));
  }
}

inline void check_numel(const char* name, const Tensor& tensor, int64_t expected) {
  if (tensor.numel() != expected) {
    refuse(std::string(name) + " has " + std::to_string(tensor.numel()) + " elements, expected " +
           std::to_string(expected));
  }
}

inline void check_format(int64_t group_size, int64_t bits, int64_t mantissa_bits) {
  if (!fp_quantizer::with_format(bits, mantissa_bits, [](auto) {})) {
    refuse("bits is " + std::to_string(bits) + " and mantissa_bits is " +
           std::to_string(mantissa_bits) +
           ", expected one of e4m3 (8 bits, 3 of mantissa), e5m2 (8 bits, 2 of mantissa), "
           "e3m2 (6 bits, 2 of mantissa), e4m7 (12 bits, 7 of mantissa), e2m1 (4 bits, 1 of "
           "mantissa)");
  }
  if (group_size < 16 || group_size > 65536 || group_size % 16 != 0) {
    refuse("group_size is " + std::to_string(group_size) +
           ", expected a multiple of 16 from 16 to 65536");
  }
}

inline bool is_supported(ScalarType type) {
  return type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half;
}

inline Type type_of(ScalarType type) {
  return type == ScalarType::Float ? Type::kFloat
      : type == ScalarType::BFloat16 ? Type::kBFloat16
                                     : Type::kFloat16;
}

inline int64_t byte_count(int64_t numel, int64_t bits) {
  return (numel * bits + 7) / 8;
}

inline int64_t group_count(int64_t numel, int64_t group_size) {
  return (numel + group_size - 1) / group_size;
}

// What fp_quantize is given and returns.
struct Quantized {
  Tensor x, codes, scales;

  Quantized(const Tensor& given, int64_t group_size, int64_t bits, int64_t mantissa_bits,
            int32_t device)
      : x(given) {
    check_device("x", x, device);
    check_format(group_size, bits, mantissa_bits);
    if (!is_supported(x.scalar_type())) {
      refuse("x has dtype " + shown(x.scalar_type()) + ", expected Float, BFloat16 or Half");
    }
    if (!x.is_contiguous()) {
      x = torch::stable::contiguous(x);
    }
    const int64_t bytes[] = {byte_count(x.numel(), bits)};
    const int64_t groups[] = {group_count(x.numel(), group_size)};
    codes = torch::stable::new_empty(x, bytes, ScalarType::Byte);
    scales = torch::stable::new_empty(x, groups, ScalarType::Float);
  }
};

inline const int64_t* offset_pointer(const OptionalTensor& tensor, int32_t device) {
  if (!tensor) {
    return nullptr;
  }
  check_device("offset_tensor", *tensor, device);
  check_dtype("offset_tensor", *tensor, ScalarType::Long);
  check_numel("offset_tensor", *tensor, 1);
  return static_cast<const int64_t*>(tensor->const_data_ptr());
}

// What fp_dequantize and fp_dequantize_rows are given and return.
struct Dequantized {
  Tensor codes, scales, output;
  int64_t height = 1, width;  // of what was quantized, in rows

  Dequantized(const Tensor& given_codes, const Tensor& given_scales, const Sizes& size,
              int64_t group_size, int64_t bits, int64_t mantissa_bits, ScalarType dtype,
              int32_t device, std::optional<int64_t> rows)
      : codes(given_codes), scales(given_scales) {
    check_format(group_size, bits, mantissa_bits);
    if (!is_supported(dtype)) {
      refuse("dtype is " + shown(dtype) + ", expected Float, BFloat16 or Half");
    }
    int64_t numel = 1;
    for (std::size_t i = 0; i < size.size(); ++i) {
      if (size[i] < 0) {
        refuse("size[" + std::to_string(i) + "] is " + std::to_string(size[i]) +
               ", expected at least 0");
      }
      numel *= size[i];
    }
    check_device("codes", codes, device);
    check_dtype("codes", codes, ScalarType::Byte);
    check_numel("codes", codes, byte_count(numel, bits));
    check_device("scales", scales, device);
    check_dtype("scales", scales, ScalarType::Float);
    check_numel("scales", scales, group_count(numel, group_size));
    codes = codes.is_contiguous() ? codes : torch::stable::contiguous(codes);
    scales = scales.is_contiguous() ? scales : torch::stable::contiguous(scales);
    width = numel;
    Sizes shape = size;
    if (rows) {
      if (size.empty()) {
        refuse("size has no dimension, expected rows to choose from");
      }
      height = size[0];
      width = 1;
      for (std::size_t i = 1; i < size.size(); ++i) {
        width *= size[i];
      }
      shape[0] = *rows;
    }
    output = torch::stable::new_empty(codes, shape, dtype);
  }
};

inline void check_rows(const Tensor& rows, int32_t device) {
  check_dtype("rows", rows, ScalarType::Long);
  if (rows.dim() != 1) {
    refuse("rows has " + std::to_string(rows.dim()) + " dimensions, expected 1");
  }
  check_device("rows", rows, device);
}

OPKILN_NAMESPACE_END
