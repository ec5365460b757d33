// Forms of the memory-bound kernels, timed beside a copy: how many accesses a thread has in flight, how many
// threads a block has, which hints accesses give, how a row is divided. The catalogue's kernels take the form
// that is fastest here.
//
//   nvcc -std=c++17 -O3 -arch=sm_90a -I src/opkiln/csrc bench/ops/row_forms.cu -o row_forms && ./row_forms [WORD]
//
// Each line is a form: microseconds of a launch, and its bytes per second as a share of the copy's. Four launches
// follow each other, each with other memory, and the median of 15 counts. WORD selects families by name.

#include "row_forms.h"

using namespace forms;

namespace {

// Elements -----------------------------------------------------------------------------------------------

enum Act { kCopy, kBias, kGelu, kGated, kResidual };

__device__ inline float exp2_of(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}
__device__ inline float reciprocal(float x) {
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}
__device__ inline float gelu(float x) {
  return x * reciprocal(1.0f + exp2_of(-x * (2.3022082f + 0.10294324f * fminf(x * x, 1e4f))));
}
__device__ inline float silu(float x) { return x * reciprocal(1.0f + exp2_of(-x * 1.4426950f)); }

template <Act kAct, int kThreads, int kTurns, int kHint>
__global__ void __launch_bounds__(kThreads)
    act_kernel(const Pack* x, const Pack* other, const Pack* bias, Pack* out, uint32_t vectors, uint32_t columns) {
  Pack held[kTurns], more[kTurns];
  const uint32_t first = blockIdx.x * (kThreads * kTurns) + threadIdx.x;
  uint32_t column = first % columns;
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    const uint32_t at = first + t * kThreads;
    if (at >= vectors) continue;
    if (kAct == kGated) {
      const uint32_t r = at / columns, from = r * 2 * columns + (at - r * columns);
      held[t] = load<kHint>(x + from), more[t] = load<kHint>(x + from + columns);
    } else {
      held[t] = load<kHint>(x + at);
      if (kAct == kResidual) more[t] = load<kHint>(other + at);
    }
  }
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    const uint32_t at = first + t * kThreads;
    if (at >= vectors) continue;
    Pack shift = {};
    if (kAct == kBias || kAct == kGelu || kAct == kResidual) shift = bias[column];
    if (kAct != kCopy) {
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        float o[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const float a = held[t][i + k] + shift[i + k];
          o[k] = kAct == kGelu ? gelu(a) : kAct == kGated ? silu(a) * more[t][i + k]
               : kAct == kResidual ? a + more[t][i + k] : a;
        }
        held[t].set_two(i, o[0], o[1]);
      }
    }
    store<kHint>(out + at, held[t]);
    column += kThreads;
    while (column >= columns) column -= columns;
  }
}

template <Act kAct, int kThreads, int kTurns, int kHint>
void act_form(const char* name, int64_t rows, int64_t columns, double tensors) {
  const uint32_t vectors = uint32_t(rows * columns / 8);
  const unsigned blocks = (vectors + kThreads * kTurns - 1) / (kThreads * kTurns);
  const int64_t size = rows * columns * 2;
  timed(name, tensors * size, [&](int64_t turn) {
    act_kernel<kAct, kThreads, kTurns, kHint><<<blocks, kThreads>>>(
        in(turn, kAct == kGated ? 2 * size : size), in(turn + 7, size), weights(0), out(turn, size), vectors,
        uint32_t(columns / 8));
  }, "%d threads, %d turns, hint %d", kThreads, kTurns, kHint);
}

template <Act kAct>
void act_forms(const char* name, double tensors) {
  for (const auto& shape : {Shape{65536, 1024}, Shape{32768, 4096}}) {
    char title[96];
    snprintf(title, sizeof title, "%s %lld x %lld", name, (long long)shape.rows, (long long)shape.columns);
    const int64_t rows = kAct == kGated ? shape.rows / 2 : shape.rows, c = shape.columns;
    act_form<kAct, 256, 4, 0>(title, rows, c, tensors);
    act_form<kAct, 256, 2, 0>(title, rows, c, tensors);
    act_form<kAct, 256, 1, 0>(title, rows, c, tensors);
    act_form<kAct, 128, 4, 0>(title, rows, c, tensors);
    act_form<kAct, 128, 2, 0>(title, rows, c, tensors);
    act_form<kAct, 128, 1, 0>(title, rows, c, tensors);
    act_form<kAct, 512, 1, 0>(title, rows, c, tensors);
    act_form<kAct, 512, 2, 0>(title, rows, c, tensors);
    act_form<kAct, 128, 1, 1>(title, rows, c, tensors);
    act_form<kAct, 128, 2, 1>(title, rows, c, tensors);
    act_form<kAct, 128, 1, 2>(title, rows, c, tensors);
    act_form<kAct, 128, 2, 2>(title, rows, c, tensors);
    act_form<kAct, 256, 4, 2>(title, rows, c, tensors);
  }
}

// Norms --------------------------------------------------------------------------------------------------

enum Mode { kRms, kLayer, kAddRms };

template <int kTeam, int kThreads>
__device__ inline float team_sum(float value, float* shared) {
#pragma unroll
  for (int bits = 1; bits < (kTeam < 32 ? kTeam : 32); bits *= 2) value += __shfl_xor_sync(~0u, value, bits);
  if (kTeam > 32) {
    constexpr int kWarps = kTeam / 32;
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    if (kTeam == kThreads) __syncthreads();
    else asm volatile("bar.sync %0, %1;" ::"r"(int(1 + threadIdx.x / kTeam)), "n"(kTeam) : "memory");
    value = 0;
    const int first = threadIdx.x / kTeam * kWarps;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) value += shared[first + i];
  }
  return value;
}

// kEarly: weights are loaded with the row, else behind the sums. kTotal: blocks that go from row to row and
// load the next one before they are done with this one; 0: a block has one turn.
template <Mode kMode, int kVectors, int kTeam, int kThreads, int kBlocks, int kHint, bool kEarly, bool kStays>
__global__ void __launch_bounds__(kThreads, kBlocks)
    norm_kernel(const Pack* x, const Pack* residual, const Pack* weight, const Pack* bias, Pack* out, Pack* sum,
                int rows, int vectors, float share, float eps) {
  __shared__ float shared[2][2][kThreads / 32];
  const int lane = threadIdx.x % kTeam, step = int(gridDim.x) * (kThreads / kTeam);
  int row = blockIdx.x * (kThreads / kTeam) + threadIdx.x / kTeam;
  Pack w[kVectors], b[kVectors], next[kVectors], r[kVectors];
  const auto fetch = [&](int of) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) next[v] = load<kHint>(x + int64_t{of} * vectors + lane + v * kTeam);
    if (kMode == kAddRms) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) r[v] = load<kHint>(residual + int64_t{of} * vectors + lane + v * kTeam);
    }
  };
  const auto fetch_weights = [&] {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      w[v] = weight[lane + v * kTeam];
      if (kMode == kLayer) b[v] = bias[lane + v * kTeam];
    }
  };
  fetch(row);
  if (kEarly || kStays) fetch_weights();
  int odd = 0;
  do {
    Pack mine[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      mine[v] = next[v];
      if (kMode == kAddRms) {
#pragma unroll
        for (int i = 0; i < 8; i += 2) mine[v].set_two(i, mine[v][i] + r[v][i], mine[v][i + 1] + r[v][i + 1]);
        store<kHint>(sum + int64_t{row} * vectors + lane + v * kTeam, mine[v]);
      }
    }
    if (kStays && row + step < rows) fetch(row + step);
    float mean = 0, total = 0;
    if (kMode == kLayer) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
#pragma unroll
        for (int i = 0; i < 8; ++i) mean += mine[v][i];
      mean = team_sum<kTeam, kThreads>(mean, shared[odd][0]) * share;
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
#pragma unroll
      for (int i = 0; i < 8; ++i) total += (mine[v][i] - mean) * (mine[v][i] - mean);
    const float scale = rsqrtf(team_sum<kTeam, kThreads>(total, shared[odd][1]) * share + eps);
    if (!kEarly && !kStays) fetch_weights();
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        float o[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          o[k] = (mine[v][i + k] - mean) * scale * w[v][i + k];
          if (kMode == kLayer) o[k] += b[v][i + k];
        }
        mine[v].set_two(i, o[0], o[1]);
      }
      store<kHint>(out + int64_t{row} * vectors + lane + v * kTeam, mine[v]);
    }
    row += step, odd ^= 1;
  } while (kStays && row < rows);
}

// Rows are whole vectors of the team, and whole teams of the blocks.
template <Mode kMode, int kVectors, int kTeam, int kThreads, int kBlocks, int kHint, bool kEarly, bool kStays = false>
void norm_form(const char* name, int64_t rows) {
  const int vectors = kVectors * kTeam;
  const int64_t size = rows * vectors * 16;
  const unsigned all = unsigned(rows / (kThreads / kTeam)), some = 132 * kBlocks;
  timed(name, size * (kMode == kAddRms ? 4.0 : 2.0), [&](int64_t turn) {
    norm_kernel<kMode, kVectors, kTeam, kThreads, kBlocks, kHint, kEarly, kStays>
        <<<kStays && some < all ? some : all, kThreads>>>(in(turn, size), in(turn + 7, size), weights(0), weights(1),
                                                          out(turn, size), out(turn + 7, size), int(rows), vectors,
                                                          1.0f / (vectors * 8), 1e-6f);
  }, "%d vectors, team %d, %d threads, %d blocks, hint %d%s%s", kVectors, kTeam, kThreads, kBlocks, kHint,
      kEarly ? ", early" : "", kStays ? ", stays" : "");
}

template <Mode kMode>
void norm_forms(const char* name) {
  char title[96];
  snprintf(title, sizeof title, "%s 65536 x 1024", name);
  norm_form<kMode, 4, 32, 128, 10, 0, false>(title, 65536);
  norm_form<kMode, 4, 32, 128, 8, 0, true>(title, 65536);
  norm_form<kMode, 4, 32, 64, 16, 0, false>(title, 65536);
  norm_form<kMode, 4, 32, 256, 5, 0, false>(title, 65536);
  norm_form<kMode, 2, 64, 64, 20, 0, false>(title, 65536);
  norm_form<kMode, 2, 64, 64, 20, 0, true>(title, 65536);
  norm_form<kMode, 2, 64, 128, 12, 0, true>(title, 65536);
  norm_form<kMode, 1, 128, 128, 16, 0, false>(title, 65536);
  norm_form<kMode, 1, 128, 128, 16, 0, true>(title, 65536);
  norm_form<kMode, 1, 128, 128, 12, 0, true>(title, 65536);
  norm_form<kMode, 1, 128, 128, 16, 2, true>(title, 65536);
  norm_form<kMode, 1, 128, 128, 16, 1, true>(title, 65536);
  norm_form<kMode, 1, 128, 256, 8, 0, true>(title, 65536);
  norm_form<kMode, 1, 128, 512, 4, 0, true>(title, 65536);
  norm_form<kMode, 4, 32, 128, 6, 0, true, true>(title, 65536);
  norm_form<kMode, 4, 32, 128, 4, 0, true, true>(title, 65536);
  norm_form<kMode, 4, 32, 128, 4, 2, true, true>(title, 65536);
  norm_form<kMode, 2, 64, 64, 12, 0, true, true>(title, 65536);
  norm_form<kMode, 1, 128, 128, 10, 0, true, true>(title, 65536);
  snprintf(title, sizeof title, "%s 32768 x 4096", name);
  norm_form<kMode, 4, 128, 128, 10, 0, false>(title, 32768);
  norm_form<kMode, 2, 256, 256, 6, 0, true>(title, 32768);
  norm_form<kMode, 1, 512, 512, 4, 0, true>(title, 32768);
  snprintf(title, sizeof title, "%s 64 x 4096", name);
  norm_form<kMode, 4, 128, 128, 2, 0, true>(title, 64);
  norm_form<kMode, 2, 256, 256, 2, 0, true>(title, 64);
  norm_form<kMode, 1, 512, 512, 2, 0, false>(title, 64);
  norm_form<kMode, 1, 512, 512, 2, 0, true>(title, 64);
}

// Rows by their index ------------------------------------------------------------------------------------

// Units of 16 bytes of the result, in the order of memory.
template <int kThreads, int kTurns, int kHint>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const Pack* x, const int* indices, Pack* out, uint32_t a_row, uint32_t rows, Divisor by) {
  const uint32_t first = blockIdx.x * (kThreads * kTurns) + threadIdx.x;
  uint32_t row[kTurns];
  int index[kTurns];
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    row[t] = by.divide(first + t * kThreads);
    index[t] = row[t] < rows ? indices[row[t]] : -1;
  }
  Pack held[kTurns];
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    if (index[t] >= 0) held[t] = load<kHint>(x + int64_t{index[t]} * a_row + (first + t * kThreads - row[t] * a_row));
  }
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    if (index[t] >= 0) store<kHint>(out + (first + t * kThreads), held[t]);
  }
}

// A warp has whole rows, kRows at once, and loads kTurns vectors of a thread in each.
template <int kThreads, int kRows, int kTurns, int kHint>
__global__ void __launch_bounds__(kThreads)
    warp_gather_kernel(const Pack* x, const int* indices, Pack* out, uint32_t a_row, uint32_t rows) {
  const uint32_t lane = threadIdx.x % 32, first = (blockIdx.x * (kThreads / 32) + threadIdx.x / 32) * kRows;
  int index[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) index[r] = first + r < rows ? indices[first + r] : -1;
  for (uint32_t at = lane; at < a_row; at += 32 * kTurns) {
    Pack held[kRows][kTurns];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int t = 0; t < kTurns; ++t)
        if (index[r] >= 0 && at + t * 32 < a_row) held[r][t] = load<kHint>(x + int64_t{index[r]} * a_row + at + t * 32);
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int t = 0; t < kTurns; ++t)
        if (index[r] >= 0 && at + t * 32 < a_row) store<kHint>(out + int64_t{first + r} * a_row + at + t * 32, held[r][t]);
  }
}

template <int kThreads, int kTurns, int kHint>
void gather_form(const char* name, Shape s) {
  const uint32_t a_row = uint32_t(s.columns / 8), rows = uint32_t(s.rows / 2);
  const uint32_t units = rows * a_row;
  timed(name, s.rows * s.columns * 2.0, [&](int64_t turn) {
    gather_kernel<kThreads, kTurns, kHint><<<(units + kThreads * kTurns - 1) / (kThreads * kTurns), kThreads>>>(
        in(turn, s.rows * s.columns * 2), kept(), out(turn, s.rows * s.columns), a_row, rows, Divisor(a_row));
  }, "%d threads, %d turns, hint %d", kThreads, kTurns, kHint);
}

template <int kThreads, int kRows, int kTurns, int kHint>
void warp_gather_form(const char* name, Shape s) {
  const uint32_t a_row = uint32_t(s.columns / 8), rows = uint32_t(s.rows / 2), a_block = kThreads / 32 * kRows;
  timed(name, s.rows * s.columns * 2.0, [&](int64_t turn) {
    warp_gather_kernel<kThreads, kRows, kTurns, kHint><<<(rows + a_block - 1) / a_block, kThreads>>>(
        in(turn, s.rows * s.columns * 2), kept(), out(turn, s.rows * s.columns), a_row, rows);
  }, "warps, %d threads, %d rows, %d turns, hint %d", kThreads, kRows, kTurns, kHint);
}

void gather_forms() {
  for (const Shape s : {Shape{65536, 1024}, Shape{32768, 4096}, Shape{64, 4096}}) {
    char title[96];
    snprintf(title, sizeof title, "gather %lld x %lld", (long long)s.rows, (long long)s.columns);
    gather_form<256, 4, 0>(title, s);
    gather_form<256, 2, 0>(title, s);
    gather_form<256, 1, 0>(title, s);
    gather_form<128, 1, 0>(title, s);
    gather_form<128, 2, 0>(title, s);
    gather_form<64, 1, 0>(title, s);
    gather_form<512, 1, 0>(title, s);
    gather_form<128, 1, 1>(title, s);
    gather_form<128, 1, 2>(title, s);
    gather_form<128, 2, 2>(title, s);
    warp_gather_form<128, 1, 4, 0>(title, s);
    warp_gather_form<64, 1, 4, 0>(title, s);
    warp_gather_form<128, 2, 2, 0>(title, s);
    warp_gather_form<64, 1, 4, 2>(title, s);
  }
}

// The result of a scatter: each row is of `part`, or of `x`. `places` says which.
template <int kThreads, int kTurns, int kHint>
__global__ void __launch_bounds__(kThreads)
    merge_kernel(const Pack* x, const Pack* part, const int* places, Pack* out, uint32_t a_row, uint32_t rows, Divisor by) {
  const uint32_t first = blockIdx.x * (kThreads * kTurns) + threadIdx.x;
  Pack held[kTurns];
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    const uint32_t at = first + t * kThreads, row = by.divide(at);
    if (row < rows) {
      const int place = places[row];
      held[t] = load<kHint>((place < 0 ? x + int64_t{row} * a_row : part + int64_t{place} * a_row) + (at - row * a_row));
    }
  }
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    if (first + t * kThreads < rows * a_row) store<kHint>(out + first + t * kThreads, held[t]);
  }
}

__global__ void __launch_bounds__(256) places_kernel(const int* indices, int* places, int count) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < count) places[indices[i]] = i;
}

template <int kThreads, int kTurns, int kHint>
void merge_form(const char* name, Shape s) {
  const uint32_t a_row = uint32_t(s.columns / 8), rows = uint32_t(s.rows), units = rows * a_row;
  timed(name, s.rows * s.columns * 4.0, [&](int64_t turn) {
    merge_kernel<kThreads, kTurns, kHint><<<(units + kThreads * kTurns - 1) / (kThreads * kTurns), kThreads>>>(
        in(turn, s.rows * s.columns * 2), in(turn + 7, s.rows * s.columns), places(), out(turn, s.rows * s.columns * 2),
        a_row, rows, Divisor(a_row));
  }, "%d threads, %d turns, hint %d, places known", kThreads, kTurns, kHint);
}

void merge_forms() {
  for (const Shape s : {Shape{65536, 1024}, Shape{32768, 4096}, Shape{64, 4096}}) {
    char title[96];
    snprintf(title, sizeof title, "merge %lld x %lld", (long long)s.rows, (long long)s.columns);
    timed(title, 1, [&](int64_t) {
      cudaMemsetAsync(spare(), 0xff, s.rows * 4);
      places_kernel<<<unsigned(s.rows / 2 + 255) / 256, 256>>>(kept(), static_cast<int*>(spare()), int(s.rows / 2));
    }, "finding the places by a memset and a kernel");
    merge_form<256, 4, 0>(title, s);
    merge_form<256, 1, 0>(title, s);
    merge_form<128, 1, 0>(title, s);
    merge_form<128, 2, 0>(title, s);
    merge_form<128, 1, 2>(title, s);
  }
}

// Weighted sums of kTerms rows for each row.
template <int kThreads, int kTerms, int kAtOnce, int kHint>
__global__ void __launch_bounds__(kThreads)
    moe_kernel(const Pack* x, const int* slots, const float* weight, Pack* out, uint32_t a_row, uint32_t rows, Divisor by) {
  const uint32_t at = blockIdx.x * kThreads + threadIdx.x, row = by.divide(at), unit = at - row * a_row;
  if (row >= rows) return;
  int slot[kTerms];
  float w[kTerms];
#pragma unroll
  for (int i = 0; i < kTerms; ++i) slot[i] = slots[row * kTerms + i];
#pragma unroll
  for (int i = 0; i < kTerms; ++i) w[i] = weight[row * kTerms + i];
  float sums[8] = {};
#pragma unroll
  for (int first = 0; first < kTerms; first += kAtOnce) {
    Pack held[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) held[i] = load<kHint>(x + int64_t{slot[first + i]} * a_row + unit);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
      for (int e = 0; e < 8; ++e) sums[e] += w[first + i] * held[i][e];
  }
  Pack made;
#pragma unroll
  for (int e = 0; e < 8; e += 2) made.set_two(e, sums[e], sums[e + 1]);
  store<kHint>(out + at, made);
}

template <int kThreads, int kTerms, int kAtOnce, int kHint>
void moe_form(const char* name, int64_t rows) {
  const uint32_t a_row = 512;
  int log2 = 0;
  while ((1 << log2) < rows * kTerms) ++log2;
  timed(name, rows * 8192.0 * (kTerms + 1), [&](int64_t turn) {
    moe_kernel<kThreads, kTerms, kAtOnce, kHint><<<unsigned(rows * a_row / kThreads), kThreads>>>(
        in(turn, rows * kTerms * 8192), shuffled(log2), reinterpret_cast<const float*>(weights(2)), out(turn, rows * 8192),
        a_row, uint32_t(rows), Divisor(a_row));
  }, "%d terms, %d threads, %d at once, hint %d", kTerms, kThreads, kAtOnce, kHint);
}

void moe_forms() {
  for (const int64_t rows : {16384, 64}) {
    char title[96];
    snprintf(title, sizeof title, "moe gather %lld x 4096", (long long)rows);
    moe_form<256, 2, 2, 0>(title, rows);
    moe_form<128, 2, 2, 0>(title, rows);
    moe_form<128, 2, 2, 2>(title, rows);
    moe_form<256, 8, 2, 0>(title, rows);
    moe_form<256, 8, 4, 0>(title, rows);
    moe_form<256, 8, 8, 0>(title, rows);
    moe_form<128, 8, 4, 0>(title, rows);
    moe_form<128, 8, 8, 0>(title, rows);
    moe_form<128, 8, 4, 2>(title, rows);
  }
}

// Softmax of long rows -----------------------------------------------------------------------------------

struct Most {
  __device__ static float first() { return __uint_as_float(0xff800000u); }
  __device__ static float both(float a, float b) { return fmaxf(a, b); }
};
struct Total {
  __device__ static float first() { return 0; }
  __device__ static float both(float a, float b) { return a + b; }
};

template <class How, int kWarps>
__device__ inline float over_block(float value, float* shared) {
#pragma unroll
  for (int bits = 1; bits < 32; bits *= 2) value = How::both(value, __shfl_xor_sync(~0u, value, bits));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = threadIdx.x % 32 < kWarps ? shared[threadIdx.x % 32] : How::first();
#pragma unroll
  for (int bits = 1; bits < 32; bits *= 2) value = How::both(value, __shfl_xor_sync(~0u, value, bits));
  return value;
}

// kVectors of 16 bytes are held as they come, and widened again for each of three passes.
template <int kThreads, int kVectors, int kBlocks, int kHint>
__global__ void __launch_bounds__(kThreads, kBlocks) softmax_kernel(const Pack* x, Pack* out) {
  __shared__ float maxima[kThreads / 32], sums[kThreads / 32];
  const int64_t start = int64_t{blockIdx.x} * (kThreads * kVectors) + threadIdx.x;
  Pack held[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) held[v] = load<kHint>(x + start + v * kThreads);
  float most = Most::first(), sum = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
#pragma unroll
    for (int i = 0; i < 8; ++i) most = fmaxf(most, held[v][i]);
  const float top = over_block<Most, kThreads / 32>(most, maxima) * 1.4426950f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    opkiln::device::forget_floats(held[v]);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += exp2f(fmaf(held[v][i], 1.4426950f, -top));
  }
  const float factor = 1.0f / over_block<Total, kThreads / 32>(sum, sums);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    opkiln::device::forget_floats(held[v]);
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      held[v].set_two(i, exp2f(fmaf(held[v][i], 1.4426950f, -top)) * factor,
                      exp2f(fmaf(held[v][i + 1], 1.4426950f, -top)) * factor);
    }
    store<kHint>(out + start + v * kThreads, held[v]);
  }
}

// A block stays, and has the next row on its way to shared memory while it computes this one.
template <int kThreads, int kVectors, int kBuffers>
__global__ void __launch_bounds__(kThreads) staying_softmax_kernel(const Pack* x, Pack* out, int rows) {
  extern __shared__ uint4 memory[];
  __shared__ float maxima[2][kThreads / 32], sums[2][kThreads / 32];
  constexpr int kRow = kThreads * kVectors;
  Pack* const buffer = reinterpret_cast<Pack*>(memory);
  const auto fetch = [&](int row, int place) {
    if (row < rows) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const unsigned to = unsigned(__cvta_generic_to_shared(buffer + place * kRow + v * kThreads + threadIdx.x));
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to),
                     "l"(x + int64_t{row} * kRow + v * kThreads + threadIdx.x) : "memory");
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  const int step = int(gridDim.x);
#pragma unroll
  for (int i = 0; i < kBuffers - 1; ++i) fetch(blockIdx.x + i * step, i);
  int place = 0, odd = 0;
  for (int row = blockIdx.x; row < rows; row += step) {
    fetch(row + (kBuffers - 1) * step, place == 0 ? kBuffers - 1 : place - 1);
    asm volatile("cp.async.wait_group %0;" ::"n"(kBuffers - 1) : "memory");
    Pack held[kVectors];  // a thread reads what it fetched itself
#pragma unroll
    for (int v = 0; v < kVectors; ++v) held[v] = buffer[place * kRow + v * kThreads + threadIdx.x];
    float most = Most::first(), sum = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
#pragma unroll
      for (int i = 0; i < 8; ++i) most = fmaxf(most, held[v][i]);
    const float top = over_block<Most, kThreads / 32>(most, maxima[odd]) * 1.4426950f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      opkiln::device::forget_floats(held[v]);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += exp2f(fmaf(held[v][i], 1.4426950f, -top));
    }
    const float factor = 1.0f / over_block<Total, kThreads / 32>(sum, sums[odd]);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      opkiln::device::forget_floats(held[v]);
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        held[v].set_two(i, exp2f(fmaf(held[v][i], 1.4426950f, -top)) * factor,
                        exp2f(fmaf(held[v][i + 1], 1.4426950f, -top)) * factor);
      }
      out[int64_t{row} * kRow + v * kThreads + threadIdx.x] = held[v];
    }
    place = place + 1 == kBuffers ? 0 : place + 1, odd ^= 1;
  }
}

template <int kThreads, int kVectors, int kBlocks, int kHint>
void softmax_form(int64_t rows) {
  const int64_t size = rows * kThreads * kVectors * 16;
  char title[96];
  snprintf(title, sizeof title, "softmax %lld x %d", (long long)rows, kThreads * kVectors * 8);
  timed(title, 2.0 * size, [&](int64_t turn) {
    softmax_kernel<kThreads, kVectors, kBlocks, kHint><<<unsigned(rows), kThreads>>>(in(turn, size), out(turn, size));
  }, "%d threads, %d vectors, %d blocks, hint %d", kThreads, kVectors, kBlocks, kHint);
}

template <int kThreads, int kVectors, int kBuffers>
void staying_softmax_form(int64_t rows) {
  const int64_t size = rows * kThreads * kVectors * 16;
  const int shared = kThreads * kVectors * 16 * kBuffers;
  const auto kernel = staying_softmax_kernel<kThreads, kVectors, kBuffers>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  char title[96];
  snprintf(title, sizeof title, "softmax %lld x %d", (long long)rows, kThreads * kVectors * 8);
  timed(title, 2.0 * size, [&](int64_t turn) {
    kernel<<<132, kThreads, shared>>>(in(turn, size), out(turn, size), int(rows));
  }, "stays, %d threads, %d vectors, %d buffers", kThreads, kVectors, kBuffers);
}

void softmax_forms() {
  softmax_form<1024, 4, 1, 0>(4096);
  softmax_form<1024, 4, 2, 0>(4096);
  softmax_form<512, 8, 2, 0>(4096);
  softmax_form<512, 8, 2, 2>(4096);
  softmax_form<256, 16, 2, 0>(4096);
  softmax_form<256, 16, 3, 0>(4096);
  staying_softmax_form<1024, 4, 2>(4096);
  staying_softmax_form<1024, 4, 3>(4096);
  staying_softmax_form<512, 8, 3>(4096);
  softmax_form<512, 4, 3, 0>(8192);
  softmax_form<256, 4, 6, 0>(16384);
  softmax_form<512, 1, 2, 0>(64);
  softmax_form<256, 2, 2, 0>(64);
  softmax_form<128, 4, 2, 0>(64);
}

// Small launches -----------------------------------------------------------------------------------------

template <int kBytes>
struct Parameters {
  const Pack* x;
  Pack* out;
  char rest[kBytes - 16];
};

template <int kBytes>
__global__ void __launch_bounds__(128) parameter_kernel(const __grid_constant__ Parameters<kBytes> p) {
  const int i = blockIdx.x * 128 + threadIdx.x;
  Pack held = p.x[i];
  if (p.rest[kBytes - 17] == 99) held.words[0] = 0;  // the last of them is read, too
  p.out[i] = held;
}

template <int kBytes>
void parameter_form() {
  Parameters<kBytes> p = {};
  timed("small copy 64 x 4096", 1 << 20, [&](int64_t turn) {
    p.x = in(turn, 1 << 19), p.out = out(turn, 1 << 19);
    parameter_kernel<kBytes><<<256, 128>>>(p);
  }, "%d bytes of parameters", kBytes);
}

void small_forms() {
  parameter_form<64>();
  parameter_form<256>();
  parameter_form<1024>();
  parameter_form<2304>();
  parameter_form<4000>();
  const Shape s{64, 4096};
  act_form<kBias, 256, 4, 0>("small bias 64 x 4096", s.rows, s.columns, 2);
  act_form<kBias, 256, 1, 0>("small bias 64 x 4096", s.rows, s.columns, 2);
  act_form<kBias, 128, 1, 0>("small bias 64 x 4096", s.rows, s.columns, 2);
  act_form<kBias, 64, 1, 0>("small bias 64 x 4096", s.rows, s.columns, 2);
  act_form<kResidual, 256, 1, 0>("small residual 64 x 4096", s.rows, s.columns, 3);
  act_form<kResidual, 128, 1, 0>("small residual 64 x 4096", s.rows, s.columns, 3);
}

}  // namespace

int main(int argc, char** argv) {
  start(argc > 1 ? argv[1] : "");
  if (asked("small")) small_forms();
  if (asked("copy")) act_forms<kCopy>("copy", 2);
  if (asked("bias")) act_forms<kBias>("bias", 2);
  if (asked("residual")) act_forms<kResidual>("residual", 3);
  if (asked("gelu")) act_forms<kGelu>("gelu", 2);
  if (asked("gated")) act_forms<kGated>("gated", 3);
  if (asked("rms")) norm_forms<kRms>("rms");
  if (asked("layer")) norm_forms<kLayer>("layer");
  if (asked("add")) norm_forms<kAddRms>("add and rms");
  if (asked("gather")) gather_forms();
  if (asked("merge")) merge_forms();
  if (asked("moe")) moe_forms();
  if (asked("softmax")) softmax_forms();
  return 0;
}
