// From torch's tensors to a kernel's Work: every check, and what is returned. Both bindings are made
// of this; a Backend says where tensors must be and runs the kernels. Messages are reference.py's.
#pragma once

#include <opkiln/tensors.h>

#include <optional>
#include <tuple>

#include "kernel.h"

OPKILN_NAMESPACE_BEGIN

namespace quantizing {

using quantizer::Format;
using quantizer::Order;
using quantizer::Parts;
using quantizer::Quantized;
using quantizer::Random;
using quantizer::Work;

using OptionalTensor = std::optional<Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

inline std::string shown(ScalarType type) {
  return torch::headeronly::toString(type);
}

// On the device, of the dtype and the size, without gaps.
inline void check(const std::string& name, const Tensor& tensor, int32_t device, ScalarType type,
                  int64_t numel) {
  if (!is_on(tensor, device)) {
    refuse(name + " is not on " + name_of(device));
  }
  if (tensor.scalar_type() != type) {
    refuse(name + " has dtype " + shown(tensor.scalar_type()) + ", expected " + shown(type));
  }
  if (tensor.numel() != numel) {
    refuse(name + " has " + std::to_string(tensor.numel()) + " elements, expected " +
           std::to_string(numel));
  }
  if (!tensor.is_contiguous()) {
    refuse(name + " is not contiguous");
  }
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

inline Format format_of(int64_t bits, int64_t group_size, bool symmetric,
                        const std::string& prefix = "") {
  if (bits != 4 && bits != 8) {
    refuse(prefix + "bits is " + std::to_string(bits) + ", expected 4 or 8");
  }
  if (group_size < quantizer::kSmallestGroup || group_size > quantizer::kLargestGroup ||
      group_size % quantizer::kChunk != 0) {
    refuse(prefix + "group_size is " + std::to_string(group_size) +
           ", expected a multiple of 8 from 16 to 65536");
  }
  return {static_cast<int>(bits), static_cast<int>(group_size), symmetric, false};
}

// What is quantized to, which may use the lowest level, too.
inline Format format_to(int64_t bits, int64_t group_size, bool symmetric, bool narrow_range) {
  Format format = format_of(bits, group_size, symmetric);
  format.full = symmetric && !narrow_range;
  return format;
}

inline Random random_of(bool stochastic, int64_t seed, int64_t offset, const OptionalTensor& at,
                        int32_t device) {
  Random random{stochastic, static_cast<uint64_t>(seed), static_cast<uint64_t>(offset), nullptr};
  if (at) {
    check("offset_tensor", *at, device, ScalarType::Long, 1);
    random.offset_at = static_cast<const int64_t*>(at->const_data_ptr());
  }
  return random;
}

inline Order order_of(int64_t numel, const Format& format, int64_t nodes, int64_t devices,
                      int64_t pipeline) {
  const std::pair<const char*, int64_t> counts[] = {
      {"nodes", nodes}, {"devices_per_node", devices}, {"pipeline", pipeline}};
  for (const auto& [name, count] : counts) {
    if (count < 1 || count > INT32_MAX) {
      refuse(std::string(name) + " is " + std::to_string(count) + ", expected at least 1");
    }
  }
  // In double: three factors of 31 bits.
  const double wanted = static_cast<double>(nodes) * static_cast<double>(devices) *
      static_cast<double>(pipeline) * format.group_size;
  const int64_t pieces = wanted < 9e18 ? nodes * devices * pipeline : 0;
  if (pieces == 1) {
    return {1, 1, 1, 0};
  }
  if (pieces == 0 || numel % (pieces * format.group_size) != 0) {
    refuse("x has " + std::to_string(numel) +
           " elements, expected a multiple of nodes * devices_per_node * pipeline * group_size = " +
           std::to_string(pieces * format.group_size));
  }
  const int64_t groups = numel / format.group_size;
  if (groups > UINT32_MAX) {
    refuse("x has " + std::to_string(groups) + " groups, at most 4294967295 can be swizzled");
  }
  return {static_cast<uint32_t>(nodes), static_cast<uint32_t>(devices),
          static_cast<uint32_t>(pipeline), static_cast<uint32_t>(groups / pieces)};
}

inline int64_t bytes_of(int64_t numel, const Format& format) {
  return format.bits == 8 ? numel : (numel + 1) / 2;
}

inline ScalarType type_of_values(const Format& format) {
  return format.symmetric && format.bits == 8 ? ScalarType::Char : ScalarType::Byte;
}

// Levels that were handed in.
inline Quantized given(const std::string& index, const Tensor& values, const Tensor& scales,
                       const Tensor* offsets, int64_t numel, const Format& format,
                       int32_t device) {
  if (numel < 0) {
    refuse("numel is " + std::to_string(numel) + ", expected at least 0");
  }
  const int64_t groups = quantizer::groups_of(numel, format);
  check("values" + index, values, device, type_of_values(format), bytes_of(numel, format));
  check("scales" + index, scales, device, ScalarType::Float, groups);
  if (offsets != nullptr) {
    check("offsets" + index, *offsets, device, ScalarType::Float, format.symmetric ? 0 : groups);
  }
  const auto floats = [](const Tensor& tensor) {
    return static_cast<float*>(const_cast<void*>(tensor.const_data_ptr()));
  };
  return {static_cast<uint8_t*>(const_cast<void*>(values.const_data_ptr())), floats(scales),
          format.symmetric ? nullptr : floats(*offsets)};
}

// Room for what is returned.
inline Three room(const Tensor& like, int64_t numel, const Format& format) {
  const int64_t groups = quantizer::groups_of(numel, format);
  return {torch::stable::new_empty(like, {bytes_of(numel, format)}, type_of_values(format)),
          torch::stable::new_empty(like, {groups}, ScalarType::Float),
          torch::stable::new_empty(like, {format.symmetric ? 0 : groups}, ScalarType::Float)};
}

inline Quantized inside(const Three& room) {
  const auto& [values, scales, offsets] = room;
  return {static_cast<uint8_t*>(values.mutable_data_ptr()),
          static_cast<float*>(scales.mutable_data_ptr()),
          static_cast<float*>(offsets.mutable_data_ptr())};
}

inline float* error_of(const Tensor& error, int64_t numel, int32_t device) {
  check("error", error, device, ScalarType::Float, numel);
  return static_cast<float*>(error.mutable_data_ptr());
}

// The op's functions, for a Backend with
//   static int32_t device_of(const char* name, const Tensor&);  // checked
//   static void quantize(const Work&, const Parts&, int32_t device);
//   static void dequantize(const Work&, int32_t device);
template <class Backend>
struct Functions {
  // What is quantized or faked: its place, dtype and layout.
  static Work work_on(const Tensor& x, const Format& format, int32_t device) {
    Work work{};
    work.type = element_of(x.scalar_type(), "x has dtype ");
    check("x", x, device, x.scalar_type(), x.numel());
    work.numel = x.numel();
    work.from = x.const_data_ptr();
    work.format = format;
    return work;
  }

  static Three quantize_tensor(const Tensor& x, const Tensor* error, int64_t bits,
                               int64_t group_size, bool symmetric, bool stochastic, int64_t seed,
                               int64_t offset, int64_t nodes, int64_t devices, int64_t pipeline,
                               const OptionalTensor& offset_at, bool narrow_range) {
    const int32_t device = Backend::device_of("x", x);
    Work work = work_on(x, format_to(bits, group_size, symmetric, narrow_range), device);
    work.random = random_of(stochastic, seed, offset, offset_at, device);
    work.order = order_of(work.numel, work.format, nodes, devices, pipeline);
    work.error = error == nullptr ? nullptr : error_of(*error, work.numel, device);
    Three out = room(x, work.numel, work.format);
    work.to = inside(out);
    Backend::quantize(work, Parts{}, device);
    return out;
  }

  static Three quantize(Tensor x, int64_t bits, int64_t group_size, bool symmetric,
                        bool stochastic, int64_t seed, int64_t offset, int64_t nodes,
                        int64_t devices, int64_t pipeline, OptionalTensor offset_at, bool narrow_range) {
    return quantize_tensor(x, nullptr, bits, group_size, symmetric, stochastic, seed, offset, nodes,
                           devices, pipeline, offset_at, narrow_range);
  }

  static Three quantize_with_feedback(Tensor x, Tensor error, int64_t bits, int64_t group_size,
                                      bool symmetric, bool stochastic, int64_t seed,
                                      int64_t offset, int64_t nodes, int64_t devices,
                                      int64_t pipeline, OptionalTensor offset_at, bool narrow_range) {
    return quantize_tensor(x, &error, bits, group_size, symmetric, stochastic, seed, offset, nodes,
                           devices, pipeline, offset_at, narrow_range);
  }

  static Tensor dequantize(Tensor values, Tensor scales, Tensor offsets, int64_t numel,
                           ScalarType dtype, int64_t bits, int64_t group_size, bool symmetric,
                           int64_t nodes, int64_t devices, int64_t pipeline) {
    const int32_t device = Backend::device_of("values", values);
    Work work{};
    work.format = format_of(bits, group_size, symmetric);
    work.type = element_of(dtype, "dtype is ");
    work.numel = numel;
    work.to = given("", values, scales, &offsets, numel, work.format, device);
    work.order = order_of(numel, work.format, nodes, devices, pipeline);
    const Tensor out = torch::stable::new_empty(values, {numel}, dtype);
    work.out = out.mutable_data_ptr();
    Backend::dequantize(work, device);
    return out;
  }

  static Tensor fake_quantize(Tensor x, int64_t bits, int64_t group_size, bool symmetric,
                              bool stochastic, int64_t seed, int64_t offset,
                              OptionalTensor offset_at, bool narrow_range) {
    const int32_t device = Backend::device_of("x", x);
    Work work = work_on(x, format_to(bits, group_size, symmetric, narrow_range), device);
    work.random = random_of(stochastic, seed, offset, offset_at, device);
    const Tensor out = torch::stable::empty_like(x);
    work.out = out.mutable_data_ptr();
    Backend::quantize(work, Parts{}, device);
    return out;
  }

  static void fake_quantize_in_place(Tensor x, int64_t bits, int64_t group_size, bool symmetric,
                                     bool stochastic, int64_t seed, int64_t offset,
                                     OptionalTensor offset_at, bool narrow_range) {
    const int32_t device = Backend::device_of("x", x);
    Work work = work_on(x, format_to(bits, group_size, symmetric, narrow_range), device);
    work.random = random_of(stochastic, seed, offset, offset_at, device);
    // The mutable accessor first: it gives copy-on-write memory a copy of its own.
    work.out = x.mutable_data_ptr();
    work.from = work.out;
    Backend::quantize(work, Parts{}, device);
  }

  static Three reduce_parts(const Tensor* error, const TensorList& values,
                            const TensorList& scales, const TensorList& offsets, int64_t numel,
                            int64_t from_bits, int64_t from_group_size, bool from_symmetric,
                            double factor, int64_t bits, int64_t group_size, bool symmetric,
                            bool stochastic, int64_t seed, int64_t offset,
                            const OptionalTensor& offset_at, bool narrow_range) {
    Parts parts{};
    parts.format = format_of(from_bits, from_group_size, from_symmetric, "from_");
    if (values.empty()) {
      refuse("values has no tensors, expected one for each part");
    }
    const Argument all{"values", values};
    check_length({"scales", scales}, all);
    if (!from_symmetric) {
      check_length({"offsets", offsets}, all);
    }
    if (values.size() > quantizer::kMostParts) {
      refuse("values has " + std::to_string(values.size()) + " tensors, expected at most " +
             std::to_string(quantizer::kMostParts));
    }
    const int64_t most = int64_t{UINT32_MAX} * quantizer::kChunk;
    if (numel > most) {
      refuse("numel is " + std::to_string(numel) + ", expected at most " + std::to_string(most));
    }
    const int32_t device = Backend::device_of("values[0]", values[0]);
    for (std::size_t i = 0; i < values.size(); ++i) {
      parts.at[i] = given("[" + std::to_string(i) + "]", values[i], scales[i],
                          from_symmetric ? nullptr : &offsets[i], numel, parts.format, device);
    }
    parts.count = static_cast<int>(values.size());
    parts.factor = static_cast<float>(factor);
    Work work{};
    work.numel = numel;
    work.format = format_to(bits, group_size, symmetric, narrow_range);
    work.random = random_of(stochastic, seed, offset, offset_at, device);
    work.error = error == nullptr ? nullptr : error_of(*error, numel, device);
    Three out = room(scales[0], numel, work.format);
    work.to = inside(out);
    Backend::quantize(work, parts, device);
    return out;
  }

  static Three quantized_reduce(TensorList values, TensorList scales, TensorList offsets,
                                int64_t numel, int64_t from_bits, int64_t from_group_size,
                                bool from_symmetric, double factor, int64_t bits,
                                int64_t group_size, bool symmetric, bool stochastic, int64_t seed,
                                int64_t offset, OptionalTensor offset_at, bool narrow_range) {
    return reduce_parts(nullptr, values, scales, offsets, numel, from_bits, from_group_size,
                        from_symmetric, factor, bits, group_size, symmetric, stochastic, seed,
                        offset, offset_at, narrow_range);
  }

  static Three quantized_reduce_with_feedback(Tensor error, TensorList values, TensorList scales,
                                              TensorList offsets, int64_t numel, int64_t from_bits,
                                              int64_t from_group_size, bool from_symmetric,
                                              double factor, int64_t bits, int64_t group_size,
                                              bool symmetric, bool stochastic, int64_t seed,
                                              int64_t offset, OptionalTensor offset_at, bool narrow_range) {
    return reduce_parts(&error, values, scales, offsets, numel, from_bits, from_group_size,
                        from_symmetric, factor, bits, group_size, symmetric, stochastic, seed,
                        offset, offset_at, narrow_range);
  }

  template <class Library>
  static void implement(Library& m) {
    m.impl("quantize", TORCH_BOX(&Functions::quantize));
    m.impl("quantize_with_feedback", TORCH_BOX(&Functions::quantize_with_feedback));
    m.impl("dequantize", TORCH_BOX(&Functions::dequantize));
    m.impl("fake_quantize", TORCH_BOX(&Functions::fake_quantize));
    m.impl("fake_quantize_", TORCH_BOX(&Functions::fake_quantize_in_place));
    m.impl("quantized_reduce", TORCH_BOX(&Functions::quantized_reduce));
    m.impl("quantized_reduce_with_feedback", TORCH_BOX(&Functions::quantized_reduce_with_feedback));
  }
};

}  // namespace quantizing

OPKILN_NAMESPACE_END
