// Softmax on host memory. A row is widened into a buffer of floats, which stays in the
// cache. The loops are plain, so that the compiler vectorizes them.

#include <opkiln/floats.h>

#include "softmax.h"

namespace {

using softmax::Row;
using softmax::Work;

constexpr float kMinusInfinity = -__builtin_inff();

// e^x for x <= 0, to two units in the last place. The result is 0 below 2^-126. NaN stays NaN.
inline float power(float x) {
  const float wanted = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // rounded to a whole number
  const float n = wanted > -127.0f ? wanted : -127.0f;
  const float r = (x - n * 0.693145752f) - n * 1.42860677e-6f;  // the two constants have log(2) to 40 bits
  const float p = 1 + r * (1 + r * (0.5f + r * (1.6666667e-1f + r * (4.1666667e-2f + r * (8.3333333e-3f +
                      r * (1.3888889e-3f + r * 1.9841270e-4f))))));
  const float scaled = p * opk::bits::to_float(static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23);
  return x < -87.33654f ? 0.0f : scaled;
}

template <class M>
void add_mask(const M* mask, int64_t stride, float* values, int64_t count) {
  if (stride == 0) {
    const float value = opkiln::as_float(*mask);
    for (int64_t i = 0; i < count; ++i) values[i] += value;
    return;
  }
  float part[256];
  for (int64_t i = 0; i < count; i += 256) {
    const int64_t some = count - i < 256 ? count - i : 256;
    if (stride == 1) {
      opkiln::load_floats(mask + i, part, some);
    } else {
      for (int64_t k = 0; k < some; ++k) part[k] = opkiln::as_float(mask[(i + k) * stride]);
    }
    for (int64_t k = 0; k < some; ++k) values[i + k] += part[k];
  }
}

template <class S>
float greatest(const S* values, int64_t count) {
  using opkiln::Vec;
  Vec most[2] = {Vec::all(kMinusInfinity), Vec::all(kMinusInfinity)};
  int64_t i = 0;
  for (; i + 2 * Vec::kLanes <= count; i += 2 * Vec::kLanes) {
    most[0] = at_least(most[0], Vec::load(values + i));
    most[1] = at_least(most[1], Vec::load(values + i + Vec::kLanes));
  }
  float lanes[Vec::kLanes], out = kMinusInfinity;
  at_least(most[0], most[1]).store(lanes);
  for (float each : lanes) out = each > out ? each : out;
  for (; i < count; ++i) {
    const float each = opkiln::as_float(values[i]);
    out = each > out ? each : out;
  }
  return out;
}

// Computes the powers and returns their sum. It keeps 32 partial sums, so that additions do not wait for
// each other and the compiler can vectorize. `to` may equal `from`.
template <class S>
float take_powers(const S* from, float* to, int64_t count, float most) {
  constexpr int kMany = 32;
  float sums[kMany] = {}, part[kMany];
  int64_t i = 0;
  for (; i + kMany <= count; i += kMany) {
    opkiln::load_floats(from + i, part, kMany);
    for (int k = 0; k < kMany; ++k) {
      part[k] = power(part[k] - most);
      sums[k] += part[k];
    }
    __builtin_memcpy(to + i, part, sizeof part);
  }
  for (; i < count; ++i) sums[0] += to[i] = power(opkiln::as_float(from[i]) - most);
  for (int k = 1; k < kMany; ++k) sums[0] += sums[k];
  return sums[0];
}

template <class S>
float take_softmax(const S* from, float* to, int64_t count) {
  const float most = greatest(from, count);
  return take_powers(from, to, count, most == kMinusInfinity ? 0.0f : most);
}

template <class T>
void add_bias(const Work& work, const Row& row, float* scores, int64_t count) {
  if (work.scale != 1) {
    for (int64_t i = 0; i < count; ++i) scores[i] *= work.scale;
  }
  if (work.mask) {
    const int64_t at = row.mask + row.first * work.mask_strides[3];
    if (work.wide_mask) {
      add_mask(static_cast<const float*>(work.mask) + at, work.mask_strides[3], scores, count);
    } else {
      add_mask(static_cast<const T*>(work.mask) + at, work.mask_strides[3], scores, count);
    }
  }
  if (work.slopes) {
    const float begin = static_cast<float>(row.first - row.position);
    for (int i = 0; i < count; ++i) scores[i] += row.slope * (begin + static_cast<float>(i));
  }
}

template <class T>
void softmax_row(const Work& work, const Row& row, float* values) {
  const T* const x = static_cast<const T*>(work.x) + row.x + row.first;
  T* const out = static_cast<T*>(work.out) + row.out;
  const int64_t seen = row.last > row.first ? row.last - row.first : 0;
  float* const powers = values + row.first;
  for (int64_t i = 0; i < row.first; ++i) values[i] = 0;
  for (int64_t i = row.first + seen; i < work.columns; ++i) values[i] = 0;
  float sum;
  if (work.scale == 1 && !work.mask && !work.slopes) {
    sum = take_softmax(x, powers, seen);
  } else {
    opkiln::load_floats(x, powers, seen);
    add_bias<T>(work, row, powers, seen);
    sum = take_softmax(powers, powers, seen);
  }
  opkiln::store_floats(values, out, work.columns, sum == 0 ? 0.0f : 1.0f / sum);
}

template <class T>
void softmax_rows(const Work& work) {
  const int64_t bytes = work.columns * int64_t{sizeof(float)} * 4;
  opk::parallel_for(0, work.rows, 1 + opk::kGrainBytes / 4 / bytes, [&](int64_t first, int64_t last) {
    struct Buffer {
      float* values;
      ~Buffer() { delete[] values; }
    } const buffer{new float[static_cast<size_t>(work.columns)]};
    for (int64_t i = first; i < last; ++i) {
      softmax_row<T>(work, softmax::row_of(work, static_cast<int>(i)), buffer.values);
    }
  });
}

}  // namespace

void softmax::run(const Work& work) {
  OPK_ELEMENT(work.type, T, (float, opkiln::BFloat16, opkiln::Float16), softmax_rows<T>(work));
}

OPKILN_OP(softmax::softmax, cpu);
OPKILN_OP(softmax::softmax_, cpu);
