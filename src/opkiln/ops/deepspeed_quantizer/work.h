// Shared by the CPU and CUDA versions: argument checks, and the op's
// functions. Messages equal reference.py's.
#pragma once

#include <opkiln/arguments.h>
#include <opkiln/group_order.h>

namespace {

using opkiln::ElementType;
using opkiln::GroupOrder;
using opkiln::place_of;

// Groups of equal size: levels of four or eight bits, and per group a scale, plus an offset if asymmetric.
struct Groups {
  uint8_t* levels;
  float* params;  // one or two floats per group
  int64_t count, size;
  int bits;
  bool symmetric;
};

// The parameters of a call. Quantizing reads `from` or the parts and writes `to`; dequantizing reads `to`.
struct Work {
  Groups to;
  const void* from;  // null: the sum of the parts is quantized
  void* out;         // the output of dequantizing
  ElementType type;  // the type of `from` and `out`
  bool with_zero;    // every group's range includes 0
  GroupOrder order;
  Groups parts;      // all parts, one after the other
  int number_of_parts;
};

#if !defined(__CUDACC_RTC__)
OPK_PLAIN_BEGIN

using opk::Device;
using opk::DType;
using opk::Tensor;
using Two = opk::tuple<Tensor, Tensor>;

// Defined by each device's source. Called only if there is at least one element.
void quantize(const Work& work);
void dequantize(const Work& work);

void check_bits(int64_t bits) {
  OPK_CHECK(bits == 4 || bits == 8, "bits is ", bits, ", expected 4 or 8");
}

// Divides the elements into groups of equal size.
Groups make_groups(const char* name, int64_t elements, int64_t groups, int64_t bits, bool symmetric) {
  check_bits(bits);
  OPK_CHECK(groups >= 1 && elements % groups == 0 && elements / groups * bits % 8 == 0, name, " has ", elements,
            " elements, expected a multiple of groups = ", groups, ", of whole bytes at ", bits, " bits");
  return {nullptr, nullptr, groups, elements / groups, static_cast<int>(bits), symmetric};
}

GroupOrder order_of(int64_t groups, int64_t nodes, int64_t devices, int64_t pipeline) {
  // In double, because the product of three 63-bit factors may overflow.
  const double wanted = static_cast<double>(nodes) * static_cast<double>(devices) * static_cast<double>(pipeline);
  const int64_t pieces = wanted < 9e18 ? nodes * devices * pipeline : 0;
  OPK_CHECK(nodes >= 1 && devices >= 1 && pipeline >= 1 && pieces > 0 && groups % pieces == 0 &&
                groups <= UINT32_MAX,
            "groups is ", groups, ", expected a multiple of nodes * devices_per_node * pipeline = ", pieces);
  if (pieces == 1) {
    return {1, 1, 1, 0};
  }
  return {static_cast<uint32_t>(nodes), static_cast<uint32_t>(devices), static_cast<uint32_t>(pipeline),
          static_cast<uint32_t>(groups / pieces)};
}

// Checks levels and parameters that the caller passed.
Groups check_groups(const Tensor& levels, const Tensor& params, int64_t groups, int64_t bits, bool symmetric,
             Device device) {
  const DType type = levels.dtype();
  OPK_CHECK(type == DType::int8 || type == DType::uint8, levels, " has dtype ", type, ", expected int8 or uint8");
  opk::check_dtype(params, DType::float32);
  check_bits(bits);
  Groups out = make_groups("levels", levels.numel() * 8 / bits, groups, bits, symmetric);
  opk::check_numel(params, symmetric ? groups : 2 * groups);
  opk::check_on(params, device);
  opk::check_contiguous(levels, params);
  out.levels = static_cast<uint8_t*>(const_cast<void*>(levels.data()));
  out.params = const_cast<float*>(params.data<const float>());
  return out;
}

// Quantizes into new tensors.
Two quantize_new(Work& work, Device device) {
  Groups& to = work.to;
  Tensor levels = opk::empty({to.count * to.size * to.bits / 8}, DType::int8, device);
  Tensor params = opk::empty({to.count, to.symmetric ? 1 : 2}, DType::float32, device);
  to.levels = static_cast<uint8_t*>(levels.data());
  to.params = params.data<float>();
  if (to.size > 0) quantize(work);
  return {levels, params};
}

Two deepspeed_quantize(const Tensor& x, int64_t groups, int64_t bits, bool symmetric, bool with_zero,
                       int64_t nodes, int64_t devices, int64_t pipeline) {
  const Device device = opk::device_of(x);
  Work work{};
  work.type = opk::element_of(x);
  work.to = make_groups("x", x.numel(), groups, bits, symmetric);
  work.order = order_of(groups, nodes, devices, pipeline);
  opk::check_contiguous(x);
  work.from = x.data();
  work.with_zero = with_zero;
  return quantize_new(work, device);
}

Two deepspeed_reduce(const Tensor& levels, const Tensor& params, int64_t parts, int64_t in_groups,
                     int64_t out_groups, int64_t bits, bool symmetric, bool with_zero) {
  const Device device = opk::device_of(levels);
  OPK_CHECK(parts >= 1 && parts <= INT32_MAX && in_groups % parts == 0, "in_groups is ", in_groups,
            ", expected a multiple of parts = ", parts);
  Work work{};
  work.parts = check_groups(levels, params, in_groups, bits, symmetric, device);
  work.number_of_parts = static_cast<int>(parts);
  work.to = make_groups("the sum", in_groups / parts * work.parts.size, out_groups, bits, symmetric);
  work.order = order_of(out_groups, 1, 1, 1);
  work.with_zero = with_zero;
  return quantize_new(work, device);
}

Tensor deepspeed_dequantize(const Tensor& levels, const Tensor& params, int64_t groups, int64_t bits,
                            bool symmetric, DType dtype) {
  const Device device = opk::device_of(levels);
  Work work{};
  work.type = opk::element_of(dtype);
  work.to = check_groups(levels, params, groups, bits, symmetric, device);
  Tensor out = opk::empty({groups * work.to.size}, dtype, device);
  work.out = out.data();
  if (work.to.size > 0) dequantize(work);
  return out;
}

OPK_PLAIN_END
#endif

}  // namespace
