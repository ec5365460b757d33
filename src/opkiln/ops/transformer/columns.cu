// Bias and gelu, their gradient, and joining three gradients. columns.h has the kernels.

#include <opkiln/op.h>

#include "columns.h"

namespace {

Tensor gelu_dropout(const Tensor& x, const Tensor& bias, const MaybeTensor& seed, int64_t site, double p) {
  return gelu(x, bias, seed, site, p);
}

opk::tuple<Tensor, Tensor, Tensor> gelu_dropout_backward(const Tensor& grad, const Tensor& x, const Tensor& bias,
                                                         const MaybeTensor& seed, int64_t site, double p,
                                                         bool recompute) {
  return gelu_backward(grad, x, bias, seed, site, p, recompute);
}

opk::tuple<Tensor, Tensor> join_columns(const Tensor& first, const Tensor& second, const Tensor& third) {
  const int64_t rows = rows_of(first), columns = first.size(-1);
  check_same(first, second);
  check_same(first, third);
  const Tensor one = opk::contiguous(first), two = opk::contiguous(second), three = opk::contiguous(third);
  opk::List<int64_t> sizes(first.dim());
  for (int64_t d = 0; d < first.dim(); ++d) sizes[d] = first.size(d) * (d == first.dim() - 1 ? 3 : 1);
  Tensor out = opk::empty(sizes, first), sums = opk::empty({3 * columns}, first);
  Columns c{};
  c.x = one.data();
  c.grad = two.data();
  c.third = three.data();
  c.out = out.data();
  c.rows = rows;
  c.columns = columns;
  launch_columns<kJoin>(c, first, sums.data());
  return {static_cast<Tensor&&>(out), static_cast<Tensor&&>(sums)};
}

}  // namespace

OPKILN_OP(gelu_dropout, cuda);
OPKILN_OP(gelu_dropout_backward, cuda);
OPKILN_OP(join_columns, cuda);
