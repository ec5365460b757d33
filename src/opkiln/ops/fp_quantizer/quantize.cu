// Quantization in one pass over memory: a block reads whole groups, 16 elements a thread and load,
// finds their largest magnitudes and writes the codes from registers. Groups that no block can hold
// are read a second time, out of the cache. No torch header; hipify turns this file into HIP as it
// is.

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <opkiln/group_reduce.h>
#include <opkiln/launch.h>

#include "encode.h"
#include "kernel.h"

namespace opkiln {
namespace fp_quantizer {
namespace {

// With no more than 64 registers a thread, four blocks share a multiprocessor: more hides what the
// arithmetic waits for, which counts where 16-bit elements become narrower than a byte.
constexpr int kThreads = 256;
constexpr int kBlocksPerProcessor = 4;

// What a thread holds at once: 128 bytes of input. Half of it would cover the memory's latency; but
// what is done once a block, or once a group, is then done half as often.
template <class T>
constexpr int kChunks = sizeof(T) == 4 ? 2 : 4;

// How groups are laid out among threads.
struct Layout {
  uint32_t chunks_per_group;
  uint32_t groups_per_tile;
  uint32_t tiles;      // of the whole input; a block takes one at a time
  uint32_t team_log2;  // of the threads that share a group
  bool teams;          // they are a power of two within a warp
  bool aligned;        // the input, to 16 bytes
  Keys keys;
};

template <class T>
struct Chunk {
  static constexpr int kWords = kChunk * static_cast<int>(sizeof(T)) / 4;
  uint32_t words[kWords];
};

struct alignas(16) Vector {
  uint32_t at[4];
};

// The elements from `start` on, zeros where there are none.
template <class T>
__device__ void load(Chunk<T>& chunk, const Quantize& work, bool aligned, int64_t start) {
  const T* const from = static_cast<const T*>(work.input) + start;
  if (aligned && start + kChunk <= work.numel) {
#pragma unroll
    for (int i = 0; i < Chunk<T>::kWords / 4; ++i) {
      const Vector part = reinterpret_cast<const Vector*>(from)[i];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        chunk.words[4 * i + k] = part.at[k];
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const uint32_t bits = start + i < work.numel ? bits_in(from[i]) : 0;
    if (sizeof(T) == 4) {
      chunk.words[i % Chunk<T>::kWords] = bits;
    } else {
      chunk.words[i / 2] = i % 2 == 0 ? bits : chunk.words[i / 2] | bits << 16;
    }
  }
}

// The bits of the largest magnitude, as fp32. Those of NaN and infinity are larger than any other.
__device__ uint32_t absmax(const Chunk<float>& chunk, ElementType) {
  uint32_t most = 0;
#pragma unroll
  for (uint32_t word : chunk.words) {
    most = max(most, word & 0x7fffffffu);
  }
  return most;
}

template <bool kBFloat16>
__device__ uint32_t absmax_of_halves(const Chunk<uint16_t>& chunk) {
  uint32_t most = 0;  // two of them
#pragma unroll
  for (uint32_t word : chunk.words) {
    most = larger_halves<kBFloat16>(most, word);
  }
  return max(most & 0x7fffu, (most >> 16) & 0x7fffu);
}

__device__ uint32_t absmax(const Chunk<uint16_t>& chunk, ElementType type) {
  if (type == ElementType::kBFloat16) {
    return absmax_of_halves<true>(chunk) << 16;
  }
  return bits_of(__half2float(__ushort_as_half(
      static_cast<uint16_t>(absmax_of_halves<false>(chunk)))));
}

// The highest bytes of the elements, four in each word: where their signs are.
__device__ void sign_bytes(const Chunk<float>& chunk, uint32_t (&out)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[i] = highest_bytes(chunk.words[4 * i], chunk.words[4 * i + 1], chunk.words[4 * i + 2],
                           chunk.words[4 * i + 3]);
  }
}

__device__ void sign_bytes(const Chunk<uint16_t>& chunk, uint32_t (&out)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[i] = __byte_perm(chunk.words[2 * i], chunk.words[2 * i + 1], 0x7531);
  }
}

// The elements times the inverse of the scale.
__device__ void scale(const Chunk<float>& chunk, ElementType, float inverse, float (&out)[kChunk]) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    out[i] = product(float_of(chunk.words[i]), inverse);
  }
}

__device__ void scale(const Chunk<uint16_t>& chunk, ElementType type, float inverse,
                      float (&out)[kChunk]) {
  if (type == ElementType::kBFloat16) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const uint32_t word = chunk.words[i / 2];
      out[i] = product(float_of(i % 2 == 0 ? word << 16 : word & 0xffff0000u), inverse);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const uint32_t word = chunk.words[i / 2];
      const auto half = static_cast<uint16_t>(i % 2 == 0 ? word & 0xffffu : word >> 16);
      out[i] = product(__half2float(__ushort_as_half(half)), inverse);
    }
  }
}

// The bytes of the codes of 16 elements fill one access for fp8 and fp4. For the others a block
// collects them first, so that here, too, neighbours write what lies side by side.
template <class F>
constexpr bool kCollects = F::kBits == 6 || F::kBits == 12;

template <class F>
struct Codes {
  static constexpr int kWords = F::kBits / 2;
  uint32_t words[kWords];
};

// Codes of the first `count` of a chunk's elements, straight to memory.
template <class F>
__device__ void store(const Codes<F>& codes, uint8_t* to, int64_t count) {
  constexpr int kBytes = Codes<F>::kWords * 4;
  if (count >= kChunk && !kCollects<F>) {
    struct alignas(kCollects<F> ? 4 : kBytes) Whole {
      uint32_t at[Codes<F>::kWords];
    };
    Whole whole;
#pragma unroll
    for (int i = 0; i < Codes<F>::kWords; ++i) {
      whole.at[i] = codes.words[i];
    }
    *reinterpret_cast<Whole*>(to) = whole;
    return;
  }
  const int bytes = count >= kChunk ? kBytes : static_cast<int>((count * F::kBits + 7) / 8);
#pragma unroll
  for (int i = 0; i < kBytes; ++i) {
    if (i < bytes) {
      to[i] = static_cast<uint8_t>(codes.words[i / 4] >> (8 * (i % 4)));
    }
  }
}

// What a block has collected, `bytes` of it. All threads must come here.
__device__ void flush(const uint32_t* collected, uint8_t* to, uint32_t bytes) {
  __syncthreads();
  uint32_t done = 0;
  if (reinterpret_cast<std::size_t>(to) % 16 == 0) {
    for (uint32_t i = threadIdx.x; i < bytes / 16; i += kThreads) {
      reinterpret_cast<Vector*>(to)[i] = reinterpret_cast<const Vector*>(collected)[i];
    }
    done = bytes / 16 * 16;
  }
  for (uint32_t i = done + threadIdx.x; i < bytes; i += kThreads) {
    to[i] = reinterpret_cast<const uint8_t*>(collected)[i];
  }
  __syncthreads();  // before it is filled again
}

template <class T, class F, bool kStochastic>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
quantize_kernel(const OPKILN_GRID_CONSTANT Quantize work, const OPKILN_GRID_CONSTANT Layout layout) {
  constexpr int kHeld = kChunks<T>;
  constexpr uint32_t kAtOnce = kThreads * kHeld;
  alignas(16) __shared__ uint32_t collected[kCollects<F> ? kAtOnce * Codes<F>::kWords : 4];
  __shared__ uint32_t maxima[kAtOnce];
  const uint32_t per_group = layout.chunks_per_group;
  const uint64_t offset = kStochastic && work.offset_at != nullptr
      ? static_cast<uint64_t>(*work.offset_at)
      : work.offset;

  for (uint32_t tile = blockIdx.x; tile < layout.tiles; tile += gridDim.x) {
    const int64_t first_group = static_cast<int64_t>(tile) * layout.groups_per_tile;
    const int64_t first_chunk = first_group * per_group;
    const int64_t left = (work.numel + kChunk - 1) / kChunk - first_chunk;
    const uint32_t all = layout.groups_per_tile * per_group;
    const uint32_t here = left < all ? static_cast<uint32_t>(left) : all;
    const bool held = here <= kAtOnce;

    Chunk<T> chunks[kHeld];
    uint32_t most[kHeld] = {};
    for (uint32_t base = 0; base < here; base += kAtOnce) {
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
        const int64_t chunk = first_chunk + base + j * kThreads + threadIdx.x;
        load(chunks[j], work, layout.aligned, chunk * kChunk);
      }
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
        // A chunk beyond this tile's belongs to another's group.
        const bool mine = base + j * kThreads + threadIdx.x < here;
        most[j] = max(most[j], mine ? absmax(chunks[j], work.type) : 0);
      }
    }

    uint32_t group[kHeld];  // of each chunk, counted from the tile's first
    if (layout.teams) {
      for (unsigned bits = 1; bits < per_group; bits *= 2) {
#pragma unroll
        for (int j = 0; j < kHeld; ++j) {
          most[j] = max(most[j], exchange(most[j], bits));
        }
      }
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
        group[j] = (j * kThreads + threadIdx.x) >> layout.team_log2;
      }
    } else {
      for (uint32_t i = threadIdx.x; i < layout.groups_per_tile; i += kThreads) {
        maxima[i] = 0;
      }
      __syncthreads();
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
        const uint32_t chunk = j * kThreads + threadIdx.x;
        group[j] = layout.groups_per_tile == 1 ? 0 : chunk / per_group;
        bool speaks = chunk < here;
        if (per_group % kWarp == 0) {  // a warp's chunks are of one group
          for (unsigned bits = 1; bits < kWarp; bits *= 2) {
            most[j] = max(most[j], exchange(most[j], bits));
          }
          speaks = speaks && threadIdx.x % kWarp == 0;
        }
        if (speaks) {
          atomicMax(&maxima[group[j]], most[j]);
        }
      }
      __syncthreads();
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
        most[j] = j * kThreads + threadIdx.x < here ? maxima[group[j]] : 0;
      }
      // Those that come to the next tile first must not clear what others are about to read.
      __syncthreads();
    }

    float inverse[kHeld];
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const uint32_t chunk = j * kThreads + threadIdx.x;
      const float found = scale_for<F>(most[j]);
      inverse[j] = inverse_of(found);
      if (chunk < here && chunk == group[j] * per_group) {
        work.scales[first_group + group[j]] = found;
      }
    }

    for (uint32_t base = 0; base < here; base += kAtOnce) {
      if (!held) {
#pragma unroll
        for (int j = 0; j < kHeld; ++j) {
          const int64_t chunk = first_chunk + base + j * kThreads + threadIdx.x;
          load(chunks[j], work, layout.aligned, chunk * kChunk);
        }
      }
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
        const uint32_t place = j * kThreads + threadIdx.x;
        const int64_t chunk = first_chunk + base + place;
        float values[kChunk];
        scale(chunks[j], work.type, inverse[j], values);
        Codes<F> codes;
        if (kStochastic) {
          uint32_t signs[4];
          sign_bytes(chunks[j], signs);
          encode_stochastic<F>(values, signs, static_cast<uint64_t>(chunk) * 2, offset, layout.keys,
                               codes.words);
        } else {
          encode_nearest<F>(values, codes.words);
        }
        const bool is_nan = most[j] >= kInfinity;
#pragma unroll
        for (uint32_t& word : codes.words) {
          word = is_nan ? 0 : word;
        }
        if (kCollects<F>) {
#pragma unroll
          for (int i = 0; i < Codes<F>::kWords; ++i) {
            collected[place * Codes<F>::kWords + i] = codes.words[i];
          }
        } else if (base + place < here) {
          store<F>(codes, work.codes + chunk * (Codes<F>::kWords * 4), work.numel - chunk * kChunk);
        }
      }
      if (kCollects<F>) {
        const int64_t start = first_chunk + base;
        const uint32_t chunks_now = here - base < kAtOnce ? here - base : kAtOnce;
        const int64_t elements = work.numel - start * kChunk;
        const uint32_t bytes = elements >= static_cast<int64_t>(chunks_now) * kChunk
            ? chunks_now * Codes<F>::kWords * 4
            : static_cast<uint32_t>((elements * F::kBits + 7) / 8);
        flush(collected, work.codes + start * (Codes<F>::kWords * 4), bytes);
      }
    }
  }
}

template <class T>
Layout layout_of(const Quantize& work) {
  constexpr uint32_t kAtOnce = kThreads * kChunks<T>;
  Layout out;
  const auto per_group = static_cast<uint32_t>(work.group_size / kChunk);
  out.chunks_per_group = per_group;
  out.groups_per_tile = per_group >= kAtOnce ? 1 : kAtOnce / per_group;
  if (out.groups_per_tile >= 4) {
    out.groups_per_tile -= out.groups_per_tile % 4;  // codes of each tile start at 16 bytes
  }
  out.teams = per_group <= kWarp && (per_group & (per_group - 1)) == 0;
  out.team_log2 = 0;
  while (out.teams && 1u << out.team_log2 < per_group) {
    ++out.team_log2;
  }
  const int64_t groups = (work.numel + work.group_size - 1) / work.group_size;
  out.tiles = static_cast<uint32_t>((groups + out.groups_per_tile - 1) / out.groups_per_tile);
  out.keys = random_keys<kRounds>(work.seed);
  out.aligned = reinterpret_cast<std::size_t>(work.input) % 16 == 0;
  return out;
}

cudaError_t processors(unsigned& count) {
  int device = 0, found = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&found, cudaDevAttrMultiProcessorCount, device);
  }
  count = static_cast<unsigned>(found);
  return error;
}

template <class T, class F>
cudaError_t launch_for(const Quantize& work, cudaStream_t stream) {
  const Layout layout = layout_of<T>(work);
  unsigned blocks = layout.tiles;
  if (layout.chunks_per_group > kThreads * kChunks<T>) {
    // What is read twice should still be in the cache: so no more groups at once than fit there.
    unsigned count = 0;
    const cudaError_t error = processors(count);
    if (error != cudaSuccess) {
      return error;
    }
    blocks = blocks < 2 * count ? blocks : 2 * count;
  }
  return device::launch<Quantize, Layout>(
      work.stochastic ? quantize_kernel<T, F, true> : quantize_kernel<T, F, false>, blocks,
      kThreads, stream, work, layout);
}

}  // namespace

const char* enqueue(const Quantize& work, void* stream) {
  if (work.numel == 0) {
    return nullptr;
  }
  cudaError_t error = cudaSuccess;
  with_format(work.bits, work.mantissa_bits, [&](auto format) {
    using F = decltype(format);
    error = work.type == ElementType::kFloat
        ? launch_for<float, F>(work, static_cast<cudaStream_t>(stream))
        : launch_for<uint16_t, F>(work, static_cast<cudaStream_t>(stream));
  });
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace fp_quantizer
}  // namespace opkiln
