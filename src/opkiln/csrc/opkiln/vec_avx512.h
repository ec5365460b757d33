// Vec for AVX-512 (F, BW, VL, DQ): 16 floats. Included by vec.h only. The comments here hold for every Vec.
#pragma once

#include <immintrin.h>

OPKILN_NAMESPACE_BEGIN

struct Vec {
  static constexpr int kLanes = 16;
  __m512 value;

  static Vec all(float x) {
    return {_mm512_set1_ps(x)};
  }
  static Vec load(const float* from) {
    return {_mm512_loadu_ps(from)};
  }
  static Vec load(const BFloat16* from) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
  }
  static Vec load(const Float16* from) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
  }

  void store(float* to) const {
    _mm512_storeu_ps(to, value);
  }
  void store(BFloat16* to) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bfloat16());
  }
  void store(Float16* to) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), float16());
  }

  // Non-temporal stores. The memory must be aligned to the bytes that are stored.
  void store_around(float* to) const {
    _mm512_stream_ps(to, value);
  }
  void store_around(BFloat16* to) const {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), bfloat16());
  }
  void store_around(Float16* to) const {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), float16());
  }

  // Splits 2 * kLanes elements into those with even and those with odd indices.
  static void load_pair(const BFloat16* from, Vec& even, Vec& odd) {
    const __m512i bits = _mm512_loadu_si512(from);
    even = {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16))};
    odd = {_mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000))))};
  }
  static void store_pair(Vec even, Vec odd, BFloat16* to) {
    _mm512_storeu_si512(to, join(even, odd));
  }
  static void store_pair_around(Vec even, Vec odd, BFloat16* to) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), join(even, odd));
  }
  // Rounds both halves of a pair at once, in words of 16 bits. The high word gains one if the low word is above
  // a half, or is a half and the high word is odd: the carry of low + 0x7fff + odd.
  //
  // A NaN stays as it is, so its low half must be zero. It is in all that arithmetic makes of bfloat16 numbers.
  static __m512i join(Vec even, Vec odd) {
    const __m512i e = _mm512_castps_si512(even.value), o = _mm512_castps_si512(odd.value);
    const __m512i high = _mm512_mask_blend_epi16(0x55555555, o, _mm512_srli_epi32(e, 16));
    const __m512i low = _mm512_mask_blend_epi16(0x55555555, _mm512_slli_epi32(o, 16), e);
    // (high & 1) | 0x7ffe; the average adds one and drops the last bit
    const __m512i bias = _mm512_ternarylogic_epi32(high, _mm512_set1_epi16(1), _mm512_set1_epi16(0x7ffe), 0xea);
    return _mm512_add_epi16(high, _mm512_srli_epi16(_mm512_avg_epu16(low, bias), 15));
  }

  __mmask16 is_number() const {
    return _mm512_cmp_ps_mask(value, value, _CMP_ORD_Q);
  }
  // Rounds to bfloat16, in the upper half of each lane. VCVTNEPS2BF16 would flush subnormals to zero.
  __m512i round_bfloat16() const {
    const __m512i bits = _mm512_castps_si512(value);
    const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
    const __m512i biased = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
    return _mm512_mask_sub_epi32(biased, odd, biased, _mm512_set1_epi32(-1));
  }
  // The same, in the lower half of each lane.
  __m512i bfloat16_bits() const {
    return _mm512_mask_srli_epi32(_mm512_set1_epi32(0x7fc0), is_number(), round_bfloat16(), 16);
  }
  __m256i bfloat16() const {
    return _mm512_cvtepi32_epi16(bfloat16_bits());
  }
  __m256i float16() const {
    return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }

  friend Vec operator+(Vec a, Vec b) {
    return {_mm512_add_ps(a.value, b.value)};
  }
  friend Vec operator-(Vec a, Vec b) {
    return {_mm512_sub_ps(a.value, b.value)};
  }
  friend Vec operator*(Vec a, Vec b) {
    return {_mm512_mul_ps(a.value, b.value)};
  }
  friend Vec operator/(Vec a, Vec b) {
    return {_mm512_div_ps(a.value, b.value)};
  }
  // 1 / a for a >= 1, faster than a division; 0 for infinity. The relative errors are below 2^-11 and 2^-22.
  friend Vec rough_reciprocal(Vec a) {
    return {_mm512_rcp14_ps(a.value)};
  }
  friend Vec reciprocal(Vec a) {
    const __m512 guess = _mm512_rcp14_ps(a.value), one = _mm512_set1_ps(1);
    // For an infinite `a` the rest is NaN, and MAXPS returns its second operand.
    const __m512 rest = _mm512_max_ps(_mm512_fnmadd_ps(a.value, guess, one), _mm512_set1_ps(-1));
    return {_mm512_fmadd_ps(guess, rest, guess)};
  }
  friend Vec sqrt(Vec a) {
    return {_mm512_sqrt_ps(a.value)};
  }
  // a * b + c, rounded once.
  friend Vec multiply_add(Vec a, Vec b, Vec c) {
    return {_mm512_fmadd_ps(a.value, b.value, c.value)};
  }
  // c - a * b, rounded once.
  friend Vec subtract_product(Vec c, Vec a, Vec b) {
    return {_mm512_fnmadd_ps(a.value, b.value, c.value)};
  }
  friend Vec magnitude(Vec a) {
    return {_mm512_abs_ps(a.value)};
  }
  // -1, 0 or 1; NaN stays NaN.
  friend Vec sign(Vec a) {
    const __mmask16 nonzero = _mm512_cmp_ps_mask(a.value, _mm512_setzero_ps(), _CMP_NEQ_OQ);
    const __m512 bit = _mm512_and_ps(a.value, _mm512_set1_ps(-0.0f));
    return {_mm512_mask_or_ps(a.value, nonzero, bit, _mm512_set1_ps(1))};
  }
  // a, or the bound if a is less. NaN stays NaN: MAXPS then returns its second operand.
  friend Vec at_least(Vec bound, Vec a) {
    return {_mm512_max_ps(bound.value, a.value)};
  }
  // a, or the bound if a is greater; NaN stays NaN.
  friend Vec at_most(Vec bound, Vec a) {
    return {_mm512_min_ps(bound.value, a.value)};
  }
  // Clamps to what the next two functions accept. Some instruction
  // sets need -127 to 128; AVX-512 takes anything.
  friend Vec within_exponents(Vec a) {
    return a;
  }
  // a minus the nearest whole number.
  friend Vec rest_of_whole(Vec a) {
    return {_mm512_reduce_ps(a.value, 0)};
  }
  // The nearest whole number, in the form that `times_power_of_two` takes.
  friend Vec whole_power(Vec a) {
    return a - rest_of_whole(a);
  }
  friend Vec times_power_of_two(Vec a, Vec power) {
    return {_mm512_scalef_ps(a.value, power.value)};
  }
};

OPKILN_NAMESPACE_END
