// The forward pass: adds bias, dropout and residual, and normalizes the
// sum. A row is read once, into the registers of a team of threads.

#include <opkiln/op.h>

#include "teams.h"

namespace {

// Null pointers are absent. Without x, the residual is normalized.
struct Forward {
  const void* x;
  const void* bias;
  const void* residual;
  const void* weight;
  const void* norm_bias;
  void* sum;
  void* out;  // null: no norm
  float* mean;
  float* scale;
  Dropout dropout;
  int64_t rows;
  int64_t columns;
  float eps;
  int team;
};

template <class T, int kEights, bool kAligned>
__global__ void __launch_bounds__(kTeamThreads, kEights == 1 ? 3 : 2) forward_kernel(const OPK_GRID_CONSTANT Forward f) {
  opk::wait_for_previous();
  __shared__ float2 shared[2][kTeamThreads / 32];
  const int lane = static_cast<int>(threadIdx.x) % f.team;
  const int64_t row = int64_t{blockIdx.x} * (blockDim.x / f.team) + threadIdx.x / f.team;
  const int64_t columns = row < f.rows ? f.columns : 0;  // 0 for teams past the last row
  const int64_t start = row * f.columns;
  Eight<T> value[kEights], x[kEights];
#pragma unroll
  for (int e = 0; e < kEights; ++e) {
    const int64_t column = int64_t{lane + e * f.team} * kEight;
    value[e] = x[e] = Eight<T>{};
    if (column < columns) {
      value[e] = load_eight<T, kAligned>(f.residual, start + column, columns - column);
      if (f.x) {
        x[e] = load_eight<T, kAligned>(f.x, start + column, columns - column);
      }
    }
  }
  if (f.x) {
    const int64_t key = f.dropout.seed ? *f.dropout.seed : 0;
#pragma unroll
    for (int e = 0; e < kEights; ++e) {
      const int64_t column = int64_t{lane + e * f.team} * kEight;
      if (column < columns) {
        const Eight<T> bias = load_eight<T, kAligned>(f.bias, column, columns - column);
        const uint32_t kept =
            f.dropout.seed ? kept_of(f.dropout, key, row * eights_of(columns) + column / kEight) : 0xffu;
#pragma unroll
        for (int i = 0; i < kEight; i += 2) {
          value[e].set_two(i, apply_dropout(x[e][i] + bias[i], kept, i, f.dropout.factor) + value[e][i],
                           apply_dropout(x[e][i + 1] + bias[i + 1], kept, i + 1, f.dropout.factor) + value[e][i + 1]);
        }
        store_eight<T, kAligned>(value[e], f.sum, start + column, columns - column);
      }
    }
  }
  if (!f.out) {
    return;
  }
  const float share = 1.0f / static_cast<float>(f.columns);
  float2 sums = {0.0f, 0.0f};
#pragma unroll
  for (int e = 0; e < kEights; ++e) {
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      sums.x += value[e][i];  // missing elements are zero
    }
  }
  const float mean = sums_of_team(sums, f.team, shared[0]).x * share;
  sums = {0.0f, 0.0f};
#pragma unroll
  for (int e = 0; e < kEights; ++e) {
    const int64_t column = int64_t{lane + e * f.team} * kEight;
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      const float off = value[e][i] - mean;
      sums.x += column + i < columns ? off * off : 0.0f;
    }
  }
  const float scale = rsqrtf(sums_of_team(sums, f.team, shared[1]).x * share + f.eps);
#pragma unroll
  for (int e = 0; e < kEights; ++e) {
    const int64_t column = int64_t{lane + e * f.team} * kEight;
    if (column < columns) {
      const Eight<T> weight = load_eight<T, kAligned>(f.weight, column, columns - column);
      const Eight<T> bias = load_eight<T, kAligned>(f.norm_bias, column, columns - column);
#pragma unroll
      for (int i = 0; i < kEight; i += 2) {
        value[e].set_two(i, (value[e][i] - mean) * scale * weight[i] + bias[i],
                         (value[e][i + 1] - mean) * scale * weight[i + 1] + bias[i + 1]);
      }
      store_eight<T, kAligned>(value[e], f.out, start + column, columns - column);
    }
  }
  if (lane == 0 && columns > 0) {
    f.mean[row] = mean;
    f.scale[row] = scale;
  }
}

template <class T>
void launch_for(const Forward& f) {
  const bool aligned = f.columns % kEight == 0 &&
      are_aligned(f.x, f.bias, f.residual, f.weight, f.norm_bias, f.sum, f.out);
  const bool long_rows = eights_of(f.columns) > kTeamThreads;
  const int threads = f.team > 128 ? f.team : 128 / f.team * f.team;
  const int64_t teams = threads / f.team;
  opk::launch_overlapping(!aligned   ? forward_kernel<T, 2, false>
              : long_rows ? forward_kernel<T, 2, true>
                          : forward_kernel<T, 1, true>,
              (f.rows + teams - 1) / teams, threads, 0, f);
}

void launch_forward(Forward& f, opkiln::ElementType type) {
  f.team = team_of(eights_of(f.columns));
  OPK_ELEMENT(type, T, (float, opk::bfloat16, opk::half), launch_for<T>(f));
}

// An fp32 number per row: the shape of `x` without its last dimension.
[[gnu::noinline]] Tensor moment_of(const Tensor& x) {
  return floats_like(x, {x.sizes().data(), x.dim() - 1});
}

opk::tuple<Tensor, Tensor, Tensor> norm_with_moments(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                                     double eps) {
  const int64_t rows = rows_of(x);
  const opkiln::ElementType type = opk::element_of(x);
  check_columns(x.size(-1));
  check_row(x, weight);
  check_row(x, bias);
  const Tensor from = opk::contiguous(x), by = opk::contiguous(weight), shift = opk::contiguous(bias);
  Tensor out = opk::empty(x.sizes(), x), mean = moment_of(x), scale = moment_of(x);
  Forward f{nullptr,     nullptr,            from.data(),         by.data(),      shift.data(),
            nullptr,     out.data(),         mean.data<float>(),  scale.data<float>(),
            {nullptr, 0, 0, 1}, rows, x.size(-1), static_cast<float>(eps), 1};
  launch_forward(f, type);
  return {static_cast<Tensor&&>(out), static_cast<Tensor&&>(mean), static_cast<Tensor&&>(scale)};
}

Tensor dropout_add(const Tensor& x, const Tensor& bias, const Tensor& residual, const MaybeTensor& seed,
                   int64_t site, double p) {
  const int64_t rows = rows_of(x);
  const opkiln::ElementType type = opk::element_of(x);
  check_columns(x.size(-1));
  check_row(x, bias);
  check_same(x, residual);
  const Tensor from = opk::contiguous(x), shift = opk::contiguous(bias), rest = opk::contiguous(residual);
  Tensor sum = opk::empty(x.sizes(), x);
  Forward f{from.data(), shift.data(), rest.data(), nullptr, nullptr, sum.data(), nullptr, nullptr, nullptr,
            dropout_of(x, seed, site, p), rows, x.size(-1), 0, 1};
  launch_forward(f, type);
  return sum;
}

opk::tuple<Tensor, Tensor, Tensor, Tensor> dropout_add_norm(
    const Tensor& x, const Tensor& bias, const Tensor& residual, const Tensor& weight, const Tensor& norm_bias,
    const MaybeTensor& seed, int64_t site, double p, double eps) {
  const int64_t rows = rows_of(x);
  const opkiln::ElementType type = opk::element_of(x);
  check_columns(x.size(-1));
  check_row(x, bias);
  check_same(x, residual);
  check_row(x, weight);
  check_row(x, norm_bias);
  const Tensor from = opk::contiguous(x), shift = opk::contiguous(bias), rest = opk::contiguous(residual),
               by = opk::contiguous(weight), norm_shift = opk::contiguous(norm_bias);
  Tensor sum = opk::empty(x.sizes(), x), out = opk::empty(x.sizes(), x), mean = moment_of(x),
         scale = moment_of(x);
  Forward f{from.data(), shift.data(), rest.data(), by.data(), norm_shift.data(), sum.data(), out.data(),
            mean.data<float>(), scale.data<float>(), dropout_of(x, seed, site, p), rows, x.size(-1),
            static_cast<float>(eps), 1};
  launch_forward(f, type);
  return {static_cast<Tensor&&>(sum), static_cast<Tensor&&>(out), static_cast<Tensor&&>(mean),
          static_cast<Tensor&&>(scale)};
}

}  // namespace

OPKILN_OP(norm_with_moments, cuda);
OPKILN_OP(dropout_add, cuda);
OPKILN_OP(dropout_add_norm, cuda);
