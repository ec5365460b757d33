// The binding on torch's stable ABI: libtorch_cuda is not linked to, as a CPU torch has none.

#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

using torch::stable::Tensor;

const char* axpb_enqueue(const float* x, float* y, int64_t n, float a, float b, void* stream);

namespace {

void* current_stream(int32_t device) {
  using Getter = int32_t(int32_t, void**);
  static Getter* const getter = [] {
    void* const library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    void* const found = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
    return reinterpret_cast<Getter*>(found);
  }();
  void* stream = nullptr;
  STD_TORCH_CHECK(getter != nullptr && getter(device, &stream) == 0, "torch gives no stream");
  return stream;
}

Tensor axpb(Tensor x, double a, double b) {
  STD_TORCH_CHECK(x.is_contiguous(), "x is not contiguous");
  const int32_t device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  Tensor y = torch::stable::empty_like(x);
  const char* const error =
      axpb_enqueue(x.const_data_ptr<float>(), y.mutable_data_ptr<float>(), x.numel(),
                   static_cast<float>(a), static_cast<float>(b), current_stream(device));
  STD_TORCH_CHECK(error == nullptr, error);
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(opkiln_bench, CUDA, m) {
  m.impl("axpb", TORCH_BOX(&axpb));
}
