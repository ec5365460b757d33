// Shared by the CPU and CUDA versions of quantizing: argument checks, and the op's function.
#pragma once

#include "arguments.h"

namespace opkiln {
namespace fp_quantizer {
namespace {

// The parameters of a call. `codes` and `scales` are aligned, as they come from the allocator.
struct Quantize {
  const void* input;
  uint8_t* codes;
  float* scales;
  int64_t numel;
  int64_t group_size;
  int bits, mantissa_bits;
  ElementType type;
  bool stochastic;
  uint64_t seed, offset;
  const int64_t* offset_at;  // null, or read when the kernel runs, in place of `offset`
};

OPK_HOST_DEVICE inline uint64_t offset_of(const Quantize& work) {
  return work.offset_at == nullptr ? work.offset : static_cast<uint64_t>(*work.offset_at);
}

#if !defined(__CUDACC_RTC__)
OPK_PLAIN_BEGIN

// Defined by each device's source. Called only if there is at least one element.
void run(const Quantize& work);

opk::tuple<Tensor, Tensor> fp_quantize(const Tensor& x, int64_t group_size, int64_t bits, int64_t mantissa_bits,
                                       bool stochastic, int64_t seed, int64_t offset,
                                       const opk::optional<Tensor>& offset_at) {
  const Device device = opk::device_of(x);
  check_format(group_size, bits, mantissa_bits);
  const ElementType type = opk::element_of(x);
  const Tensor input = opk::contiguous(x);
  Quantize work{};
  work.numel = input.numel();
  Tensor codes = opk::empty({byte_count(work.numel, bits)}, DType::uint8, device);
  Tensor scales = opk::empty({group_count(work.numel, group_size)}, DType::float32, device);
  work.input = input.data();
  work.codes = codes.data<uint8_t>();
  work.scales = scales.data<float>();
  work.group_size = group_size;
  work.bits = static_cast<int>(bits);
  work.mantissa_bits = static_cast<int>(mantissa_bits);
  work.type = type;
  work.stochastic = stochastic;
  work.seed = static_cast<uint64_t>(seed);
  work.offset = static_cast<uint64_t>(offset);
  if (offset_at) {
    opk::check_on(*offset_at, device);
    opk::check_dtype(*offset_at, DType::int64);
    opk::check_numel(*offset_at, 1);
    work.offset_at = offset_at->data<const int64_t>();
  }
  if (work.numel > 0) run(work);
  return {codes, scales};
}

OPK_PLAIN_END
#endif

}  // namespace
}  // namespace fp_quantizer
}  // namespace opkiln
