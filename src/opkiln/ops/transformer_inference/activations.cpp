// Activations with a bias on host memory, plain and gated.

#include <opkiln/op.h>
#include <opkiln/vec_exp.h>

#include "activations.h"
#include "rows.h"

namespace {

template <Curve kCurve>
inline Vec curve(Vec x, const Activation& a) {
  if constexpr (kCurve == Curve::kClamp) {
    return at_least(Vec::all(a.low), x);
  } else if constexpr (kCurve == Curve::kSigmoid) {
    const Vec square = at_most(Vec::all(kMostSquare), x * x);
    const Vec slope = multiply_add(square, Vec::all(-a.cubic), Vec::all(-a.slope));
    return x / (Vec::all(1) + exp2(x * slope));
  } else {
    // x - x/2 * erfc(x / sqrt(2)), or x/2 * erfc(-x / sqrt(2)): exact where the result is close to 0. The
    // bound makes infinity of gelu(infinity), as the reference has it, and not NaN.
    const Vec bounded = at_most(Vec::all(1e18f), x);
    const Vec positive = bounded * sign(bounded);
    const Vec tail = erfc_of_positive(positive * Vec::all(0.707106781f));
    return subtract_product(at_least(Vec::all(0), x), positive * Vec::all(0.5f), tail);
  }
}

template <class T, Curve kCurve>
void activate_plain(const Pointwise& p, int64_t first, int64_t last, bool around) {
  over_rows(first, last, p.columns, [&](int64_t row, int64_t column, int64_t count) {
    const T* const x = static_cast<const T*>(p.x) + row * p.columns + column;
    const T* const bias = p.bias ? static_cast<const T*>(p.bias) + column : nullptr;
    fill(static_cast<T*>(p.out) + row * p.columns + column, count, around, [&](int64_t at, int64_t some) {
      opkiln::prefetch_ahead(x + at);
      const Vec value = load_some(x + at, some);
      return curve<kCurve>(bias ? value + load_some(bias + at, some) : value, p.activation);
    });
  });
}

// The gate and the value of a part of the result, from the two halves of a row.
template <class T, Curve kCurve>
void activate_halves(const Pointwise& p, const T* first, const T* second, const T* bias, const T* more,
                     T* out, int64_t count, bool around) {
  const T *const gate = p.gate_first ? first : second, *const value = p.gate_first ? second : first;
  const T *const gate_bias = p.gate_first ? bias : more, *const value_bias = p.gate_first ? more : bias;
  fill(out, count, around, [&](int64_t at, int64_t some) {
    opkiln::prefetch_ahead(gate + at);
    opkiln::prefetch_ahead(value + at);
    Vec g = load_some(gate + at, some), v = load_some(value + at, some);
    if (bias) {
      g = g + load_some(gate_bias + at, some);
      v = v + load_some(value_bias + at, some);
    }
    return curve<kCurve>(g, p.activation) * v;
  });
}

template <class T>
void divide(const T* pairs, T* first, T* second, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    first[i] = pairs[2 * i];
    second[i] = pairs[2 * i + 1];
  }
}

template <class T, Curve kCurve>
void activate_gated(const Pointwise& p, int64_t first, int64_t last, bool around) {
  constexpr int64_t kBlock = opkiln::kBlock;
  over_rows(first, last, p.columns, [&](int64_t row, int64_t column, int64_t count) {
    const T* const x = static_cast<const T*>(p.x) + row * 2 * p.columns;
    const T* const bias = static_cast<const T*>(p.bias);
    T* const out = static_cast<T*>(p.out) + row * p.columns + column;
    if (p.halves == Halves::kSplit) {
      const int64_t other = p.columns + column;
      return activate_halves<T, kCurve>(p, x + column, x + other, bias ? bias + column : nullptr,
                                        bias ? bias + other : nullptr, out, count, around);
    }
    for (int64_t at = 0; at < count; at += kBlock) {
      const int64_t some = count - at < kBlock ? count - at : kBlock;
      T halves[4][kBlock];
      divide(x + 2 * (column + at), halves[0], halves[1], some);
      if (bias) divide(bias + 2 * (column + at), halves[2], halves[3], some);
      activate_halves<T, kCurve>(p, halves[0], halves[1], bias ? halves[2] : nullptr,
                                 bias ? halves[3] : nullptr, out + at, some, around);
    }
  });
}

template <class T, Curve kCurve>
void activate_part(const Pointwise& p, int64_t first, int64_t last) {
  const bool around =
      p.rows * p.columns * static_cast<int64_t>(sizeof(T)) >= opkiln::kAroundBytes;
  if constexpr (kCurve != Curve::kClamp) {
    if (p.halves != Halves::kNone) return activate_gated<T, kCurve>(p, first, last, around);
  }
  activate_plain<T, kCurve>(p, first, last, around);
}

template <class T>
void activate_part(const Pointwise& p, int64_t first, int64_t last) {
  switch (p.activation.curve) {
    case Curve::kClamp: return activate_part<T, Curve::kClamp>(p, first, last);
    case Curve::kSigmoid: return activate_part<T, Curve::kSigmoid>(p, first, last);
    case Curve::kErf: return activate_part<T, Curve::kErf>(p, first, last);
  }
}

void activate(const Pointwise& p) {
  over_elements(p.rows * p.columns, 2 * opkiln::size_of(p.type), [&](int64_t first, int64_t last) {
    OPK_ELEMENT(p.type, T, (float, opkiln::BFloat16, opkiln::Float16), activate_part<T>(p, first, last));
  });
}

}  // namespace

OPKILN_OP(bias_add, cpu);
OPKILN_OP(bias_relu, cpu);
OPKILN_OP(bias_silu, cpu);
OPKILN_OP(bias_gelu, cpu);
OPKILN_OP(gated_silu, cpu);
OPKILN_OP(gated_gelu, cpu);
