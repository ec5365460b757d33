"""fused_adam on a GPU: what ``tests/gpu/fused_adam.py`` checks, one by one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU that torch can use", allow_module_level=True)


def _script() -> Any:
    spec = importlib.util.spec_from_file_location(
        "fused_adam_on_gpu", Path(__file__).with_name("fused_adam.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


SCRIPT = _script()


@pytest.mark.parametrize("check", SCRIPT.CHECKS, ids=lambda check: check.__name__)
def test_on_a_gpu(check: Any) -> None:
    try:
        check()
    except SCRIPT.Skipped as reason:
        pytest.skip(str(reason))
