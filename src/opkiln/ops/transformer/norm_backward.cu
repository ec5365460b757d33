// The backward pass of norm.cu: the gradient of the norm, plus the residual's, through the
// dropout; and the sums over rows for weights and biases. A block keeps its sums in
// registers while it loops over rows, so each tensor is read once.

#include <opkiln/op.h>

#include "partial_sums.h"
#include "teams.h"

namespace {

constexpr int kBackwardBlocks = 264;  // two per SM of an H200

// Null pointers are absent.
struct Backward {
  const void* grad;           // gradient of the norm's result
  const void* residual_grad;  // gradient of the sum from its other uses
  const void* x;              // the normalized sum
  const float* mean;
  const float* scale;
  const void* weight;
  const void* norm_bias;  // set if the norm's result is recomputed
  void* total;            // gradient of the sum
  void* dropped;          // gradient of the input of dropout
  void* out;              // the norm's result, recomputed
  float* partial;         // [sums, blocks, columns]: for bias, weight and norm_bias, or for bias alone
  Dropout dropout;
  int64_t rows;
  int columns;
  int eights;
  int team;
  float share;  // 1 / columns; as a kernel parameter it needs no register
  bool norm;
};

// Adds up the sums of a block's teams, for one kind of sum. The loops
// are not unrolled, because each kind calls this once.
template <int kEights>
__device__ inline void leave_sums(const float (&sums)[kEights][kEight], float* partial, const Backward& b,
                                  float* shared) {
  const int teams = static_cast<int>(blockDim.x) / b.team;
#pragma unroll
  for (int e = 0; e < kEights; ++e) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      shared[i * kTeamThreads + threadIdx.x] = sums[e][i];
    }
    __syncthreads();
#pragma unroll 1
    for (int at = static_cast<int>(threadIdx.x); at < b.team * kEight; at += static_cast<int>(blockDim.x)) {
      const int lane = at / kEight, i = at % kEight;
      float sum = 0;
#pragma unroll 1
      for (int team = 0; team < teams; ++team) {
        sum += shared[i * kTeamThreads + team * b.team + lane];
      }
      const int column = (lane + e * b.team) * kEight + i;
      if (column < b.columns) {
        partial[column] = sum;
      }
    }
  }
}

// Loaded again for each row: the L1 cache has it, and registers are scarce.
template <class T, bool kAligned>
__device__ inline Eight<T> weight_of(const Backward& b, int column) {
  return b.norm && column < b.columns ? load_eight<T, kAligned>(b.weight, column, b.columns - column) : Eight<T>{};
}

template <class T, int kEights, bool kAligned>
__global__ void __launch_bounds__(kTeamThreads, kEights == 1 && sizeof(T) == 2 ? 2 : 1)
    backward_kernel(const OPK_GRID_CONSTANT Backward b) {
  opk::wait_for_previous();
  __shared__ float2 shared[2][kTeamThreads / 32];
  __shared__ float sums[kEight * kTeamThreads];
  const int lane = static_cast<int>(threadIdx.x) % b.team;
  const int64_t teams = blockDim.x / b.team;
  float weight_sums[kEights][kEight] = {}, norm_bias_sums[kEights][kEight] = {}, bias_sums[kEights][kEight] = {};
  int turn = 0;
  for (int64_t first = blockIdx.x * teams; first < b.rows; first += gridDim.x * teams, turn ^= 1) {
    const int64_t row = first + threadIdx.x / b.team;
    const int columns = row < b.rows ? b.columns : 0;  // 0 for teams past the last row
    const int64_t start = row * b.columns;
    Eight<T> grad[kEights], x[kEights], total[kEights];
#pragma unroll
    for (int e = 0; e < kEights; ++e) {
      const int column = (lane + e * b.team) * kEight;
      grad[e] = x[e] = total[e] = Eight<T>{};
      if (column < columns) {
        if (b.norm) {
          grad[e] = load_eight<T, kAligned>(b.grad, start + column, columns - column);
          x[e] = load_eight<T, kAligned>(b.x, start + column, columns - column);
        }
        if (b.residual_grad) {
          total[e] = load_eight<T, kAligned>(b.residual_grad, start + column, columns - column);
        }
      }
    }
    float mean = 0, scale = 0;
    float2 dots = {0.0f, 0.0f};
    if (b.norm) {
      if (columns > 0) {
        mean = b.mean[row];
        scale = b.scale[row];
      }
#pragma unroll
      for (int e = 0; e < kEights; ++e) {
        const Eight<T> weight = weight_of<T, kAligned>(b, (lane + e * b.team) * kEight);
#pragma unroll
        for (int i = 0; i < kEight; ++i) {
          const float normal = (x[e][i] - mean) * scale, part = grad[e][i] * weight[i];
          dots.x += part;  // missing elements are zero
          dots.y += part * normal;
          weight_sums[e][i] += grad[e][i] * normal;
          norm_bias_sums[e][i] += grad[e][i];
        }
        forget(x[e]);
        forget(grad[e]);
      }
      dots = sums_of_team(dots, b.team, shared[turn]);
      dots.x *= b.share;
      dots.y *= b.share;
    }
#pragma unroll
    for (int e = 0; e < kEights; ++e) {
      const int column = (lane + e * b.team) * kEight;
      if (column < columns) {
        const int64_t eight = row * b.eights + lane + e * b.team;
        const uint32_t kept = b.dropout.seed ? kept_of(b.dropout, *b.dropout.seed, eight) : 0xffu;
        const Eight<T> weight = weight_of<T, kAligned>(b, column);
        Eight<T> through;
#pragma unroll
        for (int i = 0; i < kEight; i += 2) {
          float sum[2], part[2];
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const float normal = (x[e][i + k] - mean) * scale;
            sum[k] = scale * (grad[e][i + k] * weight[i + k] - dots.x - normal * dots.y) + total[e][i + k];
            part[k] = apply_dropout(sum[k], kept, i + k, b.dropout.factor);
            bias_sums[e][i + k] += column + i + k < columns ? part[k] : 0.0f;
          }
          total[e].set_two(i, sum[0], sum[1]);
          through.set_two(i, part[0], part[1]);
        }
        if (b.total) {
          store_eight<T, kAligned>(total[e], b.total, start + column, columns - column);
        }
        if (b.dropped) {
          store_eight<T, kAligned>(through, b.dropped, start + column, columns - column);
        }
        if (b.out) {
          const Eight<T> bias = load_eight<T, kAligned>(b.norm_bias, column, columns - column);
#pragma unroll
          for (int i = 0; i < kEight; i += 2) {
            through.set_two(i, (x[e][i] - mean) * scale * weight[i] + bias[i],
                            (x[e][i + 1] - mean) * scale * weight[i + 1] + bias[i + 1]);
          }
          store_eight<T, kAligned>(through, b.out, start + column, columns - column);
        }
      }
    }
  }
  const int64_t all = int64_t{gridDim.x} * b.columns;
  float* const partial = b.partial + int64_t{blockIdx.x} * b.columns;
  leave_sums(bias_sums, partial, b, sums);
  if (b.norm) {
    leave_sums(weight_sums, partial + all, b, sums);
    leave_sums(norm_bias_sums, partial + 2 * all, b, sums);
  }
}

template <class T>
void launch_for(const Backward& b, int64_t blocks, int threads, void* bias, void* weight, void* norm_bias) {
  const bool aligned = b.columns % kEight == 0 &&
      are_aligned(b.grad, b.residual_grad, b.x, b.weight, b.norm_bias, b.total, b.dropped, b.out);
  const bool long_rows = eights_of(b.columns) > kTeamThreads;
  opk::launch_overlapping(!aligned    ? backward_kernel<T, 2, false>
              : long_rows ? backward_kernel<T, 2, true>
                          : backward_kernel<T, 1, true>,
              blocks, threads, 0, b);
  finish<T>(b.partial, blocks, b.columns, bias, weight, norm_bias);
}

// `of` gives the dtype and device of tensors. Without a norm, weight and norm_bias are null.
[[gnu::noinline]] void launch_backward(Backward& b, const Tensor& of, void* bias, void* weight, void* norm_bias) {
  b.eights = static_cast<int>(eights_of(b.columns));
  b.team = team_of(b.eights);
  b.share = 1.0f / static_cast<float>(b.columns);
  const int threads = kTeamThreads / b.team * b.team;
  const int64_t teams = threads / b.team, wanted = (b.rows + teams - 1) / teams;
  // At least one block, which makes sums over no rows zero.
  const int64_t blocks = wanted < 1 ? 1 : wanted < kBackwardBlocks ? wanted : kBackwardBlocks;
  Tensor partial = floats_like(of, {b.norm ? 3 : 1, blocks, b.columns});
  b.partial = partial.data<float>();
  OPK_ELEMENT(opk::element_of(of), T, (float, opk::bfloat16, opk::half), launch_for<T>(b, blocks, threads, bias, weight, norm_bias));
}

[[gnu::noinline]] void check_moment(const Tensor& x, const Tensor& moment) {
  opk::check_dtype(moment, opk::DType::float32);
  opk::check_same_device(x, moment);
  opk::check_contiguous(moment);
  opk::check_shape(moment, {x.sizes().data(), x.dim() - 1});
}

opk::tuple<Tensor, Tensor> dropout_add_backward(const Tensor& grad, const MaybeTensor& seed, int64_t site,
                                                double p) {
  const int64_t rows = rows_of(grad), columns = grad.size(-1);
  check_columns(columns);
  opk::element_of(grad);
  const Tensor from = opk::contiguous(grad);
  Tensor bias = opk::empty({columns}, grad), x = p > 0 ? opk::empty(grad.sizes(), grad) : nothing_like(grad);
  Backward b{};
  b.residual_grad = from.data();
  b.dropped = p > 0 ? x.data() : nullptr;
  b.dropout = dropout_of(grad, seed, site, p);
  b.rows = rows;
  b.columns = static_cast<int>(columns);
  launch_backward(b, grad, bias.data(), nullptr, nullptr);
  return {static_cast<Tensor&&>(x), static_cast<Tensor&&>(bias)};
}

opk::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> dropout_add_norm_backward(
    const Tensor& grad, const Tensor& x, const Tensor& mean, const Tensor& scale, const Tensor& weight,
    const MaybeTensor& norm_bias, const MaybeTensor& residual_grad, const MaybeTensor& seed, int64_t site,
    double p) {
  const int64_t rows = rows_of(grad), columns = grad.size(-1);
  check_columns(columns);
  opk::element_of(grad);
  check_same(grad, x);
  check_moment(x, mean);
  check_moment(x, scale);
  check_row(grad, weight);
  if (norm_bias) check_row(grad, *norm_bias);
  if (residual_grad) check_same(grad, *residual_grad);
  const Tensor from = opk::contiguous(grad), value = opk::contiguous(x), by = opk::contiguous(weight);
  Tensor shift, rest;
  if (norm_bias) shift = opk::contiguous(*norm_bias);
  if (residual_grad) rest = opk::contiguous(*residual_grad);
  Tensor total = opk::empty(grad.sizes(), grad),
         through = p > 0 ? opk::empty(grad.sizes(), grad) : nothing_like(grad),
         bias_grad = opk::empty({columns}, grad), weight_grad = opk::empty({columns}, grad),
         shift_grad = opk::empty({columns}, grad),
         out = norm_bias ? opk::empty(grad.sizes(), grad) : nothing_like(grad);
  Backward b{};
  b.norm = true;
  b.grad = from.data();
  b.residual_grad = residual_grad ? rest.data() : nullptr;
  b.x = value.data();
  b.mean = mean.data<const float>();
  b.scale = scale.data<const float>();
  b.weight = by.data();
  b.norm_bias = norm_bias ? shift.data() : nullptr;
  b.total = total.data();
  b.dropped = p > 0 ? through.data() : nullptr;
  b.out = norm_bias ? out.data() : nullptr;
  b.dropout = dropout_of(grad, seed, site, p);
  b.rows = rows;
  b.columns = static_cast<int>(columns);
  launch_backward(b, grad, bias_grad.data(), weight_grad.data(), shift_grad.data());
  return {static_cast<Tensor&&>(total),       static_cast<Tensor&&>(through),    static_cast<Tensor&&>(bias_grad),
          static_cast<Tensor&&>(weight_grad), static_cast<Tensor&&>(shift_grad), static_cast<Tensor&&>(out)};
}

}  // namespace

OPKILN_OP(dropout_add_backward, cuda);
OPKILN_OP(dropout_add_norm_backward, cuda);
