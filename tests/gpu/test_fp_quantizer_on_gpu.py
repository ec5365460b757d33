"""fp_quantizer, pin_memory and utils on a GPU: what the scripts beside this check, one by one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU that torch can use", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent))


def _script(name: str) -> Any:
    # Not by import: there are test modules and packages of these names.
    spec = importlib.util.spec_from_file_location(
        f"{name}_on_gpu", Path(__file__).with_name(f"{name}.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHECKS = [check for name in ("fp_quantizer", "pin_memory") for check in _script(name).CHECKS]


@pytest.mark.parametrize("check", CHECKS, ids=lambda each: each.__name__)
def test_on_a_gpu(check: Any) -> None:
    from checks import Skipped

    try:
        check()
    except Skipped as reason:
        pytest.skip(str(reason))
