// The gelu of a training layer with the GPU's approximate tanh, whose error is at most 2^-11.

#include <opkiln/op.h>

#define OPKILN_APPROXIMATE_TANH
#include "../transformer/columns.h"

namespace {

Tensor stochastic_gelu_dropout(const Tensor& x, const Tensor& bias, const MaybeTensor& seed, int64_t site,
                               double p) {
  return gelu(x, bias, seed, site, p);
}

opk::tuple<Tensor, Tensor, Tensor> stochastic_gelu_dropout_backward(const Tensor& grad, const Tensor& x,
                                                                    const Tensor& bias, const MaybeTensor& seed,
                                                                    int64_t site, double p, bool recompute) {
  return gelu_backward(grad, x, bias, seed, site, p, recompute);
}

}  // namespace

OPKILN_OP(stochastic_gelu_dropout, cuda);
OPKILN_OP(stochastic_gelu_dropout_backward, cuda);
