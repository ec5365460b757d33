#include <opkiln/op.h>
using opk::Tensor;

Tensor scaled_add(const Tensor& x, const Tensor& y, double scale) {
  OPK_SERVED(x.sizes() == y.sizes() && x.is_contiguous() && y.is_contiguous(), "shapes or strides differ");
  OPK_SERVED(x.dtype() == opk::DType::float32 && y.dtype() == x.dtype(), "x is ", x.dtype(), ", y ", y.dtype());
  Tensor out = opk::empty_like(x);
  const float *a = x.data<const float>(), *b = y.data<const float>();
  float* o = out.data<float>();
  opk::parallel_for(0, x.numel(), 1 << 15, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) o[i] = a[i] + static_cast<float>(scale) * b[i];
  });
  return out;
}
OPKILN_OP(scaled_add, cpu);
