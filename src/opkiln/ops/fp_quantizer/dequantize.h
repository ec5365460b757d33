// Shared by the CPU and CUDA versions of dequantizing: argument checks, and the op's functions.
#pragma once

#include "arguments.h"

namespace opkiln {
namespace fp_quantizer {
namespace {

// The parameters of a call. `output` is aligned, as it comes from the allocator.
struct Dequantize {
  const uint8_t* codes;
  const float* scales;
  void* output;
  int64_t numel;  // elements of the output
  int64_t group_size;
  int bits, mantissa_bits;
  ElementType type;
  const int64_t* rows;    // null: all rows, in order
  int64_t width, height;  // of the quantized tensor, as rows; used if `rows` is given
};

#if !defined(__CUDACC_RTC__)
OPK_PLAIN_BEGIN

using Sizes = opk::List<int64_t>;

// Defined by each device's source. Called only if there is at least one element.
void run(const Dequantize& work);
void check_rows(const int64_t* rows, int64_t count, int64_t height);

Tensor dequantize_to(const Tensor& codes, const Tensor& scales, const Tensor* rows, const Sizes& size,
                     int64_t group_size, int64_t bits, int64_t mantissa_bits, DType dtype, Device device) {
  check_format(group_size, bits, mantissa_bits);
  Dequantize work{};
  work.type = opk::element_of(dtype);
  int64_t numel = 1;
  for (int64_t i = 0; i < size.size(); ++i) {
    OPK_CHECK(size[i] >= 0, "size[", i, "] is ", size[i], ", expected at least 0");
    numel *= size[i];
  }
  opk::check_dtype(codes, DType::uint8);
  opk::check_numel(codes, byte_count(numel, bits));
  opk::check_on(scales, device);
  opk::check_dtype(scales, DType::float32);
  opk::check_numel(scales, group_count(numel, group_size));
  const Tensor all_codes = opk::contiguous(codes), all_scales = opk::contiguous(scales);
  Tensor chosen;
  Sizes shape = size;
  work.height = 1;
  work.width = numel;
  if (rows != nullptr) {
    OPK_CHECK(!size.empty(), "size has no dimension, expected rows to choose from");
    work.height = size[0];
    work.width = 1;
    for (int64_t i = 1; i < size.size(); ++i) {
      work.width *= size[i];
    }
    shape[0] = rows->numel();
    chosen = opk::contiguous(*rows);
    work.rows = static_cast<const Tensor&>(chosen).data<const int64_t>();
    check_rows(work.rows, shape[0], work.height);
  }
  Tensor output = opk::empty(shape, dtype, device);
  work.codes = all_codes.data<const uint8_t>();
  work.scales = all_scales.data<const float>();
  work.output = output.data();
  work.numel = output.numel();
  work.group_size = group_size;
  work.bits = static_cast<int>(bits);
  work.mantissa_bits = static_cast<int>(mantissa_bits);
  if (work.numel > 0) run(work);
  return output;
}

Tensor fp_dequantize(const Tensor& codes, const Tensor& scales, const Sizes& size, int64_t group_size,
                     int64_t bits, int64_t mantissa_bits, DType dtype) {
  return dequantize_to(codes, scales, nullptr, size, group_size, bits, mantissa_bits, dtype,
                       opk::device_of(codes));
}

Tensor fp_dequantize_rows(const Tensor& codes, const Tensor& scales, const Tensor& rows, const Sizes& size,
                          int64_t group_size, int64_t bits, int64_t mantissa_bits, DType dtype) {
  const Device device = opk::device_of(codes);
  opk::check_dtype(rows, DType::int64);
  OPK_CHECK(rows.dim() == 1, "rows has ", rows.dim(), " dimensions, expected 1");
  opk::check_on(rows, device);
  return dequantize_to(codes, scales, &rows, size, group_size, bits, mantissa_bits, dtype, device);
}

OPK_PLAIN_END
#endif

}  // namespace
}  // namespace fp_quantizer
}  // namespace opkiln
