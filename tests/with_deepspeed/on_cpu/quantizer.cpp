// DeepSpeed's own quantizer kernels, run on the CPU: its files, but for the syntax of launches and
// for the header of conversions. Called from Python with ctypes (test_compat_deepspeed_kernels.py).

#include "ds_kernel_utils.h"
// What follows is as on Ampere and later, where __hmax2 passes over NaN; not the PTX before this.
#define __CUDA_ARCH__ 800

#include "quantization/dequantize.cu"
#include "quantization/quant_reduce.cu"
#include "quantization/quantize.cu"
#include "quantization/quantize_intX.cu"
#include "quantization/swizzled_quantize.cu"

extern "C" {

void run_quantize(int8_t* levels, float* params, const void* x, int groups, int size, int bits,
              int type) {
  launch_quant(levels, params, static_cast<const __half*>(x), groups, size, bits,
               static_cast<quantize::Type>(type), nullptr);
}

void run_dequantize(void* out, const int8_t* levels, const float* params, int size, int total, int bits,
                int type, int wide) {
  if (wide != 0) {
    launch_dequantize_kernel(static_cast<float*>(out), levels, params,
                             static_cast<quantize::Type>(type), bits, size, total, nullptr);
  } else {
    launch_dequantize_kernel(static_cast<__half*>(out), levels, params,
                             static_cast<quantize::Type>(type), bits, size, total, nullptr);
  }
}

void run_swizzle(int8_t* levels, float* params, const void* x, int groups, int size, int bits, int type,
             int pipeline, int nodes, int devices) {
  launch_swizzled_quant(levels, params, static_cast<const __half*>(x), bits,
                        static_cast<quantize::Type>(type), groups, size, pipeline, nodes, devices,
                        nullptr);
}

// Sizes are in bytes, as its binding counts them.
void run_reduce(int8_t* levels, float* params, const int8_t* from, const float* from_params, int parts,
            int bits, int type, int out_groups, int out_size, int part, int groups, int size) {
  launch_dequant_reduce(levels, params, from, from_params, parts, bits,
                        static_cast<quantize::Type>(type), out_groups, out_size, part, groups, size,
                        nullptr);
}

void run_experimental(void* out, const void* levels, const void* scales, const void* least, int groups,
                  int size, int bits) {
  const auto launch = bits == 4 ? launch_dequantize_int4_to_half_experimental
                                : launch_dequantize_int8_to_half_experimental;
  launch(static_cast<uint8_t*>(const_cast<void*>(levels)), static_cast<half*>(out),
         static_cast<half*>(const_cast<void*>(scales)),
         static_cast<half*>(const_cast<void*>(least)), groups, size, nullptr);
}
}
