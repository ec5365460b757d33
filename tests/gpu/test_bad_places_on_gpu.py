"""What ``bad_places.py`` checks: in a process of its own, because this one has used the GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU that torch can use", allow_module_level=True)


def test_a_place_that_is_not_there_is_an_error_on_a_gpu() -> None:
    script = Path(__file__).with_name("bad_places.py")
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
