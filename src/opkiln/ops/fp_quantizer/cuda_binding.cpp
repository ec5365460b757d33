// From torch's tensors to the kernels: every check, the stream, the registration. Torch calls ROCm's
// devices CUDA, too, so this serves both, and it needs neither's headers.

#include <opkiln/cuda_stream.h>
#include <torch/csrc/stable/accelerator.h>

#include "arguments.h"
#include "kernel.h"

namespace {

using namespace opkiln;

int32_t device_of(const char* name, const Tensor& tensor) {
  if (!tensor.is_cuda()) {
    refuse(std::string(name) + " is not on a GPU");
  }
  return tensor.get_device_index();
}

template <class Work>
void run(const Work& work, int32_t device) {
  const torch::stable::accelerator::DeviceGuard guard(device);
  const char* const error = fp_quantizer::enqueue(work, current_stream(device));
  if (error != nullptr) {
    refuse("fp_quantizer was not launched on " + name_of(device) + ": " + error);
  }
}

std::tuple<Tensor, Tensor> quantize(Tensor x, int64_t group_size, int64_t bits,
                                    int64_t mantissa_bits, bool stochastic, int64_t seed,
                                    int64_t offset, OptionalTensor offset_tensor) {
  const int32_t device = device_of("x", x);
  const Quantized made(x, group_size, bits, mantissa_bits, device);
  run(
      fp_quantizer::Quantize{
          .input = made.x.const_data_ptr(),
          .codes = static_cast<uint8_t*>(made.codes.mutable_data_ptr()),
          .scales = static_cast<float*>(made.scales.mutable_data_ptr()),
          .numel = made.x.numel(),
          .group_size = group_size,
          .bits = static_cast<int>(bits),
          .mantissa_bits = static_cast<int>(mantissa_bits),
          .type = type_of(made.x.scalar_type()),
          .stochastic = stochastic,
          .seed = static_cast<uint64_t>(seed),
          .offset = static_cast<uint64_t>(offset),
          .offset_at = offset_pointer(offset_tensor, device),
      },
      device);
  return {made.codes, made.scales};
}

Tensor dequantize_on(const Dequantized& made, const int64_t* rows, int64_t group_size, int64_t bits,
                     int64_t mantissa_bits, int32_t device) {
  run(
      fp_quantizer::Dequantize{
          .codes = static_cast<const uint8_t*>(made.codes.const_data_ptr()),
          .scales = static_cast<const float*>(made.scales.const_data_ptr()),
          .output = made.output.mutable_data_ptr(),
          .numel = made.output.numel(),
          .group_size = group_size,
          .bits = static_cast<int>(bits),
          .mantissa_bits = static_cast<int>(mantissa_bits),
          .type = type_of(made.output.scalar_type()),
          .rows = rows,
          .width = made.width,
          .height = made.height,
      },
      device);
  return made.output;
}

Tensor dequantize(Tensor codes, Tensor scales, Sizes size, int64_t group_size, int64_t bits,
                  int64_t mantissa_bits, ScalarType dtype) {
  const int32_t device = device_of("codes", codes);
  const Dequantized made(codes, scales, size, group_size, bits, mantissa_bits, dtype, device,
                         std::nullopt);
  return dequantize_on(made, nullptr, group_size, bits, mantissa_bits, device);
}

Tensor dequantize_rows(Tensor codes, Tensor scales, Tensor rows, Sizes size, int64_t group_size,
                       int64_t bits, int64_t mantissa_bits, ScalarType dtype) {
  const int32_t device = device_of("codes", codes);
  check_rows(rows, device);
  const Dequantized made(codes, scales, size, group_size, bits, mantissa_bits, dtype, device,
                         rows.numel());
  const Tensor chosen = rows.is_contiguous() ? rows : torch::stable::contiguous(rows);
  return dequantize_on(made, static_cast<const int64_t*>(chosen.const_data_ptr()), group_size, bits,
                       mantissa_bits, device);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(opkiln, CUDA, m) {
  m.impl("fp_quantize", TORCH_BOX(&quantize));
  m.impl("fp_dequantize", TORCH_BOX(&dequantize));
  m.impl("fp_dequantize_rows", TORCH_BOX(&dequantize_rows));
}
