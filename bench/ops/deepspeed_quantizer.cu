// DeepSpeed's launches of its quantizer, for ctypes: its own binding needs all of torch's headers, which
// take minutes. Compiled beside its quantize.cu and dequantize.cu.

#include "quantization.h"

extern "C" int deepspeed_quantize(void* values, void* scales, const void* halves, int groups,
                                  int group_size, int bits, void* stream) {
  launch_quant(static_cast<int8_t*>(values), static_cast<float*>(scales),
               static_cast<const __half*>(halves), groups, group_size, bits,
               quantize::Type::Symmetric, static_cast<cudaStream_t>(stream));
  return cudaGetLastError();
}

extern "C" int deepspeed_dequantize(void* halves, const void* values, const void* scales, int groups,
                                    int group_size, int bits, void* stream) {
  launch_dequantize_kernel<__half>(
      static_cast<__half*>(halves), static_cast<const int8_t*>(values),
      static_cast<const float*>(scales), quantize::Type::Symmetric, bits, group_size,
      groups * group_size, static_cast<cudaStream_t>(stream));
  return cudaGetLastError();
}
