// Quantizes. A group is read once: threads hold it in registers between finding its largest magnitude and
// writing the codes. A second read, from the cache, is needed only for groups too large for a block or
// cluster, for tails, and for unaligned tensors. hipify turns this file into HIP unchanged.

#include <opkiln/op.h>

#include <opkiln/whole_groups_launch.h>

#include "chunk.h"
#include "quantize.h"

namespace opkiln {
namespace fp_quantizer {
namespace {

constexpr int kThreads = 256;

struct Layout {
  unsigned log2_chunks;  // for whole_groups.h
  unsigned log2_team;    // threads per group, for the other groups
  int64_t first;         // the first of the other groups
  bool aligned;          // the input is aligned to 16 bytes
  Keys keys;
};

// For fp8 and fp4, the codes of 16 elements fill one access. For the other formats a warp first collects
// codes in shared memory, so that neighbouring threads write neighbouring bytes here, too.
template <class F>
constexpr bool kCollects = F::kBits == 6 || F::kBits == 12;

// The codes of a warp, which fill three accesses of each thread.
template <class F>
struct alignas(16) Collected {
  uint32_t words[kCollects<F> ? kChunksPerWarp * Codes<F>::kWords : 1];
};

template <class F>
__device__ void put(Collected<F>& collected, const Codes<F>& codes, unsigned chunk) {
#pragma unroll
  for (int i = 0; i < Codes<F>::kWords; ++i) {
    collected.words[chunk * Codes<F>::kWords + i] = codes.words[i];
  }
}

template <class F>
__device__ void flush(const Collected<F>& collected, uint8_t* to) {
  struct alignas(F::kBits == 6 ? 8 : 16) Access {
    uint32_t at[F::kBits / 3];
  };
  sync_warp();
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const unsigned at = i * kWarp + threadIdx.x % kWarp;
    reinterpret_cast<Access*>(to)[at] = reinterpret_cast<const Access*>(collected.words)[at];
  }
}

template <class F>
__device__ void store(const Codes<F>& codes, uint8_t* to) {
  struct alignas(kCollects<F> ? 4 : Codes<F>::kBytes) Access {
    Codes<F> codes;
  };
  *reinterpret_cast<Access*>(to) = {codes};
}

// Blocks per multiprocessor, which limits the registers of a thread.
template <class Type>
constexpr int kBlocksPerProcessor = sizeof(typename Type::Storage) == 4 ? 4 : 6;

template <class Type, class F, bool kStochastic>
__global__ void __launch_bounds__(kGroupThreads, kBlocksPerProcessor<Type>)
quantize_groups_kernel(const OPK_GRID_CONSTANT Quantize work,
                       const OPK_GRID_CONSTANT Layout layout) {
  __shared__ Shared<Magnitude> shared;
  __shared__ Collected<F> collected[kCollects<F> ? kGroupThreads / kWarp : 1];
  begin_groups(layout.log2_chunks, shared);
  const int64_t first = first_chunk();
  Chunk<Type> chunks[kChunksPerThread];
#pragma unroll
  for (int k = 0; k < kChunksPerThread; ++k) {
    chunks[k].load(work.input, (first + k * kWarp) * kChunk);
  }
  const uint64_t offset = kStochastic ? offset_of(work) : 0;
  Magnitude most[kChunksPerThread];
#pragma unroll
  for (int k = 0; k < kChunksPerThread; ++k) {
    most[k] = chunks[k].magnitude();
  }
  reduce_groups(most, layout.log2_chunks, shared);

  const unsigned lane = threadIdx.x % kWarp;
  Collected<F>& mine = collected[kCollects<F> ? threadIdx.x / kWarp : 0];
  Scale<F> scale(Type::widen_magnitude(most[0].bits));
#pragma unroll
  for (int k = 0; k < kChunksPerThread; ++k) {
    if (k > 0 && layout.log2_chunks <= 5) {
      scale = Scale<F>(Type::widen_magnitude(most[k].bits));
    }
    const int64_t chunk = first + k * kWarp, group = chunk >> layout.log2_chunks;
    const Codes<F> codes = encode(chunks[k], scale, kStochastic, chunk, offset, layout.keys);
    if (kCollects<F>) {
      put(mine, codes, lane + k * kWarp);
    } else {
      store(codes, work.codes + chunk * Codes<F>::kBytes);
    }
    if (chunk == group << layout.log2_chunks) {
      work.scales[group] = scale.scale;
    }
  }
  if (kCollects<F>) {
    flush(mine, work.codes + (first - lane) * Codes<F>::kBytes);
  }
}

// Loads a chunk that may be unaligned and may be cut off by the tensor's end.
template <class Type>
__device__ Chunk<Type> load_any(const Quantize& work, bool aligned, int64_t start) {
  Chunk<Type> chunk;
  const int64_t left = work.numel - start;
  if (aligned && left >= kChunk) {
    chunk.load(work.input, start);
  } else {
    chunk.load_part(work.input, start, left < kChunk ? static_cast<int>(left) : kChunk);
  }
  return chunk;
}

// Stores the codes of the chunk at element `at`, which may have fewer than 16 elements.
template <class F>
__device__ void store_any(const Quantize& work, const Codes<F>& codes, int64_t at) {
  uint8_t* const to = work.codes + at / kChunk * Codes<F>::kBytes;
  const int64_t here = work.numel - at;
  if (here >= kChunk) {
    store(codes, to);
    return;
  }
  const int bytes = static_cast<int>((here * F::kBits + 7) / 8);
#pragma unroll
  for (int i = 0; i < Codes<F>::kBytes; ++i) {
    if (i < bytes) {
      to[i] = static_cast<uint8_t>(codes.words[i / 4] >> (8 * (i % 4)));
    }
  }
}

// The other groups. If the team's registers can hold a group, it is read once, and
// every thread loads: one without a chunk of its own repeats the last.
template <class Type, class F>
__global__ void __launch_bounds__(kThreads)
quantize_any_kernel(const OPK_GRID_CONSTANT Quantize work,
                    const OPK_GRID_CONSTANT Layout layout) {
  __shared__ Magnitude shared[kThreads / kWarp];
  const Team team(layout.log2_team);
  const int64_t groups = (work.numel + work.group_size - 1) / work.group_size;
  const int64_t wanted =
      layout.first + static_cast<int64_t>(blockIdx.x) * team.count + team.index;
  const int64_t group = wanted < groups ? wanted : groups - 1;
  const int64_t start = group * work.group_size, left = work.numel - start;
  const int64_t end = start + (left < work.group_size ? left : work.group_size);
  const int64_t stride = static_cast<int64_t>(team.size) * kChunk;
  const int64_t mine = start + team.lane * kChunk;
  const bool is_held = layout.aligned && left >= work.group_size && end <= start + 2 * stride;
  Chunk<Type> chunks[2];
  Magnitude most{0};
  if (is_held) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      chunks[j].load(work.input, mine + j * stride < end ? mine + j * stride : end - kChunk);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      most.absorb(chunks[j].magnitude());
    }
  } else {
    for (int64_t at = mine; at < end; at += stride) {
      most.absorb(load_any<Type>(work, layout.aligned, at).magnitude());
    }
  }
  most = reduce_team(most, team, shared);
  if (wanted >= groups) {
    return;
  }
  const Scale<F> scale(Type::widen_magnitude(most.bits));
  const uint64_t offset = work.stochastic ? offset_of(work) : 0;
  for (int64_t at = mine; at < end; at += stride) {
    if (!is_held) {
      chunks[0] = load_any<Type>(work, layout.aligned, at);
    }
    store_any(work,
              encode(chunks[0], scale, work.stochastic, at / kChunk, offset, layout.keys), at);
    chunks[0] = chunks[1];
  }
  if (team.lane == 0) {
    work.scales[group] = scale.scale;
  }
}

template <class Type, class F>
void launch_for(const Quantize& work) {
  const auto kernel = work.stochastic ? quantize_groups_kernel<Type, F, true>
                                      : quantize_groups_kernel<Type, F, false>;
  const int64_t groups = (work.numel + work.group_size - 1) / work.group_size;
  Layout layout{};
  layout.aligned = reinterpret_cast<size_t>(work.input) % 16 == 0;
  layout.keys = random_keys<kRounds>(work.seed);
  // Shared memory for collected codes is sized for the largest block, so use the largest block.
  const device::WholeGroups whole(
      work.group_size, layout.aligned ? work.numel / work.group_size : 0,
      kCollects<F> ? kGroupThreads : 128, [&] { return device::has_clusters(kernel); });
  layout.log2_chunks = whole.log2_chunks;
  device::launch(kernel, whole, work, layout);
  if (whole.groups < groups) {
    layout.first = whole.groups;
    while (layout.log2_team < 8 && int64_t{2 * kChunk} << layout.log2_team < work.group_size) {
      ++layout.log2_team;
    }
    const int64_t a_block = kThreads >> layout.log2_team;
    opk::launch(quantize_any_kernel<Type, F>, (groups - layout.first + a_block - 1) / a_block, kThreads, 0, work,
                layout);
  }
}

void run(const Quantize& work) {
  with_format(work.bits, work.mantissa_bits, [&](auto format) {
    using F = decltype(format);
    switch (work.type) {
      case ElementType::kFloat:
        return launch_for<Float, F>(work);
      case ElementType::kBFloat16:
        return launch_for<BFloat, F>(work);
      case ElementType::kFloat16:
        return launch_for<Half, F>(work);
    }
  });
}

OPKILN_OP(fp_quantize, cuda);

}  // namespace
}  // namespace fp_quantizer
}  // namespace opkiln
