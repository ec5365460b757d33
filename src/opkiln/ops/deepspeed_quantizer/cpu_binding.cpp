// The op on the CPU: threads and the registration.

#include "bindings.h"
#include "cpu.h"

namespace {

using namespace opkiln;
using deepspeed_quantizer::Work;

struct Host {
  static int32_t device_of(const char* name, const Tensor& tensor) {
    if (!tensor.is_cpu()) {
      refuse(std::string(name) + " is not on the CPU");
    }
    return kCPU;
  }

  static void quantize(const Work& work, int32_t) {
    over_groups(work, quantize_groups);
  }

  static void dequantize(const Work& work, int32_t) {
    over_groups(work, dequantize_groups);
  }

 private:
  // In torch's own thread pool; few bytes stay on the calling thread.
  static void over_groups(const Work& work, void (*body)(const Work&, int64_t, int64_t)) {
    const int64_t grain = kGrainBytes / (int64_t{4} * work.to.size);
    torch::stable::parallel_for(
        0, work.to.count, grain < 1 ? 1 : grain,
        [&](int64_t first, int64_t last) { body(work, first, last); });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(opkiln, CPU, m) {
  quantizing::Functions<Host>::implement(m);
}
