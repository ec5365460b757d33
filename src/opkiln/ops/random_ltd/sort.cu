// Sorts indices of tokens; a block has a row. It sets a bit for each index, counts the bits before each word,
// and reads them in order. Duplicate indices leave too few bits; then the block sorts by comparing.

#include <opkiln/op.h>

#include "sort.h"

namespace {

constexpr int kMostThreads = 1024;
constexpr int64_t kMostTokens = 1 << 16;  // 8 KiB of bits; longer rows are sorted by comparing

// A bitonic sort in which all comparisons have the same direction. So a row of
// any length can be padded in thought with numbers that never move.
template <class T>
__device__ void sort_by_comparing(T* row, int64_t kept) {
  int64_t whole = 1;
  while (whole < kept) whole *= 2;
  for (int64_t size = 2; size <= whole; size *= 2) {
    for (int64_t step = size / 2; step > 0; step /= 2) {
      for (int64_t i = threadIdx.x; i < whole / 2; i += blockDim.x) {
        const int64_t low = i / step * 2 * step + i % step;
        // The first pass of a merge compares with the mirrored half.
        const int64_t high = step == size / 2 ? low / size * size + size - 1 - low % size : low + step;
        if (high < kept && row[high] < row[low]) {
          const T smaller = row[high];
          row[high] = row[low];
          row[low] = smaller;
        }
      }
      __syncthreads();
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kMostThreads) sort_kernel(const OPK_GRID_CONSTANT Rows l,
                                                            int32_t words) {
  opk::wait_for_previous();
  __shared__ uint32_t bits[kMostTokens / 32];
  __shared__ uint32_t counts[kMostThreads];
  const T* const in = static_cast<const T*>(l.in) + int64_t{blockIdx.x} * l.kept;
  T* const out = static_cast<T*>(l.out) + int64_t{blockIdx.x} * l.kept;
  const int32_t me = static_cast<int32_t>(threadIdx.x), threads = static_cast<int32_t>(blockDim.x);
  for (int32_t w = me; w < words; w += threads) bits[w] = 0;
  __syncthreads();
  for (int64_t i = me; i < l.kept; i += threads) {
    const int64_t index = in[i];
    if (index < 0 || index >= l.tokens) opkiln::device::trap();
    if (words > 0) atomicOr(&bits[index / 32], 1u << index % 32);
  }
  __syncthreads();
  const int32_t a_thread = (words + threads - 1) / threads;
  const int32_t first = me * a_thread, end = first + a_thread < words ? first + a_thread : words;
  uint32_t mine = 0;
  for (int32_t w = first; w < end; ++w) mine += __popc(bits[w]);
  counts[me] = mine;
  __syncthreads();
  for (int32_t distance = 1; distance < threads; distance *= 2) {
    const uint32_t before = me >= distance ? counts[me - distance] : 0;
    __syncthreads();
    counts[me] += before;
    __syncthreads();
  }
  if (counts[threads - 1] != l.kept) {
    if (in != out) {
      for (int64_t i = me; i < l.kept; i += threads) out[i] = in[i];
      __syncthreads();
    }
    return sort_by_comparing(out, l.kept);
  }
  int64_t place = counts[me] - mine;
  for (int32_t w = first; w < end; ++w) {
    for (uint32_t left = bits[w]; left != 0; left &= left - 1) {
      out[place++] = static_cast<T>(w * 32 + __ffs(static_cast<int>(left)) - 1);
    }
  }
}

void sort(const Rows& rows) {
  const int64_t tokens = rows.tokens <= kMostTokens ? rows.tokens : 0;
  const int32_t words = static_cast<int32_t>((tokens + 31) / 32);
  const int threads = rows.kept <= 4096 ? 256 : kMostThreads;
  opk::launch_overlapping(rows.wide ? sort_kernel<int64_t> : sort_kernel<int32_t>, rows.rows, threads, 0, rows, words);
}

}  // namespace

OPKILN_OP(token_sort, cuda);
OPKILN_OP(token_sort_, cuda);
