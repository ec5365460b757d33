// Vec for 64-bit Arm, which always has NEON: 4 floats. Included by vec.h only.
#pragma once

#include <arm_neon.h>

OPKILN_NAMESPACE_BEGIN

struct Vec {
  static constexpr int kLanes = 4;
  float32x4_t value;

  static Vec all(float x) {
    return {vdupq_n_f32(x)};
  }
  static Vec load(const float* from) {
    return {vld1q_f32(from)};
  }
  static Vec load(const BFloat16* from) {
    const uint16x4_t bits = vld1_u16(reinterpret_cast<const uint16_t*>(from));
    return {vreinterpretq_f32_u32(vshll_n_u16(bits, 16))};
  }
  static Vec load(const Float16* from) {
    const uint16x4_t bits = vld1_u16(reinterpret_cast<const uint16_t*>(from));
    return {vcvt_f32_f16(vreinterpret_f16_u16(bits))};
  }

  void store(float* to) const {
    vst1q_f32(to, value);
  }
  void store(BFloat16* to) const {
    vst1_u16(reinterpret_cast<uint16_t*>(to), vshrn_n_u32(round_bfloat16(), 16));
  }
  void store(Float16* to) const {
    vst1_u16(reinterpret_cast<uint16_t*>(to), vreinterpret_u16_f16(vcvt_f16_f32(value)));
  }

  template <class T>
  void store_around(T* to) const {
    store(to);
  }

  static void load_pair(const BFloat16* from, Vec& even, Vec& odd) {
    const uint32x4_t bits = vreinterpretq_u32_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(from)));
    even = {vreinterpretq_f32_u32(vshlq_n_u32(bits, 16))};
    odd = {vreinterpretq_f32_u32(vandq_u32(bits, vdupq_n_u32(0xffff0000u)))};
  }
  static void store_pair(Vec even, Vec odd, BFloat16* to) {
    const uint32x4_t e = vreinterpretq_u32_f32(even.value), o = vreinterpretq_u32_f32(odd.value);
    const uint16x8_t high = vreinterpretq_u16_u32(vsriq_n_u32(o, e, 16));
    const uint16x8_t low = vreinterpretq_u16_u32(vsliq_n_u32(e, o, 16));
    const uint16x8_t bias = vbslq_u16(vdupq_n_u16(1), high, vdupq_n_u16(0x7ffe));
    vst1q_u16(reinterpret_cast<uint16_t*>(to), vsraq_n_u16(high, vrhaddq_u16(low, bias), 15));
  }
  static void store_pair_around(Vec even, Vec odd, BFloat16* to) {
    store_pair(even, odd, to);
  }

  // Rounds to bfloat16, in the upper half of each lane.
  uint32x4_t round_bfloat16() const {
    const uint32x4_t bits = vreinterpretq_u32_f32(value);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t bias = vaddq_u32(odd, vdupq_n_u32(0x7fff));
    return vbslq_u32(  // if it equals itself, so it is not NaN
        vceqq_f32(value, value), vaddq_u32(bits, bias), vdupq_n_u32(0x7fc00000));
  }

  friend Vec operator+(Vec a, Vec b) {
    return {vaddq_f32(a.value, b.value)};
  }
  friend Vec operator-(Vec a, Vec b) {
    return {vsubq_f32(a.value, b.value)};
  }
  friend Vec operator*(Vec a, Vec b) {
    return {vmulq_f32(a.value, b.value)};
  }
  friend Vec operator/(Vec a, Vec b) {
    return {vdivq_f32(a.value, b.value)};
  }
  friend Vec rough_reciprocal(Vec a) {
    const float32x4_t guess = vrecpeq_f32(a.value);
    return {vmulq_f32(guess, vrecpsq_f32(a.value, guess))};
  }
  friend Vec reciprocal(Vec a) {
    const float32x4_t guess = rough_reciprocal(a).value;
    return {vmulq_f32(guess, vrecpsq_f32(a.value, guess))};
  }
  friend Vec sqrt(Vec a) {
    return {vsqrtq_f32(a.value)};
  }
  friend Vec multiply_add(Vec a, Vec b, Vec c) {
    return {vfmaq_f32(c.value, a.value, b.value)};
  }
  friend Vec subtract_product(Vec c, Vec a, Vec b) {
    return {vfmsq_f32(c.value, a.value, b.value)};
  }
  friend Vec magnitude(Vec a) {
    return {vabsq_f32(a.value)};
  }
  friend Vec sign(Vec a) {
    const uint32x4_t nonzero = vorrq_u32(vcltzq_f32(a.value), vcgtzq_f32(a.value));
    const float32x4_t one = vbslq_f32(vdupq_n_u32(0x80000000u), a.value, vdupq_n_f32(1));
    return {vbslq_f32(nonzero, one, a.value)};
  }
  friend Vec at_least(Vec bound, Vec a) {
    return {vmaxq_f32(bound.value, a.value)};
  }
  friend Vec at_most(Vec bound, Vec a) {
    return {vminq_f32(bound.value, a.value)};
  }
  friend Vec within_exponents(Vec a) {
    return at_least(all(-127), at_most(all(128), a));
  }
  friend Vec rest_of_whole(Vec a) {
    return a - (whole_power(a) - all(kExponents));
  }
  friend Vec whole_power(Vec a) {
    return a + all(kExponents);
  }
  friend Vec times_power_of_two(Vec a, Vec power) {
    return a * Vec{vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(power.value), 23))};
  }
};

OPKILN_NAMESPACE_END
