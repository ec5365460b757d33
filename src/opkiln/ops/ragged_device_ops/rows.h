// Shared by the functions on rows: argument checks and parts of kernels.
#pragma once

#include <opkiln/arguments.h>
#include <opkiln/device_index.h>

namespace rows {

constexpr int kThreads = 128;  // one unit per thread, so that loads of many threads are in flight

// This thread's unit in consecutive rows: its row, and its place in the row.
struct Place {
  int64_t row;
  uint32_t unit;

  __device__ explicit Place(uint32_t a_row) {
    const int64_t whole = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    row = opkiln::device::divide(whole, a_row);
    unit = static_cast<uint32_t>(whole - row * a_row);
  }
};

using opk::Tensor;
using MaybeTensor = opk::optional<Tensor>;

#if !defined(__CUDACC_RTC__)
OPK_PLAIN_BEGIN

inline void check_rows(const Tensor& x) {
  opk::element_of(x);
  opk::check_dim(x, 2);
  OPK_SERVED(x.size(1) < 0x7fffffff, x, " has shape ", x.sizes(), ": rows are too long");
}

inline void check_indices(const Tensor& indices, const Tensor& of) {
  opk::check_dtype(indices, opk::DType::int32);
  opk::check_same_device(of, indices);
}

// Whether rows of this many bytes consist of whole 16-byte units and are aligned to 16 bytes.
inline bool is_packed(int64_t row, std::initializer_list<const void*> tensors) {
  uint64_t all = static_cast<uint64_t>(row);
  for (const void* each : tensors) all |= reinterpret_cast<uintptr_t>(each);
  return all % 16 == 0;
}

inline int64_t blocks_of(int64_t rows, int64_t a_row) { return (rows * a_row + kThreads - 1) / kThreads; }

OPK_PLAIN_END
#endif

}  // namespace rows
