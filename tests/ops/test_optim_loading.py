"""What opkiln.optim loads and when, in processes of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest
from sample import child

_FALLBACK = """
import warnings, torch
from opkiln.optim import CPUAdam
from opkiln.errors import FallbackWarning
param = torch.ones(3, requires_grad=True)
param.grad = torch.ones(3)
optimizer = CPUAdam([param], lr=0.5)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    optimizer.step()
    optimizer.step()
assert [w.category for w in caught] == [FallbackWarning], [str(w.message) for w in caught]
assert torch.allclose(param, torch.zeros(3), atol=1e-5), param
"""


@pytest.mark.usefixtures("empty_store")
def test_the_reference_serves_with_one_warning_where_nothing_may_be_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPKILN_MODE", "cached")
    child.run(_FALLBACK, bare=False)


def test_importing_the_front_end_does_not_import_torch() -> None:
    code = "import sys, opkiln.optim; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
