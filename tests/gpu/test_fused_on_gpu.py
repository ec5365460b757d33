"""The fused optimizers on a GPU: what the scripts beside this check, one by one."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU that torch can use", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent))
SCRIPTS = [import_module(name) for name in ("fused_adam", "fused_lion", "fused_lamb")]
CHECKS = {
    f"{script.__name__}: {check.__name__}": check for script in SCRIPTS for check in script.CHECKS
}


@pytest.mark.parametrize("name", CHECKS)
def test_on_a_gpu(name: str) -> None:
    from checks import Skipped

    try:
        CHECKS[name]()
    except Skipped as reason:
        pytest.skip(str(reason))
