#include <opkiln/op.h>
using opk::Tensor;

Tensor bias_gelu(const Tensor& x, const Tensor& bias) {
  opk::check_contiguous(x, bias);
  OPK_CHECK(x.dim() > 0 && x.size(-1) == bias.numel(), "bias must have as many elements as x has columns");
  Tensor out = opk::empty_like(x);
  const int64_t columns = bias.numel();
  const float *a = x.data<const float>(), *b = bias.data<const float>();
  float* o = out.data<float>();
  opk::parallel_for(0, x.numel(), 1 << 14, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float v = a[i] + b[i % columns];
      o[i] = 0.5f * v * (1.0f + __builtin_erff(v * 0.70710678f));
    }
  });
  return out;
}
OPKILN_OP(bias_gelu, cpu);
