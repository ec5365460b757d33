// Vec in plain C++: 4 floats. Compilers put them into the target's
// registers (SSE2 on x86-64). Included by vec.h only.
#pragma once

OPKILN_NAMESPACE_BEGIN

struct Vec {
  static constexpr int kLanes = 4;
  float value[kLanes];

  template <class Lane>
  static Vec each(const Lane& lane) {
    Vec out;
    for (int i = 0; i < kLanes; ++i) {
      out.value[i] = lane(i);
    }
    return out;
  }

  static Vec all(float x) {
    return each([&](int) { return x; });
  }
  static Vec load(const float* from) {
    Vec out;
    std::memcpy(out.value, from, sizeof(out.value));
    return out;
  }
  static Vec load(const BFloat16* from) {
    return each([&](int i) { return widen(from[i]); });
  }
  static Vec load(const Float16* from) {
    return each([&](int i) { return widen(from[i]); });
  }

  void store(float* to) const {
    std::memcpy(to, value, sizeof(value));
  }
  void store(BFloat16* to) const {
    for (int i = 0; i < kLanes; ++i) {
      to[i] = narrow_bfloat16(value[i]);
    }
  }
  void store(Float16* to) const {
    for (int i = 0; i < kLanes; ++i) {
      to[i] = narrow_float16(value[i]);
    }
  }

  template <class T>
  void store_around(T* to) const {
    store(to);
  }

  static void load_pair(const BFloat16* from, Vec& even, Vec& odd) {
    even = each([&](int i) { return widen(from[2 * i]); });
    odd = each([&](int i) { return widen(from[2 * i + 1]); });
  }
  static void store_pair(const Vec& even, const Vec& odd, BFloat16* to) {
    for (int i = 0; i < kLanes; ++i) {
      to[2 * i] = narrow_bfloat16(even.value[i]);
      to[2 * i + 1] = narrow_bfloat16(odd.value[i]);
    }
  }
  static void store_pair_around(const Vec& even, const Vec& odd, BFloat16* to) {
    store_pair(even, odd, to);
  }

  friend Vec operator+(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.value[i] + b.value[i]; });
  }
  friend Vec operator-(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.value[i] - b.value[i]; });
  }
  friend Vec operator*(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.value[i] * b.value[i]; });
  }
  friend Vec operator/(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.value[i] / b.value[i]; });
  }
  friend Vec rough_reciprocal(const Vec& a) {
    return reciprocal(a);
  }
  friend Vec reciprocal(const Vec& a) {
    return each([&](int i) { return 1 / a.value[i]; });
  }
  friend Vec sqrt(const Vec& a) {
    return each([&](int i) { return __builtin_sqrtf(a.value[i]); });
  }
  // Rounds twice on CPUs without fused multiply-add: std::fma would be a slow library call.
  friend Vec multiply_add(const Vec& a, const Vec& b, const Vec& c) {
    return each([&](int i) { return a.value[i] * b.value[i] + c.value[i]; });
  }
  friend Vec subtract_product(const Vec& c, const Vec& a, const Vec& b) {
    return each([&](int i) { return c.value[i] - a.value[i] * b.value[i]; });
  }
  friend Vec magnitude(const Vec& a) {
    return each([&](int i) { return __builtin_fabsf(a.value[i]); });
  }
  friend Vec sign(const Vec& a) {
    return each([&](int i) {
      return a.value[i] < 0 ? -1.0f : a.value[i] > 0 ? 1.0f : a.value[i];
    });
  }
  friend Vec at_least(const Vec& bound, const Vec& a) {
    return each([&](int i) { return a.value[i] < bound.value[i] ? bound.value[i] : a.value[i]; });
  }
  friend Vec at_most(const Vec& bound, const Vec& a) {
    return each([&](int i) { return a.value[i] > bound.value[i] ? bound.value[i] : a.value[i]; });
  }
  friend Vec within_exponents(const Vec& a) {
    return at_least(all(-127), at_most(all(128), a));
  }
  friend Vec rest_of_whole(const Vec& a) {
    return a - (whole_power(a) - all(kExponents));
  }
  friend Vec whole_power(const Vec& a) {
    return a + all(kExponents);
  }
  friend Vec times_power_of_two(const Vec& a, const Vec& power) {
    return each([&](int i) {
      return a.value[i] * __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, power.value[i]) << 23);
    });
  }
};

OPKILN_NAMESPACE_END
