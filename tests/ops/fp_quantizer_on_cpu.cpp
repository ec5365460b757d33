// fp_quantizer's CUDA kernels, run on the CPU: the files themselves, on what stands in for CUDA's
// runtime. Called from Python with ctypes (fp_quantizer_kernel.py).

#if defined(DEQUANTIZE)
#include <ops/fp_quantizer/dequantize.cu>
#else
#include <ops/fp_quantizer/quantize.cu>
#endif

using namespace opkiln;
using namespace opkiln::fp_quantizer;

extern "C" {

#if defined(DEQUANTIZE)
int dequantize(const uint8_t* codes, const float* scales, void* output, int64_t numel,
               int64_t group_size, int bits, int mantissa_bits, int type, const int64_t* rows,
               int64_t width, int64_t height) {
  const Dequantize work{codes, scales, output, numel, group_size, bits, mantissa_bits,
                        static_cast<ElementType>(type), rows, width, height};
  return enqueue(work, nullptr) == nullptr ? 0 : 1;
}
#else
int quantize(const void* input, uint8_t* codes, float* scales, int64_t numel, int64_t group_size,
             int bits, int mantissa_bits, int type, int stochastic, int64_t seed, int64_t offset,
             const int64_t* offset_at) {
  const Quantize work{input, codes, scales, numel, group_size, bits, mantissa_bits,
                      static_cast<ElementType>(type), stochastic != 0, static_cast<uint64_t>(seed),
                      static_cast<uint64_t>(offset), offset_at};
  return enqueue(work, nullptr) == nullptr ? 0 : 1;
}
#endif
}
