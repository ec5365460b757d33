// Shared by the CPU and CUDA versions of the activations: argument checks, and the op's functions.
#pragma once

#include "arguments.h"

namespace {

// The functions. The first two cover two activations each, which differ in their numbers.
enum class Curve : uint8_t {
  kClamp,    // max(x, low): relu, or the identity
  kSigmoid,  // x times the sigmoid of x * (slope + cubic * x * x): silu, gelu by tanh
  kErf,      // gelu by erf
};

struct Activation {
  Curve curve;
  float low;
  float slope, cubic;  // include the factor log2(e)
};

constexpr float kLog2E = 1.44269504f;

// The bound on the square avoids NaN from `0 * infinity` in silu(infinity).
constexpr float kMostSquare = 1e30f;

// The positions of the two halves of a gated activation.
enum class Halves : uint8_t { kNone, kSplit, kInterleaved };

struct Pointwise {
  const void* x;
  const void* bias;  // null, or one element for each column of x
  void* out;
  int64_t rows;
  int64_t columns;  // columns of the result
  Activation activation;
  Halves halves;
  bool gate_first;  // the activation applies to the first half, or to the even elements
  opkiln::ElementType type;
};

#if !defined(__CUDACC_RTC__)
constexpr float kTanhSlope = 1.59576912f;  // 2 * sqrt(2 / pi)

constexpr Activation kNothing{Curve::kClamp, -__builtin_inff(), 0, 0};
constexpr Activation kRelu{Curve::kClamp, 0, 0, 0};
constexpr Activation kSilu{Curve::kSigmoid, 0, kLog2E, 0};
constexpr Activation kTanhGelu{Curve::kSigmoid, 0, kTanhSlope * kLog2E, 0.044715f * kTanhSlope * kLog2E};
constexpr Activation kErfGelu{Curve::kErf, 0, 0, 0};

OPK_PLAIN_BEGIN

// Defined by each device's source. Called only if there is at least one element.
void activate(const Pointwise& work);

[[gnu::noinline]] Tensor run_activation(const Tensor& given, const MaybeTensor& bias,
                                   const Activation& activation, Halves halves, bool gate_first) {
  opk::device_of(given);
  OPK_CHECK(given.dim() > 0, "x has no dimensions, expected at least 1");
  const opkiln::ElementType type = opk::element_of(given);
  const Contiguous x(given);
  const OptionalInput shift(given, bias, OptionalInput::kRow);
  const int64_t width = given.size(-1), columns = halves == Halves::kNone ? width : width / 2;
  Tensor out;
  if (halves == Halves::kNone) {
    out = opk::empty_like(*x);
  } else {
    OPK_CHECK(width % 2 == 0, "x has ", width, " columns, expected an even number");
    opk::List<int64_t> sizes(given.dim());
    for (int64_t i = 0; i < sizes.size(); ++i) sizes[i] = given.size(i);
    sizes[sizes.size() - 1] = columns;
    out = opk::empty(sizes, given);
  }
  const int64_t numel = out.numel();
  if (numel > 0) {
    activate({x.data(), shift.data(), out.data(), numel / columns, columns, activation, halves, gate_first,
              type});
  }
  return out;
}

Tensor bias_add(const Tensor& x, const MaybeTensor& bias) {
  return run_activation(x, bias, kNothing, Halves::kNone, false);
}

Tensor bias_relu(const Tensor& x, const MaybeTensor& bias) {
  return run_activation(x, bias, kRelu, Halves::kNone, false);
}

Tensor bias_silu(const Tensor& x, const MaybeTensor& bias) {
  return run_activation(x, bias, kSilu, Halves::kNone, false);
}

Tensor bias_gelu(const Tensor& x, const MaybeTensor& bias, bool tanh) {
  return run_activation(x, bias, tanh ? kTanhGelu : kErfGelu, Halves::kNone, false);
}

Tensor gated_silu(const Tensor& x, const MaybeTensor& bias, bool interleaved, bool gate_first) {
  return run_activation(x, bias, kSilu, interleaved ? Halves::kInterleaved : Halves::kSplit, gate_first);
}

Tensor gated_gelu(const Tensor& x, const MaybeTensor& bias, bool tanh, bool interleaved, bool gate_first) {
  return run_activation(x, bias, tanh ? kTanhGelu : kErfGelu,
                   interleaved ? Halves::kInterleaved : Halves::kSplit, gate_first);
}

OPK_PLAIN_END
#endif

}  // namespace
