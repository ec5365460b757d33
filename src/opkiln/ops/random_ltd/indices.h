// Indices of tokens, int32 or int64.
#pragma once

#include <opkiln/arguments.h>
#if defined(__CUDACC__) || defined(__HIPCC__) || defined(OPKILN_EMULATED) || defined(__CUDACC_RTC__)
#include <opkiln/device_index.h>
#endif

namespace {

struct Indices {
  const void* data;
  bool wide;  // int64

#if defined(__CUDACC__) || defined(__HIPCC__) || defined(OPKILN_EMULATED) || defined(__CUDACC_RTC__)
  __host__ __device__
#endif
  int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};


#if !defined(__CUDACC_RTC__)
OPK_PLAIN_BEGIN

inline void check_indices(const opk::Tensor& indices) {
  OPK_CHECK(indices.dtype() == opk::DType::int32 || indices.dtype() == opk::DType::int64, indices,
            " has dtype ", indices.dtype(), ", expected int32 or int64");
}

inline Indices indices_of(const opk::Tensor& contiguous) {
  return {contiguous.data(), contiguous.dtype() == opk::DType::int64};
}

OPK_PLAIN_END
#endif

}  // namespace
