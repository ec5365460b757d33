"""Every optimizer under torch's ways to train on several ranks, beside one process alone.

distributed_ranks.py runs all cells in one pair of rank processes, and then in four of them; each
cell is a test here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_cells import OPTIMIZERS, REFUSED, WAYS, allowed, cells

import opkiln

SCRIPT = Path(__file__).with_name("distributed_ranks.py")
DOCS = SCRIPT.parents[2] / "docs" / "optimizers.md"
CELLS = [*cells(2), *cells(4)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo"),
]


@pytest.fixture(scope="module", params=["reference", "native"])
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, catalogue: Path
) -> dict[str, dict[str, Any]]:
    at = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(SCRIPT), "--json", str(at / "results.json")]
    if request.param == "reference":
        command.append("--reference")
    paths = os.pathsep.join([str(Path(opkiln.__file__).parents[1]), *sys.path])
    variables = {**os.environ, "PYTHONPATH": paths, "OPKILN_CACHE_DIR": str(catalogue)}
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    found: dict[str, dict[str, Any]] = json.loads((at / "results.json").read_text())
    return found


@pytest.mark.parametrize("cell", CELLS)
def test_a_step_on_several_ranks_is_that_of_one_process(
    results: dict[str, dict[str, Any]], cell: str
) -> None:
    result = results[cell]
    if cell in REFUSED:
        assert "is part of a flat parameter of FullyShardedDataParallel" in result["error"]
        assert "hint: use torch.distributed.fsdp.fully_shard" in result["error"]
        return
    assert "error" not in result, result["traceback"]
    assert result["difference"] <= allowed(cell)


def test_the_docs_show_the_table_of_these_cells() -> None:
    lines = DOCS.read_text().splitlines()
    start = lines.index(f"| | {' | '.join(WAYS)} |")
    rows = lines[start + 2 : start + 2 + len(OPTIMIZERS)]
    for name, row in zip(OPTIMIZERS, rows, strict=True):
        shown, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        assert name in shown
        for way, cell in zip(WAYS, cells, strict=True):
            if f"{way}/{name}" in REFUSED:
                assert cell == "refused"
            else:
                difference, verdict = cell.split()
                assert verdict == "PASS"
                assert float(difference) <= allowed(f"{way}/{name}")
