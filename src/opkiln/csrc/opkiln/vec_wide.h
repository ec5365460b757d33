// Several registers of floats as one value, for loops over independent elements.
//
// Each operation on one register waits for the one before it, and a CPU looks only some hundred instructions
// ahead. With independent registers side by side one of them can always proceed: gelu by erf took 0.8 of the
// time with eight that it took with four.
#pragma once

#include "vec.h"

OPKILN_NAMESPACE_BEGIN

// The type of the elements decides their order among the lanes: bfloat16 is
// split into even and odd elements, which needs no permutation. So all operands
// in a loop must have the same type, or the same value in all lanes.
template <int kCount>
struct Registers {
  static constexpr int kLanes = kCount * Vec::kLanes;
  static_assert(kCount % 2 == 0);
  Vec parts[kCount];

  using Wide = Registers;

  template <class Function, class... Wides>
  static Wide each(const Function& function, const Wides&... of) {
    Wide out;
    for (int i = 0; i < kCount; ++i) out.parts[i] = function(of.parts[i]...);
    return out;
  }

  static Wide all(float x) {
    const Vec value = Vec::all(x);
    return each([&] { return value; });
  }
  template <class T>
  static Wide load(const T* from) {
    Wide out;
    for (int i = 0; i < kCount; ++i) out.parts[i] = Vec::load(from + i * Vec::kLanes);
    return out;
  }
  static Wide load(const BFloat16* from) {
    Wide out;
    for (int i = 0; i < kCount; i += 2) Vec::load_pair(from + i * Vec::kLanes, out.parts[i], out.parts[i + 1]);
    return out;
  }

  template <class T>
  void store(T* to) const {
    for (int i = 0; i < kCount; ++i) parts[i].store(to + i * Vec::kLanes);
  }
  void store(BFloat16* to) const {
    for (int i = 0; i < kCount; i += 2) Vec::store_pair(parts[i], parts[i + 1], to + i * Vec::kLanes);
  }

  // Non-temporal stores. The memory must be aligned to kAroundAlignment bytes.
  template <class T>
  void store_around(T* to) const {
    for (int i = 0; i < kCount; ++i) parts[i].store_around(to + i * Vec::kLanes);
  }
  void store_around(BFloat16* to) const {
    for (int i = 0; i < kCount; i += 2) Vec::store_pair_around(parts[i], parts[i + 1], to + i * Vec::kLanes);
  }
  static constexpr int kAroundAlignment = 64;

  Vec sum() const {
    Vec total = parts[0];
    for (int i = 1; i < kCount; ++i) total = total + parts[i];
    return total;
  }

  friend Wide operator+(const Wide& x, const Wide& y) {
    return each([](Vec p, Vec q) { return p + q; }, x, y);
  }
  friend Wide operator-(const Wide& x, const Wide& y) {
    return each([](Vec p, Vec q) { return p - q; }, x, y);
  }
  friend Wide operator*(const Wide& x, const Wide& y) {
    return each([](Vec p, Vec q) { return p * q; }, x, y);
  }
  friend Wide operator/(const Wide& x, const Wide& y) {
    return each([](Vec p, Vec q) { return p / q; }, x, y);
  }
  friend Wide rough_reciprocal(const Wide& x) {
    return each([](Vec p) { return rough_reciprocal(p); }, x);
  }
  friend Wide reciprocal(const Wide& x) {
    return each([](Vec p) { return reciprocal(p); }, x);
  }
  friend Wide multiply_add(const Wide& x, const Wide& y, const Wide& z) {
    return each([](Vec p, Vec q, Vec r) { return multiply_add(p, q, r); }, x, y, z);
  }
  friend Wide subtract_product(const Wide& x, const Wide& y, const Wide& z) {
    return each([](Vec p, Vec q, Vec r) { return subtract_product(p, q, r); }, x, y, z);
  }
  friend Wide magnitude(const Wide& x) {
    return each([](Vec p) { return magnitude(p); }, x);
  }
  friend Wide at_least(const Wide& bound, const Wide& x) {
    return each([](Vec p, Vec q) { return at_least(p, q); }, bound, x);
  }
  friend Wide at_most(const Wide& bound, const Wide& x) {
    return each([](Vec p, Vec q) { return at_most(p, q); }, bound, x);
  }
  friend Wide within_exponents(const Wide& x) {
    return each([](Vec p) { return within_exponents(p); }, x);
  }
  friend Wide rest_of_whole(const Wide& x) {
    return each([](Vec p) { return rest_of_whole(p); }, x);
  }
  friend Wide whole_power(const Wide& x) {
    return each([](Vec p) { return whole_power(p); }, x);
  }
  friend Wide times_power_of_two(const Wide& x, const Wide& power) {
    return each([](Vec p, Vec q) { return times_power_of_two(p, q); }, x, power);
  }
};

using Wide = Registers<8>;

OPKILN_NAMESPACE_END
