// Angles of rotary position embeddings, in turns, as 64-bit fractions. A frequency has the same form, so
// position times frequency is one integer multiplication, and overflow drops the whole turns. The result is
// exact at every position. A float angle has no fractional digits left at position 2^23.
#pragma once

#include "op/types.h"

namespace opkiln {

constexpr int kMostPairs = 256;  // the most pairs whose frequencies fit into a kernel's parameters

struct Frequencies {
  uint64_t turns[kMostPairs];  // per position, for each pair
};

// Cosine and sine of an angle. The error is at most 2e-7, measured over all angles in steps of 2^-24 turns.
OPK_HOST_DEVICE inline void cos_sin(uint64_t turns, float* cosine, float* sine) {
  const uint32_t rounded = static_cast<uint32_t>((turns + 0x80000000u) >> 32);
  const uint32_t quarter = (rounded + 0x20000000u) >> 30;                // the nearest quarter turn, 0 to 3
  const int32_t left = static_cast<int32_t>(rounded - (quarter << 30));  // at most an eighth of a turn
  const float angle = static_cast<float>(left) * (6.283185307179586f / 4294967296.0f), y = angle * angle;
  // Taylor series. The truncation error is below 2e-9.
  const float s = angle +
      angle * y * (-1.6666667e-1f + y * (8.3333333e-3f + y * (-1.9841270e-4f + y * 2.7557319e-6f)));
  const float c = 1 +
      y * (-0.5f + y * (4.1666667e-2f + y * (-1.3888889e-3f + y * (2.4801587e-5f - y * 2.7557319e-7f))));
  const bool odd = quarter & 1;
  const uint32_t cosine_sign = ((quarter + 1) & 2) << 30, sine_sign = (quarter & 2) << 30;
  *cosine = opk::bits::to_float(opk::bits::of_float(odd ? s : c) ^ cosine_sign);
  *sine = opk::bits::to_float(opk::bits::of_float(odd ? c : s) ^ sine_sign);
}

#if !defined(__CUDACC_RTC__)
// theta ** (-i / pairs) for each pair. Each thread keeps the last
// result, because a model asks for the same again.
inline void set_frequencies(Frequencies& out, double theta, int pairs) {
  static thread_local struct {
    double theta;
    int pairs;
    Frequencies found;
  } last = {0, 0, {}};
  if (last.theta != theta || last.pairs != pairs) {
    for (int i = 0; i < pairs; ++i) {
      const double turns = __builtin_pow(theta, -double(i) / pairs) * 0.15915494309189533577;
      last.found.turns[i] =
          static_cast<uint64_t>((turns - __builtin_floor(turns)) * 18446744073709551616.0);
    }
    last.theta = theta, last.pairs = pairs;
  }
  __builtin_memcpy(out.turns, last.found.turns, sizeof(uint64_t) * static_cast<size_t>(pairs));
}
#endif

}  // namespace opkiln
