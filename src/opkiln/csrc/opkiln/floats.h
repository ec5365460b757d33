// Converts runs of elements to floats and back, for CPU loops that compute in fp32.
#pragma once

#include "vec.h"

OPKILN_NAMESPACE_BEGIN

inline float as_float(float value) { return value; }
inline float as_float(BFloat16 value) { return widen(value); }
inline float as_float(Float16 value) { return widen(value); }
inline void set_from(float value, float* to) { *to = value; }
inline void set_from(float value, BFloat16* to) { *to = narrow_bfloat16(value); }
inline void set_from(float value, Float16* to) { *to = narrow_float16(value); }

template <class T>
void load_floats(const T* from, float* to, int64_t count) {
  int64_t i = 0;
  for (; i + Vec::kLanes <= count; i += Vec::kLanes) Vec::load(from + i).store(to + i);
  for (; i < count; ++i) to[i] = as_float(from[i]);
}

template <class T>
void store_floats(const float* from, T* to, int64_t count, float factor = 1) {
  const Vec factors = Vec::all(factor);
  int64_t i = 0;
  for (; i + Vec::kLanes <= count; i += Vec::kLanes) (Vec::load(from + i) * factors).store(to + i);
  for (; i < count; ++i) set_from(from[i] * factor, to + i);
}

inline float sum_of_lanes(Vec value) {
  float lanes[Vec::kLanes], sum = 0;
  value.store(lanes);
  for (float each : lanes) sum += each;
  return sum;
}

OPKILN_NAMESPACE_END
