// A kernel as text: SYCL's runtime compiler takes it when the op is first called, so any C++
// compiler can build this file. icpx can, too, and could also take kernels as lambdas.

#include <cstdint>
#include <string>

#include <sycl/sycl.hpp>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

using torch::stable::Tensor;
namespace experimental = sycl::ext::oneapi::experimental;

namespace {

constexpr const char* kKernel = R"sycl(
#include <sycl/sycl.hpp>

namespace oneapi = sycl::ext::oneapi;

extern "C" SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((oneapi::experimental::nd_range_kernel<1>))
void silu_mul(const float* x, const float* y, float* out, long n) {
  const long i = oneapi::this_work_item::get_nd_item<1>().get_global_id(0);
  if (i < n) out[i] = x[i] / (1.0f + sycl::exp(-x[i])) * y[i];
}
)sycl";

constexpr size_t kGroup = 256;  // work items in a group: a multiple of every CPU's vector width

sycl::queue cpu_queue() {
  try {
    return sycl::queue(sycl::cpu_selector_v);
  } catch (const sycl::exception& error) {
    STD_TORCH_CHECK(false, "SYCL finds no CPU to run on: ", error.what(),
                    "; set OCL_ICD_FILENAMES to the path of libintelocl.so (intel-opencl-rt)");
    throw;
  }
}

// What is made once, on the first call: the device's queue and the compiled kernel.
struct Device {
  sycl::queue queue = cpu_queue();
  sycl::kernel kernel = compiled();

  sycl::kernel compiled() const {
    // The kernel gets torch's own pointers, which SYCL has not allocated.
    STD_TORCH_CHECK(queue.get_device().has(sycl::aspect::usm_system_allocations),
                    "this SYCL device cannot read the memory of the process");
    auto source = experimental::create_kernel_bundle_from_source(
        queue.get_context(), experimental::source_language::sycl, std::string(kKernel));
    return experimental::build(source).ext_oneapi_get_kernel("silu_mul");
  }
};

Tensor silu_mul(const Tensor& x, const Tensor& y) {
  STD_TORCH_CHECK(x.scalar_type() == torch::headeronly::ScalarType::Float, "x must be float32");
  STD_TORCH_CHECK(y.scalar_type() == x.scalar_type(), "y must be float32");
  STD_TORCH_CHECK(x.sizes().equals(y.sizes()), "x and y must have the same shape");
  STD_TORCH_CHECK(x.is_contiguous() && y.is_contiguous(), "x and y must be contiguous");
  Tensor out = torch::stable::empty_like(x);
  const int64_t n = x.numel();
  if (n == 0) return out;
  static Device device;
  const float* a = x.const_data_ptr<float>();
  const float* b = y.const_data_ptr<float>();
  float* o = out.mutable_data_ptr<float>();
  const size_t items = (static_cast<size_t>(n) + kGroup - 1) / kGroup * kGroup;
  device.queue
      .submit([&](sycl::handler& handler) {
        handler.set_args(a, b, o, n);
        handler.parallel_for(sycl::nd_range<1>(items, kGroup), device.kernel);
      })
      .wait_and_throw();
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sycl_op, CPU, m) {
  m.impl("silu_mul", TORCH_BOX(&silu_mul));
}
