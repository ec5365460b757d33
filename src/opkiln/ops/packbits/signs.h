// Shared by the CPU and CUDA versions: argument checks, and the op's functions.
#pragma once

#include <opkiln/arguments.h>

namespace {

// The elements and their packed signs. pack() reads the elements, unpack() the bytes.
struct Signs {
  void* elements;
  uint8_t* bytes;
  int64_t numel;
  bool wide;     // elements have 4 bytes instead of 2
  uint32_t one;  // the bit pattern of 1 in the element type
};

#if !defined(__CUDACC_RTC__)
OPK_PLAIN_BEGIN

using opk::Tensor;

// Defined by each device's source. Called only if there is at least one element.
void pack(const Signs& signs);
void unpack(const Signs& signs);

Signs signs_of(opkiln::ElementType type) {
  const bool wide = type == opkiln::ElementType::kFloat;
  return {nullptr, nullptr, 0, wide,
          wide ? 0x3f800000u : type == opkiln::ElementType::kBFloat16 ? 0x3f80u : 0x3c00u};
}

Tensor packbits(const Tensor& x) {
  const opk::Device device = opk::device_of(x);
  Signs signs = signs_of(opk::element_of(x));
  opk::check_contiguous(x);
  signs.numel = x.numel();
  Tensor out = opk::empty({(signs.numel + 7) / 8}, opk::DType::uint8, device);
  signs.elements = const_cast<void*>(x.data());
  signs.bytes = out.data<uint8_t>();
  if (signs.numel > 0) pack(signs);
  return out;
}

Tensor unpackbits(const Tensor& packed, int64_t numel, opk::DType dtype) {
  const opk::Device device = opk::device_of(packed);
  Signs signs = signs_of(opk::element_of(dtype));
  OPK_CHECK(numel >= 0, "numel is ", numel, ", expected at least 0");
  opk::check_dtype(packed, opk::DType::uint8);
  opk::check_numel(packed, (numel + 7) / 8);
  opk::check_contiguous(packed);
  signs.numel = numel;
  Tensor out = opk::empty({numel}, dtype, device);
  signs.elements = out.data();
  signs.bytes = const_cast<uint8_t*>(packed.data<const uint8_t>());
  if (numel > 0) unpack(signs);
  return out;
}

OPK_PLAIN_END
#endif

}  // namespace
