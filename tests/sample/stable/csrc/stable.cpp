#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

namespace {

using torch::stable::Tensor;

// What a test changes to tell one build from another.
constexpr int64_t kWho = 1;

int64_t who(const Tensor&) {
  return kWho;
}

Tensor axpy(const Tensor& x, const Tensor& y, double alpha) {
  Tensor out = torch::stable::empty_like(x);
  const auto* a = static_cast<const float*>(x.data_ptr());
  const auto* b = static_cast<const float*>(y.data_ptr());
  auto* to = static_cast<float*>(out.data_ptr());
  const auto factor = static_cast<float>(alpha);
  for (int64_t i = 0; i < x.numel(); ++i) {
    to[i] = factor * a[i] + b[i];
  }
  return out;
}

void scale_(Tensor x, double by) {
  auto* data = static_cast<float*>(x.data_ptr());
  for (int64_t i = 0; i < x.numel(); ++i) {
    data[i] *= static_cast<float>(by);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(SAMPLE_NAMESPACE, CPU, m) {
  m.impl("who", TORCH_BOX(&who));
  m.impl("axpy", TORCH_BOX(&axpy));
  m.impl("scale_", TORCH_BOX(&scale_));
}
