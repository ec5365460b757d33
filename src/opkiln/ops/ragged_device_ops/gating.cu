// Top-k gating. A warp handles a token: its lanes hold the logits as integers in the same order, and find the
// greatest k times. A block handles 64 tokens, with one bit per token for each expert. The place of a token
// among the block's tokens with the same expert is a count of bits, which does not depend on the order of
// threads. Two small kernels add the counts of earlier blocks, unless one block has all tokens.

#include <opkiln/op.h>

#include <opkiln/arguments.h>
#include <opkiln/group_reduce.h>

namespace {

constexpr int kThreads = 512;
constexpr int kTokens = 64;  // tokens per block
constexpr int kMostExperts = 1024;
constexpr int kMostChosen = 32;
constexpr int kScanThreads = 256;

struct Gating {
  const void* logits;
  opkiln::ElementType type;
  float* weights;
  int32_t *experts, *slots, *counts, *offsets;
  int32_t* before;  // [blocks, experts]: the counts of a block, later those of all earlier blocks
  int64_t tokens;
  int count, chosen;
  bool normalize;
};

__device__ inline float logit_at(const Gating& g, int64_t at) {
  if (g.type == opkiln::ElementType::kFloat) return static_cast<const float*>(g.logits)[at];
  const uint16_t bits = static_cast<const uint16_t*>(g.logits)[at];
  return g.type == opkiln::ElementType::kFloat16 ? opk::bits::half_to_float(bits)
                                                 : opk::bits::to_float(uint32_t{bits} << 16);
}

// Maps a float to an integer in the same order. NaN is the greatest,
// both zeros are equal, and 0 is below all.
__device__ inline uint32_t key_of(float value) {
  const uint32_t bits = opk::bits::of_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0xffffffffu;
  if ((bits & 0x7fffffffu) == 0) return 0x80000000u;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ inline float value_of(uint32_t key) {
  if (key == 0xffffffffu) return opk::bits::to_float(0x7fc00000u);
  return opk::bits::to_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

__device__ inline float sum_of_warp(float value) {
#pragma unroll
  for (unsigned bits = 1; bits < 32; bits *= 2) value += opkiln::exchange(value, bits);
  return value;
}

// Inclusive prefix sum. All threads of the block must call this, after a barrier.
template <int kBlock>
__device__ inline void scan(int32_t* values, int count) {
  constexpr int kShare = kMostExperts / kBlock;
  for (int distance = 1; distance < count; distance *= 2) {
    int32_t held[kShare];
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kBlock;
      held[i] = at >= distance && at < count ? values[at - distance] : 0;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kBlock;
      if (at < count) values[at] += held[i];
    }
    __syncthreads();
  }
}

// Finds the experts of one token. Each lane has kPer logits. Lane j gets the j-th expert and its weight.
template <int kPer>
__device__ inline void choose(const Gating& g, int64_t token, int lane, int32_t* expert, float* weight) {
  uint32_t keys[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int at = lane + 32 * i;
    keys[i] = at < g.count ? key_of(logit_at(g, token * g.count + at)) : 0;
  }
  uint32_t mine = 0, mine_at = 0;
  float greatest = 0, sum = 0;
  for (int j = 0; j < g.chosen; ++j) {
    uint32_t best = 0, best_at = 0xffffffffu;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (keys[i] > best) best = keys[i], best_at = lane + 32 * i;
    }
#pragma unroll
    for (unsigned bits = 1; bits < 32; bits *= 2) {
      const uint32_t other = opkiln::exchange(best, bits), other_at = opkiln::exchange(best_at, bits);
      if (other > best || (other == best && other_at < best_at)) best = other, best_at = other_at;
    }
    if (j == 0) {
      greatest = value_of(best);
#pragma unroll
      for (int i = 0; i < kPer; ++i) sum += keys[i] != 0 ? expf(value_of(keys[i]) - greatest) : 0.0f;
      sum = sum_of_warp(sum);
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (best_at == static_cast<uint32_t>(lane + 32 * i)) keys[i] = 0;
    }
    if (lane == j) mine = best, mine_at = best_at;
  }
  const float part = lane < g.chosen ? expf(value_of(mine) - greatest) : 0.0f;
  *weight = part / (g.normalize ? sum_of_warp(part) : sum);
  *expert = static_cast<int32_t>(mine_at);
}

template <int kPer>
__global__ void __launch_bounds__(kThreads) gate_kernel(const OPK_GRID_CONSTANT Gating g) {
  opk::wait_for_previous();
  __shared__ uint32_t masks[kMostExperts][2];
  __shared__ int32_t counts[kMostExperts];
  const int lane = threadIdx.x % 32;
  const int64_t first = int64_t{blockIdx.x} * kTokens;
  const int tokens = static_cast<int>(g.tokens - first < kTokens ? g.tokens - first : kTokens);
  const bool alone = gridDim.x == 1;
  for (int e = threadIdx.x; e < g.count; e += kThreads) masks[e][0] = masks[e][1] = 0;
  __syncthreads();
  for (int t = static_cast<int>(threadIdx.x / 32); t < tokens; t += kThreads / 32) {
    int32_t expert;
    float weight;
    choose<kPer>(g, first + t, lane, &expert, &weight);
    if (lane < g.chosen) {
      g.experts[(first + t) * g.chosen + lane] = expert;
      g.weights[(first + t) * g.chosen + lane] = weight;
      atomicOr(&masks[expert][t / 32], 1u << (t % 32));
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < g.count; e += kThreads) {
    counts[e] = __popc(masks[e][0]) + __popc(masks[e][1]);
    (alone ? g.counts : g.before + int64_t{blockIdx.x} * g.count)[e] = counts[e];
  }
  if (alone) {
    __syncthreads();
    scan<kThreads>(counts, g.count);
    for (int e = threadIdx.x; e < g.count; e += kThreads) g.offsets[e] = counts[e];
  }
  for (int i = threadIdx.x; i < tokens * g.chosen; i += kThreads) {
    const int t = i / g.chosen, expert = g.experts[first * g.chosen + i];
    const uint32_t low = masks[expert][0], high = masks[expert][1], below = (1u << (t % 32)) - 1;
    const int place = t < 32 ? __popc(low & below) : __popc(low) + __popc(high & below);
    g.slots[first * g.chosen + i] = place + (alone ? counts[expert] - __popc(low) - __popc(high) : 0);
  }
}

// For one expert: the counts of all earlier blocks for each block, and the total.
__global__ void __launch_bounds__(kScanThreads) before_kernel(const OPK_GRID_CONSTANT Gating g, int blocks) {
  opk::wait_for_previous();
  __shared__ int32_t sums[kScanThreads];
  const int share = (blocks + kScanThreads - 1) / kScanThreads;
  const int begin = static_cast<int>(threadIdx.x) * share;
  const int end = begin + share < blocks ? begin + share : blocks;
  int32_t* const before = g.before + blockIdx.x;
  int32_t mine = 0;
  for (int b = begin; b < end; ++b) mine += before[int64_t{b} * g.count];
  sums[threadIdx.x] = mine;
  __syncthreads();
  scan<kScanThreads>(sums, kScanThreads);
  int32_t sum = sums[threadIdx.x] - mine;
  for (int b = begin; b < end; ++b) {
    const int32_t these = before[int64_t{b} * g.count];
    before[int64_t{b} * g.count] = sum;
    sum += these;
  }
  if (threadIdx.x == kScanThreads - 1) g.counts[blockIdx.x] = sums[threadIdx.x];
}

__global__ void __launch_bounds__(kScanThreads) slots_kernel(const OPK_GRID_CONSTANT Gating g) {
  opk::wait_for_previous();
  __shared__ int32_t ends[kMostExperts];
  for (int e = threadIdx.x; e < g.count; e += kScanThreads) ends[e] = g.counts[e];
  __syncthreads();
  scan<kScanThreads>(ends, g.count);
  if (blockIdx.x == 0) {
    for (int e = threadIdx.x; e < g.count; e += kScanThreads) g.offsets[e] = ends[e];
  }
  const int64_t first = int64_t{blockIdx.x} * kTokens;
  const int tokens = static_cast<int>(g.tokens - first < kTokens ? g.tokens - first : kTokens);
  for (int i = threadIdx.x; i < tokens * g.chosen; i += kScanThreads) {
    const int expert = g.experts[first * g.chosen + i];
    const int start = expert == 0 ? 0 : ends[expert - 1];
    g.slots[first * g.chosen + i] += start + g.before[int64_t{blockIdx.x} * g.count + expert];
  }
}

OPK_PLAIN_BEGIN

using opk::Tensor;

opk::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> top_k_gating(const Tensor& logits, int64_t k,
                                                                bool normalize) {
  const opkiln::ElementType type = opk::element_of(logits);
  opk::check_dim(logits, 2);
  const int64_t tokens = logits.size(0), count = logits.size(1);
  OPK_CHECK(count >= 1 && count <= kMostExperts, logits, " has shape ", logits.sizes(), ", expected 1 to ",
            kMostExperts, " experts");
  const int64_t most = count < kMostChosen ? count : int64_t{kMostChosen};
  OPK_CHECK(k >= 1 && k <= most, "k is ", k, ", expected 1 to ", most);
  OPK_SERVED(tokens * k <= 0x7fffffff, logits, " has shape ", logits.sizes(), ": too many tokens");
  const opk::Device device = logits.device();
  const Tensor given = opk::contiguous(logits);
  Tensor weights = opk::empty({tokens, k}, opk::DType::float32, device);
  Tensor experts = opk::empty({tokens, k}, opk::DType::int32, device);
  Tensor slots = opk::empty({tokens, k}, opk::DType::int32, device);
  Tensor counts = opk::empty({count}, opk::DType::int32, device);
  Tensor offsets = opk::empty({count}, opk::DType::int32, device);
  const int64_t blocks = tokens <= kTokens ? 1 : (tokens + kTokens - 1) / kTokens;
  Tensor before = opk::empty({blocks > 1 ? blocks : 0, count}, opk::DType::int32, device);
  const Gating work{given.data(), type, weights.data<float>(), experts.data<int32_t>(),
                    slots.data<int32_t>(), counts.data<int32_t>(), offsets.data<int32_t>(),
                    before.data<int32_t>(), tokens, static_cast<int>(count), static_cast<int>(k), normalize};
  opk::launch_overlapping(count <= 64 ? gate_kernel<2> : count <= 256 ? gate_kernel<8> : gate_kernel<32>, blocks, kThreads,
              0, work);
  if (blocks > 1) {
    opk::launch_overlapping(before_kernel, count, kScanThreads, 0, work, static_cast<int>(blocks));
    opk::launch_overlapping(slots_kernel, blocks, kScanThreads, 0, work);
  }
  return {static_cast<Tensor&&>(weights), static_cast<Tensor&&>(experts), static_cast<Tensor&&>(slots),
          static_cast<Tensor&&>(counts), static_cast<Tensor&&>(offsets)};
}

OPK_PLAIN_END

}  // namespace

OPKILN_OP(top_k_gating, cuda);
