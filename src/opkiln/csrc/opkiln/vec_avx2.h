// Vec for AVX2 with FMA and F16C: 8 floats. Included by vec.h only.
#pragma once

#include <immintrin.h>

OPKILN_NAMESPACE_BEGIN

struct Vec {
  static constexpr int kLanes = 8;
  __m256 value;

  static Vec all(float x) {
    return {_mm256_set1_ps(x)};
  }
  static Vec load(const float* from) {
    return {_mm256_loadu_ps(from)};
  }
  static Vec load(const BFloat16* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
  }
  static Vec load(const Float16* from) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))};
  }

  void store(float* to) const {
    _mm256_storeu_ps(to, value);
  }
  void store(BFloat16* to) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bfloat16());
  }
  void store(Float16* to) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), float16());
  }

  void store_around(float* to) const {
    _mm256_stream_ps(to, value);
  }
  void store_around(BFloat16* to) const {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), bfloat16());
  }
  void store_around(Float16* to) const {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), float16());
  }

  static void load_pair(const BFloat16* from, Vec& even, Vec& odd) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    even = {_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16))};
    odd = {_mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xffff0000))))};
  }
  static void store_pair(Vec even, Vec odd, BFloat16* to) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), join(even, odd));
  }
  static void store_pair_around(Vec even, Vec odd, BFloat16* to) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), join(even, odd));
  }
  static __m256i join(Vec even, Vec odd) {
    const __m256i e = _mm256_castps_si256(even.value), o = _mm256_castps_si256(odd.value);
    const __m256i high = _mm256_blend_epi16(_mm256_srli_epi32(e, 16), o, 0xaa);
    const __m256i low = _mm256_blend_epi16(e, _mm256_slli_epi32(o, 16), 0xaa);
    const __m256i is_odd = _mm256_and_si256(high, _mm256_set1_epi16(1));
    const __m256i bias = _mm256_or_si256(is_odd, _mm256_set1_epi16(0x7ffe));
    return _mm256_add_epi16(high, _mm256_srli_epi16(_mm256_avg_epu16(low, bias), 15));
  }

  // Rounds to bfloat16, in the upper half of each lane.
  __m256i round_bfloat16() const {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(_mm256_add_epi32(bits, bias), _mm256_set1_epi32(0x7fc00000), nan);
  }
  __m128i bfloat16() const {
    const __m256i high = _mm256_srli_epi32(round_bfloat16(), 16);
    // The pack works within 128-bit halves; the permutation joins the two results.
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    return _mm256_castsi256_si128(packed);
  }
  __m128i float16() const {
    return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }

  friend Vec operator+(Vec a, Vec b) {
    return {_mm256_add_ps(a.value, b.value)};
  }
  friend Vec operator-(Vec a, Vec b) {
    return {_mm256_sub_ps(a.value, b.value)};
  }
  friend Vec operator*(Vec a, Vec b) {
    return {_mm256_mul_ps(a.value, b.value)};
  }
  friend Vec operator/(Vec a, Vec b) {
    return {_mm256_div_ps(a.value, b.value)};
  }
  friend Vec rough_reciprocal(Vec a) {
    return {_mm256_rcp_ps(a.value)};
  }
  friend Vec reciprocal(Vec a) {
    const __m256 guess = _mm256_rcp_ps(a.value), one = _mm256_set1_ps(1);
    const __m256 rest = _mm256_max_ps(_mm256_fnmadd_ps(a.value, guess, one), _mm256_set1_ps(-1));
    return {_mm256_fmadd_ps(guess, rest, guess)};
  }
  friend Vec sqrt(Vec a) {
    return {_mm256_sqrt_ps(a.value)};
  }
  friend Vec multiply_add(Vec a, Vec b, Vec c) {
    return {_mm256_fmadd_ps(a.value, b.value, c.value)};
  }
  friend Vec subtract_product(Vec c, Vec a, Vec b) {
    return {_mm256_fnmadd_ps(a.value, b.value, c.value)};
  }
  friend Vec magnitude(Vec a) {
    return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.value)};
  }
  friend Vec sign(Vec a) {
    const __m256 nonzero = _mm256_cmp_ps(a.value, _mm256_setzero_ps(), _CMP_NEQ_OQ);
    const __m256 bit = _mm256_and_ps(a.value, _mm256_set1_ps(-0.0f));
    return {_mm256_blendv_ps(a.value, _mm256_or_ps(bit, _mm256_set1_ps(1)), nonzero)};
  }
  friend Vec at_least(Vec bound, Vec a) {
    return {_mm256_max_ps(bound.value, a.value)};
  }
  friend Vec at_most(Vec bound, Vec a) {
    return {_mm256_min_ps(bound.value, a.value)};
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
    return a * Vec{_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(power.value), 23))};
  }
};

OPKILN_NAMESPACE_END
