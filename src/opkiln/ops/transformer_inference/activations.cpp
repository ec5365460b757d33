// Activations with a bias on host memory, plain and gated.

#include <opkiln/op.h>
#include <opkiln/vec_exp.h>

#include "activations.h"
#include "rows.h"

namespace {

// The curves as they are computed here: silu is kTanh without the square.
enum class Form : uint8_t { kClamp, kSilu, kTanh, kErf };

template <class T, Form kForm, class V>
inline V curve(const V& x, const Activation& a) {
  constexpr int kDigits = opkiln::kDigitsOf<T>;
  if constexpr (kForm == Form::kClamp) {
    return at_least(V::all(a.low), x);
  } else if constexpr (kForm == Form::kSilu || kForm == Form::kTanh) {
    V slope = V::all(-a.slope);
    if constexpr (kForm == Form::kTanh) slope = multiply_add(x * x, V::all(-a.cubic), slope);
    return x * opkiln::inverse<kDigits>(V::all(1) + opkiln::exp2<kDigits>(x * slope));
  } else {
    // max(x, 0) - |x| * tail(|x|): precise where the result is close to 0. The bound gives gelu(infinity) =
    // infinity, and (x + |x|) / 2 gives gelu(-infinity) = NaN, both as in the reference.
    const V size = magnitude(x), half = V::all(0.5f);
    const V distance = at_most(V::all(opkiln::kTailEnd<kDigits>), size);
    return subtract_product(multiply_add(size, half, x * half), distance, opkiln::normal_tail<kDigits>(distance));
  }
}

template <class T, Form kForm>
void activate_plain(const Pointwise& p, int64_t first, int64_t last, bool around) {
  for_each_row(first, last, p.columns, [&](int64_t row, int64_t column, int64_t count) {
    const int64_t start = row * p.columns + column;
    const T* const bias = p.bias ? static_cast<const T*>(p.bias) + column : nullptr;
    fill(static_cast<T*>(p.out) + start, Inputs<T, 2>{static_cast<const T*>(p.x) + start, bias}, count, around,
         [a = p.activation](const auto& x) { return curve<T, kForm>(x[0] + x[1], a); });
  });
}

// Computes a part of the result from the two halves of a row and of the bias, the gate and the value.
template <class T, Form kForm>
void activate_halves(const Pointwise& p, const T* first, const T* second, const T* bias, const T* more,
                     T* out, int64_t count, bool around) {
  const auto inputs = p.gate_first ? Inputs<T, 4>{first, bias, second, more} : Inputs<T, 4>{second, more, first, bias};
  fill(out, inputs, count, around, [a = p.activation](const auto& x) {
    return curve<T, kForm>(x[0] + x[1], a) * (x[2] + x[3]);
  });
}

template <class T>
void divide(const T* pairs, T* first, T* second, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    first[i] = pairs[2 * i];
    second[i] = pairs[2 * i + 1];
  }
}

template <class T, Form kForm>
void activate_gated(const Pointwise& p, int64_t first, int64_t last, bool around) {
  constexpr int64_t kBlock = opkiln::kBlock;
  for_each_row(first, last, p.columns, [&](int64_t row, int64_t column, int64_t count) {
    const T* const x = static_cast<const T*>(p.x) + row * 2 * p.columns;
    const T* const bias = static_cast<const T*>(p.bias);
    T* const out = static_cast<T*>(p.out) + row * p.columns + column;
    if (p.halves == Halves::kSplit) {
      const int64_t other = p.columns + column;
      return activate_halves<T, kForm>(p, x + column, x + other, bias ? bias + column : nullptr,
                                        bias ? bias + other : nullptr, out, count, around);
    }
    for (int64_t at = 0; at < count; at += kBlock) {
      const int64_t some = count - at < kBlock ? count - at : kBlock;
      T halves[4][kBlock];
      divide(x + 2 * (column + at), halves[0], halves[1], some);
      if (bias) divide(bias + 2 * (column + at), halves[2], halves[3], some);
      activate_halves<T, kForm>(p, halves[0], halves[1], bias ? halves[2] : nullptr,
                                 bias ? halves[3] : nullptr, out + at, some, around);
    }
  });
}

template <class T, Form kForm>
void activate_part(const Pointwise& p, int64_t first, int64_t last) {
  const bool around =
      p.rows * p.columns * static_cast<int64_t>(sizeof(T)) >= opkiln::kAroundBytes;
  if constexpr (kForm != Form::kClamp) {
    if (p.halves != Halves::kNone) return activate_gated<T, kForm>(p, first, last, around);
  }
  activate_plain<T, kForm>(p, first, last, around);
}

template <class T>
void activate_part(const Pointwise& p, int64_t first, int64_t last) {
  switch (p.activation.curve) {
    case Curve::kClamp: return activate_part<T, Form::kClamp>(p, first, last);
    case Curve::kSigmoid:
      return p.activation.cubic == 0 ? activate_part<T, Form::kSilu>(p, first, last)
                                     : activate_part<T, Form::kTanh>(p, first, last);
    case Curve::kErf: return activate_part<T, Form::kErf>(p, first, last);
  }
}

void activate(const Pointwise& p) {
  parallel_elements(p.rows * p.columns, 2 * opkiln::size_of(p.type), [&](int64_t first, int64_t last) {
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
