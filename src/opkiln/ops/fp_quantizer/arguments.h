// Argument checks that the op's functions share. Messages equal reference.py's.
#pragma once

#include <opkiln/arguments.h>

#include "number.h"

#if !defined(__CUDACC_RTC__)
OPK_PLAIN_BEGIN

namespace opkiln {
namespace fp_quantizer {
namespace {

using opk::Device;
using opk::DType;
using opk::Tensor;

inline void check_format(int64_t group_size, int64_t bits, int64_t mantissa_bits) {
  OPK_CHECK(with_format(bits, mantissa_bits, [](auto) {}), "bits is ", bits, " and mantissa_bits is ",
            mantissa_bits,
            ", expected one of e4m3 (8 bits, 3 of mantissa), e5m2 (8 bits, 2 of mantissa), e3m2 (6 bits, 2 of "
            "mantissa), e4m7 (12 bits, 7 of mantissa), e2m1 (4 bits, 1 of mantissa)");
  OPK_CHECK(group_size >= 16 && group_size <= 65536 && group_size % 16 == 0, "group_size is ", group_size,
            ", expected a multiple of 16 from 16 to 65536");
}

inline int64_t byte_count(int64_t numel, int64_t bits) {
  return (numel * bits + 7) / 8;
}

inline int64_t group_count(int64_t numel, int64_t group_size) {
  return (numel + group_size - 1) / group_size;
}

}  // namespace
}  // namespace fp_quantizer
}  // namespace opkiln

OPK_PLAIN_END
#endif
