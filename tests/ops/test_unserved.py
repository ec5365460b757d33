"""What the kernels of the transformer's ops do not serve goes to their references."""

from __future__ import annotations

from typing import Any

import pytest
import ragged_fixtures
import torch
from inference_ops import version

from opkiln.errors import FallbackWarning

WIDE = torch.float64


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=WIDE)


WEIGHT, SCALES = torch.ones(4, 8, dtype=torch.int8), torch.ones(1)
CALLS: dict[str, tuple[Any, ...]] = {
    "rms_norm": (x(3, 8),),
    "layer_norm": (x(3, 8), x(8), x(8)),
    "pre_rms_norm": (x(3, 8), x(3, 8)),
    "bias_gelu": (x(3, 8), x(8)),
    "gated_silu": (x(3, 8),),
    "residual_add": (x(3, 8), x(3, 8)),
    "moe_res_matmul": (x(3, 8), x(2, 8), x(3, 8)),
    "rotary": (x(2, 3, 2, 8),),
    "softmax": (x(2, 8),),
    "dequantize_int8": (WEIGHT, SCALES, WIDE),
    "int8_linear": (x(3, 8), WEIGHT, SCALES),
}


@pytest.mark.parametrize("name", CALLS)
def test_fp64_is_computed_by_the_reference_and_explain_says_why(name: str) -> None:
    native, given = version("native"), CALLS[name]
    op = getattr(native, name)
    with pytest.warns(FallbackWarning, match=f"op {name} runs as .* not float64"):
        out = op(*given)
    torch.testing.assert_close(out, op.reference(*given), rtol=0, atol=0)
    assert any("not float64" in note for note in op.explain().notes)


def test_ragged_kernels_leave_fp64_to_the_reference() -> None:
    kernels = ragged_fixtures.kernels()
    slots = torch.tensor([[1, 0], [2, 3]], dtype=torch.int32)
    given = x(2, 8)
    with pytest.warns(FallbackWarning, match="x has dtype float64"):
        out = kernels.moe_scatter(given, slots)
    assert torch.equal(out, ragged_fixtures.REFERENCES.moe_scatter(given, slots))
    with pytest.warns(FallbackWarning, match="logits has dtype float64"):
        chosen = kernels.top_k_gating(x(3, 4), 2)
    assert chosen[1].shape == (3, 2)
