// Kernels on columns: bias and gelu, their gradient, and joining three gradients, with
// sums over rows. A block has 256 columns of a strip of rows. A warp reads 32 eights of a
// row at once, and each thread sums its eight columns in registers.

#pragma once

#include <opkiln/op.h>

#include "partial_sums.h"

namespace {

constexpr int kLanes = 32, kWarps = 8;
constexpr int kRowsAtOnce = 2;  // rows that a thread has in flight, if they are aligned
constexpr int kBlocks = 2112;   // approximate; four times what an H200 runs at once

enum Kind { kGelu, kGeluBackward, kJoin };

struct Columns {
  const void* x;      // kJoin: the first of three
  const void* grad;   // kJoin: the second
  const void* third;
  const void* bias;
  void* out;          // the gelu; kGeluBackward: may be null; kJoin: the three joined
  void* x_grad;
  float* partial;     // [strips, columns]
  Dropout dropout;
  int64_t rows;
  int64_t columns;    // kJoin: of each of the three
};

// gelu(v) = v * sigmoid(2 z), z = sqrt(2 / pi) * (v + 0.044715 v^3): the tanh form.
struct Gelu {
  float value, slope;

  __device__ explicit Gelu(float v) {
    constexpr float kLinear = 1.5957691216057308f, kCubic = 0.07135481282553837f;
    const float twice = v * (kLinear + kCubic * v * v);
#if defined(OPKILN_APPROXIMATE_TANH) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750
    float tanh;
    asm("tanh.approx.f32 %0, %1;" : "=f"(tanh) : "f"(0.5f * twice));
    const float sigmoid = 0.5f + 0.5f * tanh;
#else
    const float sigmoid = __fdividef(1.0f, 1.0f + __expf(-twice));
#endif
    value = v * sigmoid;
    slope = sigmoid + value * (1.0f - sigmoid) * (kLinear + 3.0f * kCubic * v * v);
  }
};

template <class T, bool kAligned, Kind kKind>
__global__ void __launch_bounds__(kLanes * kWarps, kKind == kGeluBackward ? 3 : 4)
    columns_kernel(const OPK_GRID_CONSTANT Columns c) {
  opk::wait_for_previous();
  constexpr int kRows = kAligned ? kRowsAtOnce : 1;
  __shared__ float shared[kWarps][kEight][kLanes];
  const int lane = static_cast<int>(threadIdx.x) % kLanes, warp = static_cast<int>(threadIdx.x) / kLanes;
  const int64_t eights = eights_of(c.columns), all = kKind == kJoin ? 3 * c.columns : c.columns;
  int64_t eight = int64_t{blockIdx.x} * kLanes + lane;
  const bool here = eight < (kKind == kJoin ? 3 * eights : eights);
  const int64_t which = kKind == kJoin ? eight / eights : 0;  // kJoin: which of the three
  eight -= which * eights;
  const int64_t column = eight * kEight, left = here ? c.columns - column : 0;
  const void* const source = which == 0 ? c.x : which == 1 ? c.grad : c.third;
  const int64_t key = c.dropout.seed ? *c.dropout.seed : 0;
  Eight<T> bias{};
  if (kKind != kJoin && here) {
    bias = load_eight<T, kAligned>(c.bias, column, left);
  }
  float sums[kEight] = {};
  const int64_t stride = int64_t{gridDim.y} * kWarps * kRows;
  for (int64_t first = (int64_t{blockIdx.y} * kWarps + warp) * kRows; here && first < c.rows; first += stride) {
    Eight<T> x[kRows], grad[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      x[r] = grad[r] = Eight<T>{};
      if (first + r < c.rows) {
        x[r] = load_eight<T, kAligned>(source, (first + r) * c.columns + column, left);
        if (kKind == kGeluBackward) {
          grad[r] = load_eight<T, kAligned>(c.grad, (first + r) * c.columns + column, left);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = first + r;
      if (row < c.rows) {
        if constexpr (kKind == kJoin) {
#pragma unroll
          for (int i = 0; i < kEight; ++i) {
            sums[i] += x[r][i];
          }
          store_eight<T, kAligned>(x[r], c.out, row * all + which * c.columns + column, left);
        } else {
          const uint32_t kept = c.dropout.seed ? kept_of(c.dropout, key, row * eights + eight) : 0xffu;
          Eight<T> out, x_grad;
#pragma unroll
          for (int i = 0; i < kEight; i += 2) {
            const Gelu first_gelu(x[r][i] + bias[i]), second_gelu(x[r][i + 1] + bias[i + 1]);
            out.set_two(i, apply_dropout(first_gelu.value, kept, i, c.dropout.factor),
                        apply_dropout(second_gelu.value, kept, i + 1, c.dropout.factor));
            if constexpr (kKind == kGeluBackward) {
              const float one = apply_dropout(grad[r][i], kept, i, c.dropout.factor) * first_gelu.slope;
              const float two = apply_dropout(grad[r][i + 1], kept, i + 1, c.dropout.factor) * second_gelu.slope;
              sums[i] += one;
              sums[i + 1] += two;
              x_grad.set_two(i, one, two);
            }
          }
          if (kKind == kGelu || c.out) {
            store_eight<T, kAligned>(out, c.out, row * c.columns + column, left);
          }
          if constexpr (kKind == kGeluBackward) {
            store_eight<T, kAligned>(x_grad, c.x_grad, row * c.columns + column, left);
          }
        }
      }
    }
  }
  if constexpr (kKind != kGelu) {
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      shared[warp][i][lane] = sums[i];
    }
    __syncthreads();
    // Each warp sums one of a thread's eight columns.
    if (here && warp < left) {
      float sum = 0;
#pragma unroll
      for (int each = 0; each < kWarps; ++each) {
        sum += shared[each][warp][lane];
      }
      c.partial[blockIdx.y * all + which * c.columns + column + warp] = sum;
    }
  }
}
static_assert(kWarps == kEight, "a warp adds up one of eight columns");

#if !defined(__CUDACC_RTC__)

struct Grid {
  int64_t tiles, strips;

  Grid(int64_t rows, int64_t eights) : tiles((eights + kLanes - 1) / kLanes) {
    const int64_t most = (rows + kWarps * kRowsAtOnce - 1) / (kWarps * kRowsAtOnce), wanted = tiles ? kBlocks / tiles : 0;
    strips = wanted < most ? wanted : most;
    strips = strips < 1 ? 1 : strips > 65535 ? 65535 : strips;
  }
};

template <class T, Kind kKind>
void launch_for(const Columns& c, const Grid& grid, void* sums) {
  const bool aligned =
      c.columns % kEight == 0 && are_aligned(c.x, c.grad, c.third, c.bias, c.out, c.x_grad);
  opk::launch_overlapping(aligned ? columns_kernel<T, true, kKind> : columns_kernel<T, false, kKind>,
              opk::Extent(grid.tiles, grid.strips), kLanes * kWarps, 0, c);
  if (kKind != kGelu) finish<T>(c.partial, grid.strips, kKind == kJoin ? 3 * c.columns : c.columns, sums);
}

template <Kind kKind>
void launch_columns(Columns& c, const Tensor& of, void* sums) {
  const int64_t parts = kKind == kJoin ? 3 : 1;
  const Grid grid(c.rows, parts * eights_of(c.columns));
  const Tensor partial = floats_like(of, {grid.strips, parts * c.columns});
  c.partial = const_cast<float*>(partial.data<const float>());
  OPK_ELEMENT(opk::element_of(of), T, (float, opk::bfloat16, opk::half), launch_for<T, kKind>(c, grid, sums));
}

[[gnu::noinline]] Tensor gelu(const Tensor& x, const Tensor& bias, const MaybeTensor& seed, int64_t site,
                              double p) {
  const int64_t rows = rows_of(x);
  check_row(x, bias);
  const Tensor from = opk::contiguous(x), shift = opk::contiguous(bias);
  Tensor out = opk::empty(x.sizes(), x);
  Columns c{};
  c.x = from.data();
  c.bias = shift.data();
  c.out = out.data();
  c.dropout = dropout_of(x, seed, site, p);
  c.rows = rows;
  c.columns = x.size(-1);
  launch_columns<kGelu>(c, x, nullptr);
  return out;
}

[[gnu::noinline]] opk::tuple<Tensor, Tensor, Tensor> gelu_backward(const Tensor& grad, const Tensor& x,
                                                                   const Tensor& bias, const MaybeTensor& seed,
                                                                   int64_t site, double p, bool recompute) {
  const int64_t rows = rows_of(grad);
  check_same(grad, x);
  check_row(grad, bias);
  const Tensor from = opk::contiguous(grad), value = opk::contiguous(x), shift = opk::contiguous(bias);
  Tensor x_grad = opk::empty(x.sizes(), x), bias_grad = opk::empty({x.size(-1)}, x),
         out = recompute ? opk::empty(x.sizes(), x) : nothing_like(x);
  Columns c{};
  c.x = value.data();
  c.grad = from.data();
  c.bias = shift.data();
  c.out = recompute ? out.data() : nullptr;
  c.x_grad = x_grad.data();
  c.dropout = dropout_of(grad, seed, site, p);
  c.rows = rows;
  c.columns = x.size(-1);
  launch_columns<kGeluBackward>(c, x, bias_grad.data());
  return {static_cast<Tensor&&>(x_grad), static_cast<Tensor&&>(bias_grad), static_cast<Tensor&&>(out)};
}

#endif

}  // namespace
