// A team of threads takes a group, eight elements at a time. A group that fits into the team's registers is
// read once; a larger one is read again for its levels. hipify turns this file into HIP unchanged.

#include <opkiln/op.h>

#include <opkiln/device_element.h>
#include <opkiln/group_reduce.h>

#include "element.h"

namespace {

namespace device = opkiln::device;
using device::Bits16;
using device::Pack;
using opkiln::exchange;
using opkiln::kWarp;
using opkiln::Team;

constexpr unsigned kMostThreads = 1024;
constexpr unsigned kBackThreads = 256;
constexpr int kUnit = 8;   // elements: 16 bytes of fp16
constexpr int kHeld = 4;   // units of a group that a thread keeps in registers

struct Launch {
  Work work;
  unsigned log2_team;
  bool aligned;  // all units are full and aligned for vector access
};

struct Range {
  float most, least;

  __device__ Range exchanged(unsigned bits) const {
    return {exchange(most, bits), exchange(least, bits)};
  }
  __device__ void absorb(const Range& other) {  // fmaxf and fminf ignore NaN
    most = fmaxf(most, other.most);
    least = fminf(least, other.least);
  }
  template <bool kSymmetric>
  __device__ void add(const float* values) {
#pragma unroll
    for (int k = 0; k < kUnit; ++k) {
      if (kSymmetric) {
        most = fmaxf(most, fabsf(values[k]));
      } else {
        absorb({values[k], values[k]});
      }
    }
  }
};

// The levels of a unit, the first in the lowest byte.
struct alignas(8) Words {
  uint32_t low, high;  // `high` is used only with eight bits
};

__device__ Words load_levels(const Groups& from, int64_t element, int count, bool whole) {
  const uint8_t* const start = from.levels + (from.bits == 8 ? element : element / 2);
  if (whole) {
    return from.bits == 8 ? *reinterpret_cast<const Words*>(start)
                          : Words{*reinterpret_cast<const uint32_t*>(start), 0};
  }
  Words out{0, 0};
  for (int i = 0; i < count * from.bits / 8; ++i) {
    (i < 4 ? out.low : out.high) |= static_cast<uint32_t>(start[i]) << (i % 4 * 8);
  }
  return out;
}

__device__ void store_levels(const Words& words, const Groups& to, int64_t element, int count,
                             bool whole) {
  uint8_t* const start = to.levels + (to.bits == 8 ? element : element / 2);
  if (whole && to.bits == 8) {
    *reinterpret_cast<Words*>(start) = words;
  } else if (whole) {
    *reinterpret_cast<uint32_t*>(start) = words.low;
  } else {
    for (int i = 0; i < count * to.bits / 8; ++i) {
      start[i] = static_cast<uint8_t>((i < 4 ? words.low : words.high) >> (i % 4 * 8));
    }
  }
}

// Level k of a unit.
__device__ float level_of(const Words& words, int k, int bits) {
  if (bits == 8) {
    const uint32_t word = k < 4 ? words.low : words.high;
    return static_cast<float>(static_cast<int8_t>(word >> (k % 4 * 8)));
  }
  // The high half of a byte comes first.
  const uint32_t half = words.low >> (k / 2 * 8 + (k % 2 == 0 ? 4 : 0)) & 15u;
  return static_cast<float>(static_cast<int>(half ^ 8u) - 8);
}

template <bool kSymmetric>
__device__ Words levels_of(const float* values, const Scale& scale, int bits) {
  Words out{0, 0};
#pragma unroll
  for (int k = 0; k < kUnit; ++k) {
    const uint32_t level = scale.level<kSymmetric>(values[k]);
    if (bits == 8) {
      (k < 4 ? out.low : out.high) |= (level & 255u) << (k % 4 * 8);
    } else {
      out.low |= (level & 15u) << (k / 2 * 8 + (k % 2 == 0 ? 4 : 0));
    }
  }
  return out;
}

// Loads units of a tensor. A short unit repeats its first element, which changes no range.
template <class T>
struct TensorSource {
  __device__ static void load(const Launch& l, int64_t element, int count, float* to) {
    const T* const from = static_cast<const T*>(l.work.from) + element;
    constexpr int kWidth = 16 / sizeof(T);
    if (l.aligned) {
#pragma unroll
      for (int i = 0; i < kUnit; i += kWidth) {
        Pack<T, kWidth> pack;
        device::load(pack, from + i);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          to[i + k] = device::widen(pack.at[k], l.work.type);
        }
      }
      return;
    }
#pragma unroll
    for (int k = 0; k < kUnit; ++k) {
      to[k] = device::widen(from[k < count ? k : 0], l.work.type);
    }
  }
};

__device__ inline float round_to_half(float value) {
  return device::widen(device::narrow<Bits16>(value, ElementType::kFloat16), ElementType::kFloat16);
}

// Loads units of the sum of the parts, in fp16. (Adding two fp16
// numbers in fp32 and rounding gives the fp16 sum.)
struct PartsSource {
  __device__ static void load(const Launch& l, int64_t element, int count, float* to) {
    const Groups& parts = l.work.parts;
    const int64_t groups = parts.count / l.work.number_of_parts, elements = groups * parts.size;
#pragma unroll
    for (int k = 0; k < kUnit; ++k) {
      to[k] = 0.0f;
    }
    for (int i = 0; i < l.work.number_of_parts; ++i) {
      const Words words = load_levels(parts, i * elements + element, count, l.aligned);
      const int64_t first = i * groups;
      Back back = Back::of(parts, first + element / parts.size);
#pragma unroll
      for (int k = 0; k < kUnit; ++k) {
        if (!l.aligned && k < count) {
          back = Back::of(parts, first + (element + k) / parts.size);
        }
        to[k] = round_to_half(to[k] + round_to_half(back(level_of(words, k, parts.bits))));
      }
    }
#pragma unroll
    for (int k = 1; k < kUnit; ++k) {
      to[k] = k < count ? to[k] : to[0];
    }
  }
};

template <class Source, bool kSymmetric>
__global__ void __launch_bounds__(kMostThreads)
quantize_kernel(const OPK_GRID_CONSTANT Launch l) {
  __shared__ Range shared[kMostThreads / kWarp];
  const Work& work = l.work;
  const int64_t size = work.to.size;
  const Team team(l.log2_team);
  const int64_t index = static_cast<int64_t>(blockIdx.x) * team.count + team.index;
  // A team without a group repeats the last one, and writes nothing.
  const int64_t group = index < work.to.count ? index : work.to.count - 1;
  const int64_t start = group * size;
  const int64_t mine = team.lane * kUnit, stride = static_cast<int64_t>(team.size) * kUnit;
  const bool is_held = size <= kHeld * stride;
  const auto count = [&](int64_t at) {
    return static_cast<int>(size - at < kUnit ? size - at : kUnit);
  };
  Range range{work.with_zero ? 0.0f : -infinity(), work.with_zero ? 0.0f : infinity()};
  float held[kHeld][kUnit];
  if (is_held) {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int64_t at = mine + j * stride;
      if (at < size) {
        Source::load(l, start + at, count(at), held[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      if (mine + j * stride < size) {
        range.add<kSymmetric>(held[j]);
      }
    }
  } else {
    for (int64_t at = mine; at < size; at += stride) {
      Source::load(l, start + at, count(at), held[0]);
      range.add<kSymmetric>(held[0]);
    }
  }
  range = opkiln::reduce_team(range, team, shared);
  if (index >= work.to.count) {
    return;
  }
  const Scale scale = kSymmetric ? Scale::symmetric(range.most, work.to.bits)
                                 : Scale::asymmetric(range.least, range.most, work.to.bits);
  const int64_t place = place_of(group, work.order), to = place * size;
  if (is_held) {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int64_t at = mine + j * stride;
      if (at < size) {
        store_levels(levels_of<kSymmetric>(held[j], scale, work.to.bits), work.to, to + at,
                     count(at), l.aligned);
      }
    }
  } else {
    for (int64_t at = mine; at < size; at += stride) {
      Source::load(l, start + at, count(at), held[0]);
      store_levels(levels_of<kSymmetric>(held[0], scale, work.to.bits), work.to, to + at, count(at),
                   l.aligned);
    }
  }
  if (team.lane == 0) {
    scale.store<kSymmetric>(work.to.params, place);
  }
}

template <class T>
__global__ void __launch_bounds__(kBackThreads)
dequantize_kernel(const OPK_GRID_CONSTANT Launch l) {
  const Groups& from = l.work.to;
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * kBackThreads + threadIdx.x;
  const int64_t element = unit * kUnit, left = from.count * from.size - element;
  if (left <= 0) {
    return;
  }
  const int count = left < kUnit ? static_cast<int>(left) : kUnit;
  const Words words = load_levels(from, element, count, l.aligned);
  T* const to = static_cast<T*>(l.work.out) + element;
  if (l.aligned) {
    constexpr int kWidth = 16 / sizeof(T);
    // Divides in 32 bits where possible: 64-bit division is slow.
    const int64_t units = from.size / kUnit;
    const int64_t group = unit <= 0xffffffff && units <= 0xffffffff
        ? static_cast<uint32_t>(unit) / static_cast<uint32_t>(units)
        : unit / units;
    const Back back = Back::of(from, group);
#pragma unroll
    for (int i = 0; i < kUnit; i += kWidth) {
      Pack<T, kWidth> pack;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        pack.at[k] = device::narrow<T>(back(level_of(words, i + k, from.bits)), l.work.type);
      }
      device::store(pack, to + i);
    }
    return;
  }
  for (int k = 0; k < count; ++k) {
    const Back back = Back::of(from, (element + k) / from.size);
    to[k] = device::narrow<T>(back(level_of(words, k, from.bits)), l.work.type);
  }
}

bool is_aligned(const void* pointer, int bytes) {
  return reinterpret_cast<size_t>(pointer) % static_cast<size_t>(bytes) == 0;
}

Launch launch_of(const Work& work) {
  const bool whole = work.to.size % kUnit == 0 && work.parts.size % kUnit == 0;
  return {work, 0, whole && is_aligned(work.from, 16) && is_aligned(work.out, 16) &&
                       is_aligned(work.to.levels, work.to.bits) &&
                       is_aligned(work.parts.levels, work.to.bits)};
}

template <class Source>
void launch_quantize(const Launch& l, int64_t blocks, unsigned threads) {
  opk::launch(l.work.to.symmetric ? quantize_kernel<Source, true> : quantize_kernel<Source, false>, blocks,
              threads, 0, l);
}

void quantize(const Work& work) {
  Launch l = launch_of(work);
  while (l.log2_team < 10 && (int64_t{kUnit} * kHeld << l.log2_team) < work.to.size) {
    ++l.log2_team;
  }
  const unsigned threads = l.log2_team > 7 ? 1u << l.log2_team : 128;
  const int64_t teams = threads >> l.log2_team;
  const int64_t blocks = (work.to.count + teams - 1) / teams;
  if (work.from == nullptr) {
    launch_quantize<PartsSource>(l, blocks, threads);
  } else if (work.type == ElementType::kFloat) {
    launch_quantize<TensorSource<float>>(l, blocks, threads);
  } else {
    launch_quantize<TensorSource<Bits16>>(l, blocks, threads);
  }
}

void dequantize(const Work& work) {
  const int64_t a_block = int64_t{kBackThreads} * kUnit;
  const int64_t blocks = (work.to.count * work.to.size + a_block - 1) / a_block;
  opk::launch(work.type == ElementType::kFloat ? dequantize_kernel<float> : dequantize_kernel<Bits16>, blocks,
              kBackThreads, 0, launch_of(work));
}

}  // namespace

OPKILN_OP(deepspeed_quantize, cuda);
OPKILN_OP(deepspeed_dequantize, cuda);
OPKILN_OP(deepspeed_reduce, cuda);
