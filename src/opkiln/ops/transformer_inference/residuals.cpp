// Residual adds on host memory.

#include <opkiln/floats.h>
#include <opkiln/op.h>

#include "residuals.h"
#include "rows.h"

namespace {

template <class T>
void add_part(const Sum& s, int64_t first, int64_t last) {
  const bool around = s.rows * s.columns * static_cast<int64_t>(sizeof(T)) >= opkiln::kAroundBytes;
  const Wide scale = Wide::all(s.scale), attention_scale = Wide::all(s.attention_scale);
  for_each_row(first, last, s.columns, [&](int64_t row, int64_t column, int64_t count) {
    const int64_t start = row * s.columns + column;
    const auto part = [](const void* tensor, int64_t at) {
      return tensor ? static_cast<const T*>(tensor) + at : nullptr;
    };
    const T *const hidden = part(s.hidden, start), *const residual = part(s.residual, start),
            *const attention = part(s.attention, start), *const bias = part(s.bias, column),
            *const more = part(s.attention_bias, column);
    fill(static_cast<T*>(s.out) + start, count, around, [=](int64_t at, int64_t some) {
      prefetch_wide(hidden + at);
      prefetch_wide(residual + at);
      Wide kept = load_some(residual + at, some);
      if (bias) kept = kept + load_some(bias + at, some);
      if (more) kept = kept + load_some(more + at, some);
      const Wide sum = multiply_add(scale, kept, load_some(hidden + at, some));
      return attention ? multiply_add(attention_scale, load_some(attention + at, some), sum) : sum;
    });
  });
}

template <class T>
void mix_part(const Mix& m, int64_t first, int64_t last) {
  const bool around = m.rows * m.columns * static_cast<int64_t>(sizeof(T)) >= opkiln::kAroundBytes;
  const T* const coef = static_cast<const T*>(m.coef);
  for_each_row(first, last, m.columns, [&](int64_t row, int64_t column, int64_t count) {
    const int64_t start = row * m.columns + column;
    const T* const residual = static_cast<const T*>(m.residual) + start;
    const T* const mlp = static_cast<const T*>(m.mlp) + start;
    T* const out = static_cast<T*>(m.out) + start;
    if (m.by_row) {
      const Wide one = Wide::all(opkiln::as_float(coef[2 * row])),
                 two = Wide::all(opkiln::as_float(coef[2 * row + 1]));
      return fill(out, count, around, [=](int64_t at, int64_t some) {
        return multiply_add(load_some(residual + at, some), one, load_some(mlp + at, some) * two);
      });
    }
    fill(out, count, around, [=](int64_t at, int64_t some) {
      const Wide one = load_some(coef + column + at, some);
      const Wide two = load_some(coef + m.columns + column + at, some);
      return multiply_add(load_some(residual + at, some), one, load_some(mlp + at, some) * two);
    });
  });
}

void add(const Sum& sum) {
  parallel_elements(sum.rows * sum.columns, 3 * opkiln::size_of(sum.type), [&](int64_t first, int64_t last) {
    OPK_ELEMENT(sum.type, T, (float, opkiln::BFloat16, opkiln::Float16), add_part<T>(sum, first, last));
  });
}

void mix(const Mix& mix) {
  parallel_elements(mix.rows * mix.columns, 3 * opkiln::size_of(mix.type), [&](int64_t first, int64_t last) {
    OPK_ELEMENT(mix.type, T, (float, opkiln::BFloat16, opkiln::Float16), mix_part<T>(mix, first, last));
  });
}

}  // namespace

OPKILN_OP(residual_add, cpu);
OPKILN_OP(moe_res_matmul, cpu);
