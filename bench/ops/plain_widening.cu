// The least that dequantizing costs: a few bytes read for every 16 written, by a kernel that does
// nothing else. What the quantizers' ways back are held against.

#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kThreads = 256;

// A thread writes 16 bytes: of those that were tried, one to eight of them in blocks of 64 to 1024,
// with and without hints, no other was faster by more than half a percent.
template <class Narrow>
__global__ void __launch_bounds__(kThreads) widen(const Narrow* from, uint4* to, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) {
    const auto value = static_cast<uint32_t>(from[i]);
    __stcs(to + i, make_uint4(value, value, value, value));
  }
}

}  // namespace

// `bytes`, 2, 4 or 8, are read for each of `count` 16 bytes; on the default stream. CUDA's error, 0
// where there is none.
extern "C" int plain_widening(const void* from, void* to, int64_t count, int bytes) {
  const auto blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
  uint4* const out = static_cast<uint4*>(to);
  if (bytes == 2) {
    widen<<<blocks, kThreads>>>(static_cast<const uint16_t*>(from), out, count);
  } else if (bytes == 4) {
    widen<<<blocks, kThreads>>>(static_cast<const uint32_t*>(from), out, count);
  } else if (bytes == 8) {
    widen<<<blocks, kThreads>>>(static_cast<const uint64_t*>(from), out, count);
  } else {
    return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}
