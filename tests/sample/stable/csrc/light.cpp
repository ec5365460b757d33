#include <opkiln/op.h>

using opk::Tensor;

namespace {

// What a test changes to tell one build from another.
constexpr int64_t kWho = 1;

}  // namespace

int64_t who(const Tensor&) {
  return kWho;
}
OPKILN_OP(who, cpu);

Tensor axpy(const Tensor& x, const Tensor& y, double alpha) {
  Tensor out = opk::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) {
    out.data<float>()[i] =
        static_cast<float>(alpha) * x.data<const float>()[i] + y.data<const float>()[i];
  }
  return out;
}
OPKILN_OP(axpy, cpu);

void scale_(Tensor& x, double by) {
  for (int64_t i = 0; i < x.numel(); ++i) x.data<float>()[i] *= static_cast<float>(by);
}
OPKILN_OP(scale_, cpu);
