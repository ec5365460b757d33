"""What the scripts of the catalogue check on a GPU, one by one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU that torch can use", allow_module_level=True)

from checks import Skipped


def _script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(
        f"{name}_on_gpu", Path(__file__).with_name(f"{name}.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


NAMES = (
    "quantizer", "deepspeed_quantizer", "packbits", "random_ltd", "spatial_inference",
    "norms", "rotary_softmax_linear", "kv_attention", "transformer", "ragged",
    "mixed_gemm", "sparse_attn", "evoformer_attn", "gds",
)  # fmt: skip
CHECKS = [check for script in map(_script, NAMES) for check in script.CHECKS]


@pytest.mark.parametrize("check", CHECKS, ids=lambda each: f"{each.__module__}.{each.__name__}")
def test_on_a_gpu(check: Any) -> None:
    try:
        check()
    except Skipped as reason:
        pytest.skip(str(reason))
