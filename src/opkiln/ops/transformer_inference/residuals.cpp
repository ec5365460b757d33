// Residual adds on host memory.

#include <opkiln/floats.h>
#include <opkiln/op.h>

#include "residuals.h"
#include "rows.h"

namespace {

template <class T>
void add_part(const Sum& s, int64_t first, int64_t last) {
  const bool around = s.rows * s.columns * static_cast<int64_t>(sizeof(T)) >= opkiln::kAroundBytes;
  const float scale = s.scale, attention_scale = s.attention ? s.attention_scale : 1;
  for_each_row(first, last, s.columns, [&](int64_t row, int64_t column, int64_t count) {
    const int64_t start = row * s.columns + column;
    const auto part = [](const void* tensor, int64_t at) {
      return tensor ? static_cast<const T*>(tensor) + at : nullptr;
    };
    const Inputs<T, 5> inputs{part(s.hidden, start), part(s.residual, start), part(s.bias, column),
                              part(s.attention_bias, column), part(s.attention, start)};
    fill(static_cast<T*>(s.out) + start, inputs, count, around, [=](const auto& x) {
      const auto sum = multiply_add(Beside<T, 5>::all(scale), x[1] + x[2] + x[3], x[0]);
      return multiply_add(Beside<T, 5>::all(attention_scale), x[4], sum);
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
      const float one = opkiln::as_float(coef[2 * row]), two = opkiln::as_float(coef[2 * row + 1]);
      return fill(out, Inputs<T, 2>{residual, mlp}, count, around, [=](const auto& x) {
        return multiply_add(x[0], Beside<T, 2>::all(one), x[1] * Beside<T, 2>::all(two));
      });
    }
    fill(out, Inputs<T, 4>{residual, coef + column, mlp, coef + m.columns + column}, count, around,
         [](const auto& x) { return multiply_add(x[0], x[1], x[2] * x[3]); });
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
