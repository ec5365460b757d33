// The second stage of sums over rows. Each block of the first stage wrote one sum per column. They are added
// here in a fixed order, without atomics: the same input gives the same bits.
#pragma once

#include "eights.h"

namespace {

constexpr int kFinishColumns = 32, kFinishGroups = 32;

// Reduces [sums, blocks, columns] in fp32 to `sums` rows of T.
template <class T>
struct Finish {
  const float* partial;
  T* out[3];
  int64_t blocks;
  int64_t columns;
};

// Each warp reads 32 columns of a block at once.
template <class T>
__global__ void __launch_bounds__(kFinishColumns * kFinishGroups) finish_kernel(const OPK_GRID_CONSTANT Finish<T> f) {
  opk::wait_for_previous();
  __shared__ float shared[kFinishGroups][kFinishColumns];
  const int lane = static_cast<int>(threadIdx.x) % kFinishColumns;
  const int group = static_cast<int>(threadIdx.x) / kFinishColumns;
  const int64_t column = int64_t{blockIdx.x} * kFinishColumns + lane;
  const float* const partial = f.partial + blockIdx.y * f.blocks * f.columns;
  float sum = 0;
  if (column < f.columns) {
#pragma unroll 4
    for (int64_t block = group; block < f.blocks; block += kFinishGroups) {
      sum += partial[block * f.columns + column];
    }
  }
  shared[group][lane] = sum;
  __syncthreads();
  if (group == 0 && column < f.columns) {
    sum = 0;
    for (int each = 0; each < kFinishGroups; ++each) {
      sum += shared[each][lane];
    }
    T* const out = blockIdx.y == 0 ? f.out[0] : blockIdx.y == 1 ? f.out[1] : f.out[2];
    out[column] = T(sum);
  }
}

#if !defined(__CUDACC_RTC__)

template <class T>
void finish(const float* partial, int64_t blocks, int64_t columns, void* first, void* second = nullptr,
            void* third = nullptr) {
  const Finish<T> f{
      partial, {static_cast<T*>(first), static_cast<T*>(second), static_cast<T*>(third)}, blocks, columns};
  const opk::Extent grid((columns + kFinishColumns - 1) / kFinishColumns, second ? 3 : 1);
  opk::launch_overlapping(finish_kernel<T>, grid, kFinishColumns * kFinishGroups, 0, f);
}

#endif

}  // namespace
