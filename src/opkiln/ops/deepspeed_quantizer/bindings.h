// From torch's tensors to a kernel's Work: every check, and what is returned. Both bindings are made
// of this; a Backend says where tensors must be and runs the kernels. Messages are reference.py's.
#pragma once

#include <opkiln/tensors.h>

#include <tuple>

#include "kernel.h"

OPKILN_NAMESPACE_BEGIN

namespace quantizing {

using deepspeed_quantizer::Groups;
using deepspeed_quantizer::Order;
using deepspeed_quantizer::Work;

using Two = std::tuple<Tensor, Tensor>;

inline std::string shown(ScalarType type) {
  return torch::headeronly::toString(type);
}

inline ElementType element_of(ScalarType type, const std::string& what) {
  switch (type) {
    case ScalarType::Float:
      return ElementType::kFloat;
    case ScalarType::BFloat16:
      return ElementType::kBFloat16;
    case ScalarType::Half:
      return ElementType::kFloat16;
    default:
      refuse(what + shown(type) + ", expected Float, BFloat16 or Half");
  }
}

inline void check_place(const char* name, const Tensor& tensor, int32_t device) {
  if (!is_on(tensor, device)) {
    refuse(std::string(name) + " is not on " + name_of(device));
  }
  if (!tensor.is_contiguous()) {
    refuse(std::string(name) + " is not contiguous");
  }
}

inline void check_bits(int64_t bits) {
  if (bits != 4 && bits != 8) {
    refuse("bits is " + std::to_string(bits) + ", expected 4 or 8");
  }
}

// So many elements in so many equal groups.
inline Groups cut(const char* name, int64_t elements, int64_t groups, int64_t bits,
                  bool symmetric) {
  check_bits(bits);
  if (groups < 1 || elements % groups != 0 || elements / groups * bits % 8 != 0) {
    refuse(std::string(name) + " has " + std::to_string(elements) +
           " elements, expected a multiple of groups = " + std::to_string(groups) +
           ", of whole bytes at " + std::to_string(bits) + " bits");
  }
  return {nullptr, nullptr, groups, elements / groups, static_cast<int>(bits), symmetric};
}

inline Order order_of(int64_t groups, int64_t nodes, int64_t devices, int64_t pipeline) {
  // In double: three factors of 63 bits.
  const double wanted = static_cast<double>(nodes) * static_cast<double>(devices) *
      static_cast<double>(pipeline);
  const int64_t pieces = wanted < 9e18 ? nodes * devices * pipeline : 0;
  if (nodes < 1 || devices < 1 || pipeline < 1 || pieces == 0 || groups % pieces != 0 ||
      groups > UINT32_MAX) {
    refuse("groups is " + std::to_string(groups) +
           ", expected a multiple of nodes * devices_per_node * pipeline = " +
           std::to_string(pieces));
  }
  if (pieces == 1) {
    return {1, 1, 1, 0};
  }
  return {static_cast<uint32_t>(nodes), static_cast<uint32_t>(devices),
          static_cast<uint32_t>(pipeline), static_cast<uint32_t>(groups / pieces)};
}

// Levels and parameters that were handed in.
inline Groups given(const Tensor& levels, const Tensor& params, int64_t groups, int64_t bits,
                    bool symmetric, int32_t device) {
  const ScalarType type = levels.scalar_type();
  if (type != ScalarType::Char && type != ScalarType::Byte) {
    refuse("levels has dtype " + shown(type) + ", expected Char or Byte");
  }
  if (params.scalar_type() != ScalarType::Float) {
    refuse("params has dtype " + shown(params.scalar_type()) + ", expected Float");
  }
  check_bits(bits);
  Groups out = cut("levels", levels.numel() * 8 / bits, groups, bits, symmetric);
  const int64_t wanted = symmetric ? groups : 2 * groups;
  if (params.numel() != wanted) {
    refuse("params has " + std::to_string(params.numel()) + " elements, expected " +
           std::to_string(wanted));
  }
  check_place("levels", levels, device);
  check_place("params", params, device);
  out.levels = static_cast<uint8_t*>(const_cast<void*>(levels.const_data_ptr()));
  out.params = static_cast<float*>(const_cast<void*>(params.const_data_ptr()));
  return out;
}

// Room for what is returned.
inline Two room(const Tensor& like, Groups& groups) {
  Two out{torch::stable::new_empty(like, {groups.count * groups.size * groups.bits / 8},
                                   ScalarType::Char),
          torch::stable::new_empty(like, {groups.count, groups.symmetric ? 1 : 2},
                                   ScalarType::Float)};
  groups.levels = static_cast<uint8_t*>(std::get<0>(out).mutable_data_ptr());
  groups.params = static_cast<float*>(std::get<1>(out).mutable_data_ptr());
  return out;
}

// The op's functions, for a Backend with
//   static int32_t device_of(const char* name, const Tensor&);  // checked
//   static void quantize(const Work&, int32_t device);
//   static void dequantize(const Work&, int32_t device);
template <class Backend>
struct Functions {
  static Two quantize(Tensor x, int64_t groups, int64_t bits, bool symmetric, bool with_zero,
                      int64_t nodes, int64_t devices, int64_t pipeline) {
    const int32_t device = Backend::device_of("x", x);
    Work work{};
    work.type = element_of(x.scalar_type(), "x has dtype ");
    work.to = cut("x", x.numel(), groups, bits, symmetric);
    work.order = order_of(groups, nodes, devices, pipeline);
    check_place("x", x, device);
    work.from = x.const_data_ptr();
    work.with_zero = with_zero;
    Two out = room(x, work.to);
    if (work.to.size > 0) {
      Backend::quantize(work, device);
    }
    return out;
  }

  static Tensor dequantize(Tensor levels, Tensor params, int64_t groups, int64_t bits,
                           bool symmetric, ScalarType dtype) {
    const int32_t device = Backend::device_of("levels", levels);
    Work work{};
    work.type = element_of(dtype, "dtype is ");
    work.to = given(levels, params, groups, bits, symmetric, device);
    const Tensor out = torch::stable::new_empty(levels, {groups * work.to.size}, dtype);
    work.out = out.mutable_data_ptr();
    if (work.to.size > 0) {
      Backend::dequantize(work, device);
    }
    return out;
  }

  static Two reduce(Tensor levels, Tensor params, int64_t parts, int64_t in_groups,
                    int64_t out_groups, int64_t bits, bool symmetric, bool with_zero) {
    const int32_t device = Backend::device_of("levels", levels);
    if (parts < 1 || parts > INT32_MAX || in_groups % parts != 0) {
      refuse("in_groups is " + std::to_string(in_groups) + ", expected a multiple of parts = " +
             std::to_string(parts));
    }
    Work work{};
    work.parts = given(levels, params, in_groups, bits, symmetric, device);
    work.number_of_parts = static_cast<int>(parts);
    work.to = cut("the sum", in_groups / parts * work.parts.size, out_groups, bits, symmetric);
    work.order = order_of(out_groups, 1, 1, 1);
    work.with_zero = with_zero;
    Two out = room(levels, work.to);
    if (work.to.size > 0) {
      Backend::quantize(work, device);
    }
    return out;
  }

  template <class Library>
  static void implement(Library& m) {
    m.impl("deepspeed_quantize", TORCH_BOX(&Functions::quantize));
    m.impl("deepspeed_dequantize", TORCH_BOX(&Functions::dequantize));
    m.impl("deepspeed_reduce", TORCH_BOX(&Functions::reduce));
  }
};

}  // namespace quantizing

OPKILN_NAMESPACE_END
