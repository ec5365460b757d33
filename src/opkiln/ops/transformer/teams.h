// Teams of threads that have a row each, and sums over a team.
#pragma once

#include <opkiln/group_reduce.h>

#include "eights.h"

namespace {

constexpr int kTeamThreads = 512;                             // the largest block
constexpr int64_t kMostColumns = kTeamThreads * 2 * kEight;   // a thread has up to two eights

// Sums two values over a team: a power of two of threads below a warp, or whole warps. All threads of the
// block must call this, with other shared memory than in the call before.
__device__ inline float2 sums_of_team(float2 value, int team, float2* shared) {
  const unsigned within = team < 32 ? team : 32;
  for (unsigned bits = 1; bits < within; bits *= 2) {
    value.x += opkiln::exchange(value.x, bits);
    value.y += opkiln::exchange(value.y, bits);
  }
  if (team > 32) {
    const int warps = team / 32, first = static_cast<int>(threadIdx.x) / team * warps;
    if (threadIdx.x % 32 == 0) {
      shared[threadIdx.x / 32] = value;
    }
    __syncthreads();
    value = {0.0f, 0.0f};
    for (int warp = first; warp < first + warps; ++warp) {
      value.x += shared[warp].x;
      value.y += shared[warp].y;
    }
  }
  return value;
}

#if !defined(__CUDACC_RTC__)

// The threads per row: each has one eight, or two if a block is too small.
inline int team_of(int64_t eights) {
  const int64_t wanted = eights > kTeamThreads ? (eights + 1) / 2 : eights;
  if (wanted > 32) return static_cast<int>((wanted + 31) / 32 * 32);
  int team = 1;
  while (team < wanted) team *= 2;
  return team;
}

inline void check_columns(int64_t columns) {
  OPK_SERVED(columns <= kMostColumns, "rows have ", columns, " elements, expected at most ", kMostColumns);
}

#endif

}  // namespace
