"""One op, several kernels: the compiler knows the number of taps, and the block is measured."""

import torch
from torch import Tensor

import opkiln

SOURCE = """
#include <opkiln/op.h>
using opk::Tensor;

Tensor smooth(const Tensor& x, const Tensor& taps) {
  opk::check_contiguous(x, taps);
  const int64_t count = x.numel() - TAPS + 1;
  Tensor out = opk::empty({count}, x);
  const float *a = x.data<const float>(), *w = taps.data<const float>();
  float* o = out.data<float>();
  opk::parallel_for(0, count, BLOCK, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float sum = 0;
      for (int k = 0; k < TAPS; ++k) sum += w[k] * a[i + k];
      o[i] = sum;
    }
  });
  return out;
}
OPKILN_OP(smooth, cpu);
"""


@opkiln.op(source=SOURCE, variants={"TAPS": (3, 5)}, tune={"BLOCK": (1024, 65536)})
def smooth(x: Tensor, taps: Tensor) -> Tensor:
    return x.unfold(0, taps.numel(), 1) @ taps


@smooth.variant
def _(x: Tensor, taps: Tensor) -> dict[str, int]:
    return {"TAPS": taps.numel()}


x, taps = torch.randn(100_000), torch.tensor([0.25, 0.5, 0.25])
torch.testing.assert_close(smooth(x, taps), smooth.reference(x, taps))
print(*smooth.explain(TAPS=3).notes, sep="\n")
