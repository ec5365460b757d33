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

  static void pack(const packbits::Signs& signs, int32_t) {
    over_bytes(signs, pack_bytes);
  }

  static void unpack(const packbits::Signs& signs, int32_t) {
    over_bytes(signs, unpack_bytes);
  }

 private:
  // In torch's own thread pool; few bytes stay on the calling thread.
  static void over_bytes(const packbits::Signs& signs,
                         void (*body)(const packbits::Signs&, int64_t, int64_t)) {
    if (signs.numel > 0) {
      torch::stable::parallel_for(0, (signs.numel + 7) / 8, kGrainBytes / 32,
                                  [&](int64_t first, int64_t last) { body(signs, first, last); });
    }
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(opkiln, CPU, m) {
  packing::Functions<Host>::implement(m);
}
