// The op on the CPU: threads and the registration.

#include "bindings.h"
#include "cpu.h"

namespace {

using namespace opkiln;

struct Host {
  static int32_t device_of(const char* name, const Tensor& tensor) {
    if (!tensor.is_cpu()) {
      refuse(std::string(name) + " is not on the CPU");
    }
    return kCPU;
  }

  static void quantize(const quantizer::Work& work, const quantizer::Parts& parts, int32_t) {
    over_groups(work, [&](int64_t first, int64_t last) {
      quantize_groups(work, parts, first, last);
    });
  }

  static void dequantize(const quantizer::Work& work, int32_t) {
    over_groups(work, [&](int64_t first, int64_t last) { dequantize_groups(work, first, last); });
  }

 private:
  // In torch's own thread pool; few bytes stay on the calling thread.
  template <class Body>
  static void over_groups(const quantizer::Work& work, const Body& body) {
    const int64_t groups = quantizer::groups_of(work.numel, work.format);
    if (groups > 0) {
      const int64_t grain = kGrainBytes / (int64_t{4} * work.format.group_size);
      torch::stable::parallel_for(0, groups, grain < 1 ? 1 : grain, body);
    }
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(opkiln, CPU, m) {
  quantizing::Functions<Host>::implement(m);
}
