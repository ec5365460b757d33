// From torch's tensors to the kernels: every check, the threads, the registration.

#include "arguments.h"
#include "cpu.h"

namespace {

using namespace opkiln;

constexpr int64_t kGrainElements = 32 * 1024;  // below it, one thread is as fast as waking another

Stream output_stream(const Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()), type_of(tensor.scalar_type()), true};
}

std::tuple<Tensor, Tensor> quantize(Tensor x, int64_t group_size, int64_t bits,
                                    int64_t mantissa_bits, bool stochastic, int64_t seed,
                                    int64_t offset, OptionalTensor offset_tensor) {
  const Quantized made(x, group_size, bits, mantissa_bits, kCPU);
  const int64_t* const given = offset_pointer(offset_tensor, kCPU);
  const Quantizing work{
      .input = {static_cast<std::byte*>(const_cast<void*>(made.x.const_data_ptr())),
                type_of(made.x.scalar_type()), false},
      .codes = static_cast<uint8_t*>(made.codes.mutable_data_ptr()),
      .scales = static_cast<float*>(made.scales.mutable_data_ptr()),
      .numel = made.x.numel(),
      .group_size = group_size,
      .bits = bits,
      .mantissa_bits = mantissa_bits,
      .stochastic = stochastic,
      .seed = static_cast<uint64_t>(seed),
      .offset = static_cast<uint64_t>(given == nullptr ? offset : *given),
  };
  const int64_t groups = group_count(work.numel, group_size);
  if (groups > 0) {
    torch::stable::parallel_for(
        0, groups, std::max<int64_t>(1, kGrainElements / group_size),
        [&](int64_t low, int64_t high) { quantize_groups(work, low, high); });
  }
  return {made.codes, made.scales};
}

Dequantizing work_of(const Dequantized& made, int64_t group_size, int64_t bits,
                     int64_t mantissa_bits) {
  return {
      .codes = static_cast<const uint8_t*>(made.codes.const_data_ptr()),
      .scales = static_cast<const float*>(made.scales.const_data_ptr()),
      .output = output_stream(made.output),
      .group_size = group_size,
      .bits = bits,
      .mantissa_bits = mantissa_bits,
  };
}

Tensor dequantize(Tensor codes, Tensor scales, Sizes size, int64_t group_size, int64_t bits,
                  int64_t mantissa_bits, ScalarType dtype) {
  const Dequantized made(codes, scales, size, group_size, bits, mantissa_bits, dtype, kCPU,
                         std::nullopt);
  const Dequantizing work = work_of(made, group_size, bits, mantissa_bits);
  const int64_t numel = made.output.numel();
  if (numel > 0) {
    torch::stable::parallel_for(0, numel, kGrainElements, [&](int64_t low, int64_t high) {
      dequantize_range(work, low, low, high - low);
    });
  }
  return made.output;
}

Tensor dequantize_rows(Tensor codes, Tensor scales, Tensor rows, Sizes size, int64_t group_size,
                       int64_t bits, int64_t mantissa_bits, ScalarType dtype) {
  check_rows(rows, kCPU);
  const Dequantized made(codes, scales, size, group_size, bits, mantissa_bits, dtype, kCPU,
                         rows.numel());
  const Tensor chosen = rows.is_contiguous() ? rows : torch::stable::contiguous(rows);
  const int64_t* const at = static_cast<const int64_t*>(chosen.const_data_ptr());
  for (int64_t i = 0; i < chosen.numel(); ++i) {
    if (at[i] < 0 || at[i] >= made.height) {
      refuse("rows[" + std::to_string(i) + "] is " + std::to_string(at[i]) + ", expected 0 to " +
             std::to_string(made.height - 1));
    }
  }
  const Dequantizing work = work_of(made, group_size, bits, mantissa_bits);
  if (made.output.numel() > 0) {
    torch::stable::parallel_for(
        0, chosen.numel(), std::max<int64_t>(1, kGrainElements / made.width),
        [&](int64_t low, int64_t high) {
          for (int64_t i = low; i < high; ++i) {
            dequantize_range(work, at[i] * made.width, i * made.width, made.width);
          }
        });
  }
  return made.output;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(opkiln, CPU, m) {
  m.impl("fp_quantize", TORCH_BOX(&quantize));
  m.impl("fp_dequantize", TORCH_BOX(&dequantize));
  m.impl("fp_dequantize_rows", TORCH_BOX(&dequantize_rows));
}
