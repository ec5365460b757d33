// Softmax on a GPU. A team of neighbouring threads has a row: a few threads for a short row, up to a block
// for a long one. Each thread keeps 32 elements in registers, so memory is read once and written once. For
// rows that need a whole block, a thread keeps 64 unconverted elements, so that the SM has room for a second
// block, which loads while this one computes. Rows that exceed a block's registers or are not aligned to 16
// bytes are read twice, element by element; the second read hits the cache.

#include <opkiln/op.h>

#include <opkiln/fast_math.h>
#include <opkiln/group_reduce.h>
#include <opkiln/sixteen_bytes.h>

#include "softmax.h"

namespace {

using opkiln::Team;
using opkiln::device::Sixteen;
using softmax::Row;
using softmax::Work;

constexpr int kHeld = 32;  // elements in a thread's registers
constexpr int kLongPacks = 8;   // 16-byte loads that a thread keeps of a long row
constexpr int kLongThreads = 512;
constexpr int kPassing = 8;  // elements in flight of a row that is read twice
constexpr int kMostThreads = 1024;
constexpr int kBiasedThreads = 512;  // masks and other biases take more registers

constexpr float kLog2e = 1.4426950408889634f;

// What is added to the scores of a row that is held in registers. A mask alone is loaded with the scores, because the
// scores would have to wait for it otherwise; in a kernel with all biases there are no registers for that.
enum class Bias : uint8_t { kNone, kMask, kAny };

struct Launch {
  Work work;
  unsigned log2_team;
};

struct Max {
  float value;
  __device__ Max exchanged(unsigned bits) const { return {opkiln::exchange(value, bits)}; }
  __device__ void absorb(Max other) { value = fmaxf(value, other.value); }
};
struct Sum {
  float value;
  __device__ Sum exchanged(unsigned bits) const { return {opkiln::exchange(value, bits)}; }
  __device__ void absorb(Sum other) { value += other.value; }
};

__device__ inline float minus_infinity() { return __uint_as_float(0xff800000u); }

// e^(value - most). The approximate fast_exp2 serves 16-bit results. The rounding of `most` * log2(e) changes all
// elements of a row by the same factor, which cancels with the sum's.
template <class T>
__device__ inline float power(float value, float most) {
  return sizeof(T) == 4 ? expf(value - most) : opkiln::device::fast_exp2(fmaf(value, kLog2e, -most * kLog2e));
}

// The position bias of a score.
__device__ inline float alibi(const Row& row, int column) {
  return row.slope * static_cast<float>(column - row.position);
}

// Adds the mask and ALiBi to neighbouring scores, and hides invisible keys.
template <class T>
__device__ inline void add_bias(const Work& work, const Row& row, int column, float* values) {
  constexpr int kCount = Sixteen<T>::kCount;
  if (work.mask && work.wide_mask) {
    const float* const from = static_cast<const float*>(work.mask) + row.mask + column;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const Sixteen<float> pack = reinterpret_cast<const Sixteen<float>*>(from)[i / 4];
#pragma unroll
      for (int k = 0; k < 4; ++k) values[i + k] += pack[k];
    }
  } else if (work.mask) {
    const Sixteen<T> mask = *reinterpret_cast<const Sixteen<T>*>(static_cast<const T*>(work.mask) + row.mask + column);
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] += mask[i];
  }
  if (work.slopes) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] += alibi(row, column + i);
  }
  if (column < row.first || column + kCount > row.last) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (column + i < row.first || column + i >= row.last) values[i] = minus_infinity();
    }
  }
}

// A score in a row with any strides; minus infinity if it is hidden or past the end.
template <class T>
__device__ inline float score(const Work& work, const Row& row, int column) {
  if (column < row.first || column >= row.last) return minus_infinity();
  float value = float(static_cast<const T*>(work.x)[row.x + column]) * work.scale;
  if (work.mask) {
    const int64_t at = row.mask + column * work.mask_strides[3];
    value += work.wide_mask ? static_cast<const float*>(work.mask)[at]
                            : float(static_cast<const T*>(work.mask)[at]);
  }
  return value + alibi(row, column);
}

// A row without visible keys gives zeros instead of NaN.
__device__ inline float factor_of(float sum) { return sum == 0 ? 0.0f : 1.0f / sum; }
__device__ inline float finite_or_zero(float most) { return most == minus_infinity() ? 0.0f : most; }

__device__ inline Row my_row(const Work& work, const Team& team, bool* mine) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * team.count + team.index;
  *mine = index < work.rows;
  Row row = softmax::row_of(work, *mine ? static_cast<int>(index) : 0);
  if (!*mine) row.first = row.last = 0;
  return row;
}

template <class T, Bias kBias>
__global__ void __launch_bounds__(kBias == Bias::kNone ? kMostThreads : kBiasedThreads,
                                  kBias == Bias::kNone || sizeof(T) == 4 ? 1 : 2)
    held_kernel(const OPK_GRID_CONSTANT Launch l) {
  opk::wait_for_previous();
  using Pack = Sixteen<T>;
  constexpr int kCount = Pack::kCount, kPacks = kHeld / kCount;
  __shared__ Max maxima[kMostThreads / opkiln::kWarp];
  __shared__ Sum sums[kMostThreads / opkiln::kWarp];
  const Team team(l.log2_team);
  bool mine;
  const Row row = my_row(l.work, team, &mine);
  const T* const from = static_cast<const T*>(l.work.x) + row.x;
  const int start = static_cast<int>(team.lane) * kCount, step = static_cast<int>(team.size) * kCount;

  Pack packs[kPacks], masks[kBias == Bias::kMask ? kPacks : 1];  // all loads come first, hidden keys have none
  // A mask with a separate row for each query is not in any cache yet.
  const bool prefetches = kBias == Bias::kAny && l.work.mask && l.work.mask_strides[2] != 0 && team.lane % 4 == 0;
  const int mask_size = l.work.wide_mask ? 4 : sizeof(T);
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int column = start + k * step;
    if (column < row.last && column + kCount > row.first) {
      packs[k] = *reinterpret_cast<const Pack*>(from + column);
      if constexpr (kBias == Bias::kMask) {
        masks[k] = *reinterpret_cast<const Pack*>(static_cast<const T*>(l.work.mask) + row.mask + column);
      }
      if (prefetches) {
        opkiln::device::prefetch(static_cast<const char*>(l.work.mask) + (row.mask + column) * mask_size);
      }
    }
  }
  float values[kHeld];
  Max most{minus_infinity()};
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int column = start + k * step;
    const bool seen = column < row.last && column + kCount > row.first;
    float* const some = values + k * kCount;
#pragma unroll
    for (int i = 0; i < kCount; ++i) some[i] = seen ? packs[k][i] * l.work.scale : minus_infinity();
    if (kBias == Bias::kAny && seen) add_bias<T>(l.work, row, column, some);
    if constexpr (kBias == Bias::kMask) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) some[i] += seen ? masks[k][i] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) most.absorb({some[i]});
  }
  const float top = finite_or_zero(opkiln::reduce_team(most, team, maxima).value);
  Sum sum{0};
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    values[i] = power<T>(values[i], top);
    sum.value += values[i];
  }
  const float factor = factor_of(opkiln::reduce_team(sum, team, sums).value);
  T* const to = static_cast<T*>(l.work.out) + row.out;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int column = start + k * step;
    if (mine && column < l.work.columns) {
      const float* const some = values + k * kCount;
      Pack pack;
#pragma unroll
      for (int i = 0; i < kCount; i += 2) pack.set_two(i, some[i] * factor, some[i + 1] * factor);
      *reinterpret_cast<Pack*>(to + column) = pack;
    }
  }
}

// A long row of 16-bit elements without a bias, handled by a block. The powers are computed
// twice, because keeping them as floats would take twice the registers.
template <class T>
__global__ void __launch_bounds__(kLongThreads, 2) long_kernel(const OPK_GRID_CONSTANT Launch l) {
  opk::wait_for_previous();
  using Pack = Sixteen<T>;
  constexpr int kCount = Pack::kCount;
  __shared__ Max maxima[kLongThreads / opkiln::kWarp];
  __shared__ Sum sums[kLongThreads / opkiln::kWarp];
  const Team team(l.log2_team);
  const Row row = softmax::row_of(l.work, static_cast<int>(blockIdx.x));
  const Pack* const from = reinterpret_cast<const Pack*>(static_cast<const T*>(l.work.x) + row.x);
  Pack* const to = reinterpret_cast<Pack*>(static_cast<T*>(l.work.out) + row.out);
  const int packs = l.work.columns / kCount;
  Pack held[kLongPacks];
#pragma unroll
  for (int k = 0; k < kLongPacks; ++k) {
    const int at = static_cast<int>(threadIdx.x) + k * kLongThreads;
    if (at < packs) held[k] = from[at];
  }
  const float scale = l.work.scale * kLog2e;
  const auto for_each_value = [&](const auto& body) {
#pragma unroll
    for (int k = 0; k < kLongPacks; ++k) {
      opkiln::device::forget_floats(held[k]);
      if (static_cast<int>(threadIdx.x) + k * kLongThreads < packs) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) body(held[k][i]);
      }
    }
  };
  Max most{minus_infinity()};
  for_each_value([&](float value) { most.absorb({value * scale}); });
  const float top = finite_or_zero(opkiln::reduce_team(most, team, maxima).value);
  Sum sum{0};
  for_each_value([&](float value) { sum.value += opkiln::device::fast_exp2(fmaf(value, scale, -top)); });
  const float factor = factor_of(opkiln::reduce_team(sum, team, sums).value);
#pragma unroll
  for (int k = 0; k < kLongPacks; ++k) {
    const int at = static_cast<int>(threadIdx.x) + k * kLongThreads;
    opkiln::device::forget_floats(held[k]);
    if (at < packs) {
      Pack pack;
#pragma unroll
      for (int i = 0; i < kCount; i += 2) {
        pack.set_two(i, opkiln::device::fast_exp2(fmaf(held[k][i], scale, -top)) * factor,
                     opkiln::device::fast_exp2(fmaf(held[k][i + 1], scale, -top)) * factor);
      }
      opkiln::device::store_once(to + at, pack);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kBiasedThreads) twice_kernel(const OPK_GRID_CONSTANT Launch l) {
  opk::wait_for_previous();
  __shared__ Max maxima[kBiasedThreads / opkiln::kWarp];
  __shared__ Sum sums[kBiasedThreads / opkiln::kWarp];
  const Team team(l.log2_team);
  bool mine;
  const Row row = my_row(l.work, team, &mine);
  const int step = static_cast<int>(team.size), lane = static_cast<int>(team.lane);
  const int begin = row.first / step * step;  // no key before it is visible
  Max most{minus_infinity()};
  Sum sum{0};
  for (int at = begin; at < row.last; at += kPassing * step) {
    float values[kPassing];
    Max now = most;
#pragma unroll
    for (int i = 0; i < kPassing; ++i) values[i] = score<T>(l.work, row, at + i * step + lane);
#pragma unroll
    for (int i = 0; i < kPassing; ++i) now.absorb({values[i]});
    const float top = finite_or_zero(now.value);
    sum.value *= power<float>(most.value, top);  // 0 for the first elements
    most = now;
#pragma unroll
    for (int i = 0; i < kPassing; ++i) sum.value += power<T>(values[i], top);
  }
  const float top = finite_or_zero(opkiln::reduce_team(most, team, maxima).value);
  if (most.value != minus_infinity()) sum.value *= power<float>(most.value, top);
  const float factor = factor_of(opkiln::reduce_team(sum, team, sums).value);
  T* const to = static_cast<T*>(l.work.out) + row.out;
  const int end = mine ? l.work.columns : 0;
#pragma unroll 4
  for (int column = lane; column < end; column += step) {
    to[column] = T(power<T>(score<T>(l.work, row, column), top) * factor);
  }
}

bool is_aligned(const void* data, const int64_t* strides, int64_t width) {
  return reinterpret_cast<size_t>(data) % 16 == 0 && (strides[0] | strides[1] | strides[2]) % width == 0;
}

template <class T>
bool is_packed(const Work& work) {
  constexpr int64_t kCount = Sixteen<T>::kCount;
  return work.columns % kCount == 0 && is_aligned(work.x, work.x_strides, kCount) &&
         is_aligned(work.out, work.out_strides, kCount) &&
         (!work.mask || (work.mask_strides[3] == 1 &&
                         is_aligned(work.mask, work.mask_strides, work.wide_mask ? 4 : kCount)));
}

template <class T>
void launch(const Work& work) {
  const bool others = work.slopes || work.causal || work.window, plain = !work.mask && !others;
  const int64_t most = plain ? kMostThreads : kBiasedThreads;
  const bool held = is_packed<T>(work) && work.columns <= most * kHeld;
  // The fewest threads that hold the row, or with few rows as many as have something to do.
  const int64_t least = held ? kHeld : kPassing, width = held ? int64_t{Sixteen<T>::kCount} : 1;
  const int64_t fill = 128 << 10;  // threads that a large GPU runs at once
  const int64_t limit = held ? most : kBiasedThreads;
  Launch l{work, 0};
  if constexpr (sizeof(T) == 2) {
    if (plain && held && work.columns > kLongThreads * kHeld) {
      while (1 << l.log2_team < kLongThreads) ++l.log2_team;
      return opk::launch_overlapping(long_kernel<T>, work.rows, kLongThreads, 0, l);
    }
  }
  int64_t team = 1;
  while (team < limit && (team * least < work.columns ||
                          (team * width < work.columns && team * work.rows < fill))) {
    team *= 2;
    ++l.log2_team;
  }
  const int64_t threads = team < 128 ? 128 : team, count = threads / team;
  const auto kernel = !held                        ? twice_kernel<T>
      : plain                                      ? held_kernel<T, Bias::kNone>
      : work.mask && !work.wide_mask && !others ? held_kernel<T, Bias::kMask>
                                                   : held_kernel<T, Bias::kAny>;
  opk::launch_overlapping(kernel, (work.rows + count - 1) / count, threads, 0, l);
}

}  // namespace

void softmax::run(const Work& work) {
  OPK_ELEMENT(work.type, T, (float, opk::bfloat16, opk::half), launch<T>(work));
}

OPKILN_OP(softmax::softmax, cuda);
OPKILN_OP(softmax::softmax_, cuda);
