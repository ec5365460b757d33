// y = a * x + b with opkiln's header: kernel, launch and binding in one file.

#include <opkiln/op.h>

__global__ void axpb_kernel(const float* x, float* y, int64_t n, float a, float b) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) {
    y[i] = a * x[i] + b;
  }
}

opk::Tensor axpb(const opk::Tensor& x, double a, double b) {
  opk::check_contiguous(x);
  opk::Tensor y = opk::empty_like(x);
  const int64_t n = x.numel();
  opk::launch(axpb_kernel, (n + 255) / 256, 256, 0, x.data<const float>(), y.data<float>(), n,
              static_cast<float>(a), static_cast<float>(b));
  return y;
}
OPKILN_OP(axpb, cuda);
