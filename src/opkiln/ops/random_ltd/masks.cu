// Gathers rows and columns of masks. A thread has one column and eight rows, so that eight loads are in
// flight. Neighbouring threads read columns close to each other if the indices are sorted.

#include <opkiln/op.h>

#include "masks.h"

namespace {

constexpr int kThreads = 256;
constexpr int kRows = 8;

__device__ inline int64_t index_at(const Masks& l, int64_t start, int64_t i) {
  return l.indices.data == nullptr ? i : l.indices[start + i];
}

__device__ inline bool is_in(const Masks& l, int64_t index) {
  return index >= 0 && index < l.tokens;
}

template <class T>
__global__ void __launch_bounds__(kThreads) mask_kernel(const OPK_GRID_CONSTANT Masks l) {
  opk::wait_for_previous();
  const int64_t wide = (l.kept + kThreads - 1) / kThreads, high = (l.kept + kRows - 1) / kRows;
  const int64_t block = blockIdx.x, image = block / (wide * high), tile = block % (wide * high);
  const int64_t top = tile / wide * kRows, j = tile % wide * kThreads + threadIdx.x;
  const int64_t head = image % l.heads, sequence = image / l.heads, start = sequence * l.kept;
  if (j >= l.kept) return;
  // Loads all indices before checking any, so that the loads overlap.
  const int64_t column = index_at(l, start, j);
  int64_t row[kRows];
  bool right = is_in(l, column);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    row[r] = top + r < l.kept ? index_at(l, start, top + r) : 0;
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) right = right && is_in(l, row[r]);
  if (!right) opkiln::device::trap();
  const T* const mask = reinterpret_cast<const T*>(l.mask) + sequence % l.batch * l.batch_step +
      head * l.head_step + column;
  T* const out = reinterpret_cast<T*>(l.out) + (image * l.kept + top) * l.kept + j;
  T found[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (top + r < l.kept) found[r] = mask[row[r] * l.row_step];
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (top + r < l.kept) out[r * l.kept] = found[r];
  }
}

template <class T>
void launch_masks(const Masks& masks) {
  const int64_t tiles =
      (masks.kept + kThreads - 1) / kThreads * ((masks.kept + kRows - 1) / kRows);
  const int64_t images = masks.layers * masks.batch * masks.heads;
  opk::launch_overlapping(mask_kernel<T>, images * tiles, kThreads, 0, masks);
}

void gather_masks(const Masks& masks) {
  switch (masks.size) {
    case 1: return launch_masks<uint8_t>(masks);
    case 2: return launch_masks<uint16_t>(masks);
    case 4: return launch_masks<uint32_t>(masks);
    case 8: return launch_masks<uint64_t>(masks);
    default: return launch_masks<uint4>(masks);
  }
}

}  // namespace

OPKILN_OP(mask_gather_bert, cuda);
OPKILN_OP(mask_gather_gpt, cuda);
