// The op's functions and argument checks. Messages equal reference.py's.
#pragma once

#include <opkiln/arguments.h>

#include "work.h"

#if !defined(__CUDACC_RTC__)
OPK_PLAIN_BEGIN

namespace opkiln {
namespace quantizer {
namespace {

using opk::Device;
using opk::DType;
using opk::Tensor;
using opk::TensorList;
using OptionalTensor = opk::optional<Tensor>;
using Three = opk::tuple<Tensor, Tensor, Tensor>;

// Defined by each device's source. Without work.from, `parts` are quantized.
void run_quantize(const Work& work, const Parts* parts);
void run_dequantize(const Work& work);

// Checks device, dtype, size and contiguity.
void check(const Tensor& tensor, Device device, DType dtype, int64_t numel) {
  opk::check_on(tensor, device);
  opk::check_dtype(tensor, dtype);
  opk::check_numel(tensor, numel);
  opk::check_contiguous(tensor);
}

Format format_of(int64_t bits, int64_t group_size, bool symmetric, const char* prefix = "") {
  OPK_CHECK(bits == 4 || bits == 8, prefix, "bits is ", bits, ", expected 4 or 8");
  OPK_CHECK(group_size >= kSmallestGroup && group_size <= kLargestGroup && group_size % kChunk == 0, prefix,
            "group_size is ", group_size, ", expected a multiple of 8 from 16 to 65536");
  return {static_cast<int>(bits), static_cast<int>(group_size), symmetric, false};
}

// The format of a quantized result. It may also use the lowest level, unless narrow_range is set.
Format format_to(int64_t bits, int64_t group_size, bool symmetric, bool narrow_range) {
  Format format = format_of(bits, group_size, symmetric);
  format.full = symmetric && !narrow_range;
  return format;
}

Random random_of(bool stochastic, int64_t seed, int64_t offset, const OptionalTensor& at, Device device) {
  Random random{stochastic, static_cast<uint64_t>(seed), static_cast<uint64_t>(offset), nullptr};
  if (at) {
    check(*at, device, DType::int64, 1);
    random.offset_at = at->data<const int64_t>();
  }
  return random;
}

void check_count(const char* name, int64_t count) {
  OPK_CHECK(count >= 1 && count <= INT32_MAX, name, " is ", count, ", expected at least 1");
}

GroupOrder order_of(int64_t numel, const Format& format, int64_t nodes, int64_t devices, int64_t pipeline) {
  check_count("nodes", nodes);
  check_count("devices_per_node", devices);
  check_count("pipeline", pipeline);
  // In double, because the product of three 31-bit factors may overflow.
  const double wanted = static_cast<double>(nodes) * static_cast<double>(devices) *
      static_cast<double>(pipeline) * format.group_size;
  const int64_t pieces = wanted < 9e18 ? nodes * devices * pipeline : 0;
  if (pieces == 1) {
    return {1, 1, 1, 0};
  }
  const int64_t whole = pieces * format.group_size, groups = numel / format.group_size;
  OPK_CHECK(whole != 0 && numel % whole == 0, "x has ", numel,
            " elements, expected a multiple of nodes * devices_per_node * pipeline * group_size = ", whole);
  OPK_CHECK(groups <= UINT32_MAX, "x has ", groups, " groups, at most 4294967295 can be swizzled");
  return {static_cast<uint32_t>(nodes), static_cast<uint32_t>(devices), static_cast<uint32_t>(pipeline),
          static_cast<uint32_t>(groups / pieces)};
}

int64_t bytes_for(int64_t numel, const Format& format) {
  return format.bits == 8 ? numel : (numel + 1) / 2;
}

DType type_of_values(const Format& format) {
  return format.symmetric && format.bits == 8 ? DType::int8 : DType::uint8;
}

// Checks levels and parameters that the caller passed.
Quantized check_quantized(const Tensor& values, const Tensor& scales, const Tensor* offsets, int64_t numel,
                const Format& format, Device device) {
  OPK_CHECK(numel >= 0, "numel is ", numel, ", expected at least 0");
  const int64_t groups = groups_of(numel, format);
  check(values, device, type_of_values(format), bytes_for(numel, format));
  check(scales, device, DType::float32, groups);
  if (offsets != nullptr) {
    check(*offsets, device, DType::float32, format.symmetric ? 0 : groups);
  }
  return {static_cast<uint8_t*>(const_cast<void*>(values.data())),
          const_cast<float*>(scales.data<const float>()),
          format.symmetric ? nullptr : const_cast<float*>(offsets->data<const float>())};
}

// Quantizes into new tensors.
Three quantize_new(Work& work, const Parts* parts, Device device) {
  const Format& format = work.format;
  const int64_t groups = groups_of(work.numel, format);
  Tensor values = opk::empty({bytes_for(work.numel, format)}, type_of_values(format), device);
  Tensor scales = opk::empty({groups}, DType::float32, device);
  Tensor offsets = opk::empty({format.symmetric ? 0 : groups}, DType::float32, device);
  work.to = {static_cast<uint8_t*>(values.data()), scales.data<float>(), offsets.data<float>()};
  if (work.numel > 0) run_quantize(work, parts);
  return {values, scales, offsets};
}

float* error_of(Tensor& error, int64_t numel, Device device) {
  check(error, device, DType::float32, numel);
  return error.data<float>();
}

// Sets up the input of quantizing and fake quantizing.
Work work_on(const Tensor& x, const Format& format, Device device) {
  Work work{};
  work.type = opk::element_of(x);
  work.numel = x.numel();
  check(x, device, x.dtype(), work.numel);
  work.from = x.data();
  work.format = format;
  return work;
}

Three quantize_tensor(const Tensor& x, Tensor* error, int64_t bits, int64_t group_size, bool symmetric,
                      bool stochastic, int64_t seed, int64_t offset, int64_t nodes, int64_t devices,
                      int64_t pipeline, const OptionalTensor& offset_at, bool narrow_range) {
  const Device device = opk::device_of(x);
  Work work = work_on(x, format_to(bits, group_size, symmetric, narrow_range), device);
  work.random = random_of(stochastic, seed, offset, offset_at, device);
  work.order = order_of(work.numel, work.format, nodes, devices, pipeline);
  work.error = error == nullptr ? nullptr : error_of(*error, work.numel, device);
  return quantize_new(work, nullptr, device);
}

Three quantize(const Tensor& x, int64_t bits, int64_t group_size, bool symmetric, bool stochastic,
               int64_t seed, int64_t offset, int64_t nodes, int64_t devices, int64_t pipeline,
               const OptionalTensor& offset_at, bool narrow_range) {
  return quantize_tensor(x, nullptr, bits, group_size, symmetric, stochastic, seed, offset, nodes, devices,
                         pipeline, offset_at, narrow_range);
}

Three quantize_with_feedback(const Tensor& x, Tensor& error, int64_t bits, int64_t group_size, bool symmetric,
                             bool stochastic, int64_t seed, int64_t offset, int64_t nodes, int64_t devices,
                             int64_t pipeline, const OptionalTensor& offset_at, bool narrow_range) {
  return quantize_tensor(x, &error, bits, group_size, symmetric, stochastic, seed, offset, nodes, devices,
                         pipeline, offset_at, narrow_range);
}

Tensor dequantize(const Tensor& values, const Tensor& scales, const Tensor& offsets, int64_t numel, DType dtype,
                  int64_t bits, int64_t group_size, bool symmetric, int64_t nodes, int64_t devices,
                  int64_t pipeline) {
  const Device device = opk::device_of(values);
  Work work{};
  work.format = format_of(bits, group_size, symmetric);
  work.type = opk::element_of(dtype);
  work.numel = numel;
  work.to = check_quantized(values, scales, &offsets, numel, work.format, device);
  work.order = order_of(numel, work.format, nodes, devices, pipeline);
  Tensor out = opk::empty({numel}, dtype, device);
  work.out = out.data();
  if (numel > 0) run_dequantize(work);
  return out;
}

void fake_into(void* out, Work& work, bool stochastic, int64_t seed, int64_t offset,
               const OptionalTensor& offset_at, Device device) {
  work.random = random_of(stochastic, seed, offset, offset_at, device);
  work.out = out;
  if (work.numel > 0) run_quantize(work, nullptr);
}

Tensor fake_quantize(const Tensor& x, int64_t bits, int64_t group_size, bool symmetric, bool stochastic,
                     int64_t seed, int64_t offset, const OptionalTensor& offset_at, bool narrow_range) {
  const Device device = opk::device_of(x);
  Work work = work_on(x, format_to(bits, group_size, symmetric, narrow_range), device);
  Tensor out = opk::empty_like(x);
  fake_into(out.data(), work, stochastic, seed, offset, offset_at, device);
  return out;
}

void fake_quantize_(Tensor& x, int64_t bits, int64_t group_size, bool symmetric, bool stochastic, int64_t seed,
                    int64_t offset, const OptionalTensor& offset_at, bool narrow_range) {
  const Device device = opk::device_of(x);
  Work work = work_on(x, format_to(bits, group_size, symmetric, narrow_range), device);
  // The mutable accessor gives copy-on-write memory a copy of its own.
  work.from = x.data();
  fake_into(const_cast<void*>(work.from), work, stochastic, seed, offset, offset_at, device);
}

void check_length(const char* name, const TensorList& list, const TensorList& values) {
  OPK_CHECK(list.size() == values.size(), name, " has ", list.size(), " tensors, values has ", values.size());
}

Three reduce_parts(Tensor* error, const TensorList& values, const TensorList& scales, const TensorList& offsets,
                   int64_t numel, int64_t from_bits, int64_t from_group_size, bool from_symmetric,
                   double factor, int64_t bits, int64_t group_size, bool symmetric, bool stochastic,
                   int64_t seed, int64_t offset, const OptionalTensor& offset_at, bool narrow_range) {
  Parts parts{};
  parts.format = format_of(from_bits, from_group_size, from_symmetric, "from_");
  OPK_CHECK(!values.empty(), "values has no tensors, expected one for each part");
  check_length("scales", scales, values);
  if (!from_symmetric) {
    check_length("offsets", offsets, values);
  }
  OPK_CHECK(values.size() <= kMostParts, "values has ", values.size(), " tensors, expected at most ", kMostParts);
  const int64_t most = int64_t{UINT32_MAX} * kChunk;
  OPK_CHECK(numel <= most, "numel is ", numel, ", expected at most ", most);
  const Device device = opk::device_of(values[0]);
  for (int64_t i = 0; i < values.size(); ++i) {
    parts.at[i] = check_quantized(values[i], scales[i], from_symmetric ? nullptr : &offsets[i], numel, parts.format, device);
  }
  parts.count = static_cast<int>(values.size());
  parts.factor = static_cast<float>(factor);
  Work work{};
  work.numel = numel;
  work.format = format_to(bits, group_size, symmetric, narrow_range);
  work.random = random_of(stochastic, seed, offset, offset_at, device);
  work.error = error == nullptr ? nullptr : error_of(*error, numel, device);
  return quantize_new(work, &parts, device);
}

Three quantized_reduce(const TensorList& values, const TensorList& scales, const TensorList& offsets,
                       int64_t numel, int64_t from_bits, int64_t from_group_size, bool from_symmetric,
                       double factor, int64_t bits, int64_t group_size, bool symmetric, bool stochastic,
                       int64_t seed, int64_t offset, const OptionalTensor& offset_at, bool narrow_range) {
  return reduce_parts(nullptr, values, scales, offsets, numel, from_bits, from_group_size, from_symmetric,
                      factor, bits, group_size, symmetric, stochastic, seed, offset, offset_at, narrow_range);
}

Three quantized_reduce_with_feedback(Tensor& error, const TensorList& values, const TensorList& scales,
                                     const TensorList& offsets, int64_t numel, int64_t from_bits,
                                     int64_t from_group_size, bool from_symmetric, double factor, int64_t bits,
                                     int64_t group_size, bool symmetric, bool stochastic, int64_t seed,
                                     int64_t offset, const OptionalTensor& offset_at, bool narrow_range) {
  return reduce_parts(&error, values, scales, offsets, numel, from_bits, from_group_size, from_symmetric,
                      factor, bits, group_size, symmetric, stochastic, seed, offset, offset_at, narrow_range);
}

}  // namespace
}  // namespace quantizer
}  // namespace opkiln

OPK_PLAIN_END
#endif
