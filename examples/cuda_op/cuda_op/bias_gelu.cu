#include <opkiln/op.h>
using opk::Tensor;

__global__ void kernel(const float* x, const float* bias, float* out, int64_t count, int64_t columns) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    const float v = x[i] + bias[i % columns];
    out[i] = 0.5f * v * (1.0f + erff(v * 0.70710678f));
  }
}

Tensor bias_gelu(const Tensor& x, const Tensor& bias) {
  opk::check_contiguous(x, bias);
  OPK_CHECK(x.dim() > 0 && x.size(-1) == bias.numel(), "bias must have as many elements as x has columns");
  Tensor out = opk::empty_like(x);
  const float *a = x.data<const float>(), *b = bias.data<const float>();
  const int64_t count = x.numel(), blocks = (count + 255) / 256;
  opk::launch(kernel, blocks < 65536 ? blocks : 65536, 256, 0, a, b, out.data<float>(), count, bias.numel());
  return out;
}
OPKILN_OP(bias_gelu, cuda);
