// Packs signs into bits, and unpacks them. To pack, a thread makes whole bytes, each from
// one or two 16-byte loads. To unpack, it expands as many bits as one 16-byte store takes.
// No warp intrinsics, so hipify turns this file into HIP unchanged.

#include <opkiln/op.h>

#include "signs.h"

namespace {

constexpr int kThreads = 256;
constexpr int kTurns = 4;  // bytes per thread, which is the number of independent loads in flight

struct alignas(16) Sixteen {
  uint32_t at[4];
};

struct Work {
  Signs signs;
  bool aligned;  // the elements are aligned to 16 bytes
};

// Loads eight elements into words. Of two 16-bit elements, the first is in the low half.
template <bool kWide>
__device__ void load_eight(const Work& l, int64_t byte, int count, uint32_t* words) {
  constexpr int kBytes = kWide ? 32 : 16;
  const char* const start = static_cast<const char*>(l.signs.elements) + byte * kBytes;
  if (l.aligned && count == 8) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      const Sixteen part = reinterpret_cast<const Sixteen*>(start)[i];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        words[4 * i + k] = part.at[k];
      }
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    if (kWide) {
      words[k] = k < count ? reinterpret_cast<const uint32_t*>(start)[k] : ~0u;
    } else {
      const uint32_t half = k < count ? reinterpret_cast<const uint16_t*>(start)[k] : 0xffffu;
      words[k / 2] = k % 2 == 0 ? half : words[k / 2] | half << 16;
    }
  }
}

__device__ inline int count_of(const Work& l, int64_t byte) {
  const int64_t left = l.signs.numel - byte * 8;
  return left < 8 ? static_cast<int>(left) : 8;
}

template <bool kWide>
__global__ void __launch_bounds__(kThreads) pack_kernel(const OPK_GRID_CONSTANT Work l) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * kTurns) + threadIdx.x;
  uint32_t words[kTurns][kWide ? 8 : 4];
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    const int64_t byte = first + t * kThreads;
    if (byte * 8 < l.signs.numel) {
      load_eight<kWide>(l, byte, count_of(l, byte), words[t]);
    }
  }
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    const int64_t byte = first + t * kThreads;
    if (byte * 8 < l.signs.numel) {
      uint32_t negative = 0;
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const uint32_t sign =
            kWide ? words[t][k] >> 31 : words[t][k / 2] >> (k % 2 == 0 ? 15 : 31) & 1u;
        negative |= sign << (7 - k);
      }
      l.signs.bytes[byte] = static_cast<uint8_t>(~negative);
    }
  }
}

// A unit is 16 bytes: the elements of one byte, or of half a byte.
template <bool kWide>
__global__ void __launch_bounds__(kThreads) unpack_kernel(const OPK_GRID_CONSTANT Work l) {
  constexpr int kUnit = kWide ? 4 : 8;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * kTurns) + threadIdx.x;
  uint32_t negative[kTurns];
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    const int64_t at = (first + t * kThreads) * kUnit;
    negative[t] = at < l.signs.numel ? ~static_cast<uint32_t>(l.signs.bytes[at / 8]) : 0;
  }
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    const int64_t at = (first + t * kThreads) * kUnit;
    if (at < l.signs.numel) {
      const uint32_t bits = kWide && at % 8 != 0 ? negative[t] << 4 : negative[t];
      uint32_t words[4];
#pragma unroll
      for (int k = 0; k < kUnit; ++k) {
        const uint32_t sign = bits >> (7 - k) & 1u;
        if (kWide) {
          words[k % 4] = l.signs.one | sign << 31;
        } else {
          const uint32_t half = l.signs.one | sign << 15;
          words[k / 2] = k % 2 == 0 ? half : words[k / 2] | half << 16;
        }
      }
      const int64_t left = l.signs.numel - at;
      char* const start = static_cast<char*>(l.signs.elements) + at * (16 / kUnit);
      if (l.aligned && left >= kUnit) {
        *reinterpret_cast<Sixteen*>(start) = {words[0], words[1], words[2], words[3]};
        continue;
      }
#pragma unroll
      for (int k = 0; k < kUnit; ++k) {
        if (k < left && kWide) {
          reinterpret_cast<uint32_t*>(start)[k] = words[k % 4];
        } else if (k < left) {
          reinterpret_cast<uint16_t*>(start)[k] =
              static_cast<uint16_t>(words[k / 2] >> (k % 2 * 16));
        }
      }
    }
  }
}

void launch(void (*kernel)(Work), int elements, const Signs& signs) {
  const Work work{signs, reinterpret_cast<size_t>(signs.elements) % 16 == 0};
  const int64_t a_block = int64_t{elements} * kThreads * kTurns;
  opk::launch(kernel, (signs.numel + a_block - 1) / a_block, kThreads, 0, work);
}

void pack(const Signs& signs) {
  launch(signs.wide ? pack_kernel<true> : pack_kernel<false>, 8, signs);
}

void unpack(const Signs& signs) {
  launch(signs.wide ? unpack_kernel<true> : unpack_kernel<false>, signs.wide ? 4 : 8, signs);
}

}  // namespace

OPKILN_OP(packbits, cuda);
OPKILN_OP(unpackbits, cuda);
