// Shared by the CPU and CUDA versions of sorting: argument checks, and the op's functions.
#pragma once

#include "indices.h"

namespace {

struct Rows {
  const void* in;
  void* out;  // may be `in`
  int64_t rows, kept;
  int64_t tokens;  // all indices are below this, and usually distinct
  bool wide;       // int64
};

#if !defined(__CUDACC_RTC__)
OPK_PLAIN_BEGIN

using opk::Tensor;

// Defined by each device's source. Called only if there is at least one row.
void sort(const Rows& rows);

Rows rows_of(const Tensor& indices, int64_t tokens) {
  opk::device_of(indices);
  check_indices(indices);
  OPK_CHECK(tokens >= 0, "tokens is ", tokens, ", expected at least 0");
  const int64_t kept = indices.dim() > 0 ? indices.size(-1) : 1;
  const int64_t count = kept > 0 ? indices.numel() / kept : 0;
  return {nullptr, nullptr, count, kept, tokens, indices.dtype() == opk::DType::int64};
}

Tensor token_sort(const Tensor& indices, int64_t tokens) {
  Rows rows = rows_of(indices, tokens);
  const Tensor given = opk::contiguous(indices);
  Tensor out = opk::empty(indices.sizes(), indices);
  rows.in = given.data();
  rows.out = out.data();
  if (rows.rows > 0) sort(rows);
  return out;
}

void token_sort_(Tensor& indices, int64_t tokens) {
  Rows rows = rows_of(indices, tokens);
  if (rows.rows == 0) return;
  if (indices.is_contiguous()) {
    rows.in = rows.out = indices.data();
    sort(rows);
    return;
  }
  const Tensor given = opk::contiguous(indices);
  Tensor out = opk::empty(indices.sizes(), indices);
  rows.in = given.data();
  rows.out = out.data();
  sort(rows);
  opk::call("aten::copy_", "", indices, out, false);
}

OPK_PLAIN_END
#endif

}  // namespace
