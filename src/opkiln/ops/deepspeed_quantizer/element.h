// The arithmetic of groups and elements, as in reference.py: in fp32, with each operation rounded separately
// except for the fused one. Compiled for devices by nvcc and hipcc, and for the host by any C++ compiler.
#pragma once

#include "work.h"

namespace {

OPK_HOST_DEVICE inline float infinity() {
  return opk::bits::to_float(0x7f800000u);
}

// Floats near this number are whole numbers: adding it rounds to
// nearest, ties to even, and leaves the result in the low bits.
constexpr float kRounder = 0x1.8p23f;

// DeepSpeed is compiled with --use_fast_math, which turns divisions
// into these instructions. (hipcc gets no such flag.)
OPK_HOST_DEVICE inline float quotient(float a, float b) {
#if defined(__CUDA_ARCH__)
  float out;
  asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
#else
  return a / b;
#endif
}

OPK_HOST_DEVICE inline float inverse(float a) {
#if defined(__CUDA_ARCH__)
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(a));
  return out;
#else
  return 1.0f / a;
#endif
}

// a * b + c, rounded once.
OPK_HOST_DEVICE inline float multiply_add_once(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return fmaf(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

// How the elements of a group are scaled.
struct Scale {
  float factor, offset;
  float lowest, highest;  // the range of levels

  OPK_HOST_DEVICE static Scale symmetric(float greatest_magnitude, int bits) {
    const float count = static_cast<float>(1 << bits);
    const float factor =
        greatest_magnitude == 0 ? 1.0f : quotient(count, 2 * greatest_magnitude);
    return {factor, 0.0f, -count / 2, count / 2 - 1};
  }

  OPK_HOST_DEVICE static Scale asymmetric(float least, float greatest, int bits) {
    const float count = static_cast<float>(1 << bits);
    const float factor = greatest == least ? 1.0f : quotient(count, greatest - least);
    return {factor, (greatest + least) * 0.5f, -count / 2, count / 2 - 1};
  }

  // The level of an element, in the low bits of the result.
  template <bool kSymmetric>
  OPK_HOST_DEVICE uint32_t level(float x) const {
    float y = (kSymmetric ? x : x - offset) * factor;
    y = y == y ? y : 0.0f;
    y = y < lowest ? lowest : y;
    y = y > highest ? highest : y;
    return opk::bits::of_float(y + kRounder);
  }

  template <bool kSymmetric>
  OPK_HOST_DEVICE void store(float* params, int64_t group) const {
    if (kSymmetric) {
      params[group] = inverse(factor);
    } else {
      params[2 * group] = inverse(factor);
      params[2 * group + 1] = offset;
    }
  }
};

// Converts levels of a group back to values.
struct Back {
  float scale, offset;
  bool symmetric;

  OPK_HOST_DEVICE static Back of(const Groups& groups, int64_t group) {
    if (groups.symmetric) {
      return {groups.params[group], 0.0f, true};
    }
    return {groups.params[2 * group], groups.params[2 * group + 1], false};
  }
  OPK_HOST_DEVICE float operator()(float level) const {
    return symmetric ? level * scale : multiply_add_once(level, scale, offset);
  }
};

}  // namespace
