"""Every optimizer under torch's ways to train on several ranks, beside one process alone.

distributed_ranks.py runs a part of the cells in one pair of rank processes, and then in four of
them; each cell is a test here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from distributed_cells import OPTIMIZERS, PARTS, REFUSED, WAYS, allowed, cells, part_of
from sample import child, forks

import opkiln

if TYPE_CHECKING:
    from collections.abc import Callable

SCRIPT = Path(__file__).with_name("distributed_ranks.py")
DOCS = SCRIPT.parents[2] / "docs" / "optimizers.md"
CELLS = [
    pytest.param(cell, marks=() if part_of(cell) == PARTS[0] else pytest.mark.full)
    for cell in (*cells(2), *cells(4))
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo"),
]


@pytest.fixture(scope="module")
def ran(
    tmp_path_factory: pytest.TempPathFactory, catalogue: Path
) -> Callable[[str, str], dict[str, dict[str, Any]]]:
    """Runs all cells of a part, once."""
    paths = os.pathsep.join([str(Path(opkiln.__file__).parents[1]), *sys.path])
    variables = {**os.environ, "PYTHONPATH": paths, "OPKILN_CACHE_DIR": str(catalogue)}

    @cache
    def run(served_by: str, part: str) -> dict[str, dict[str, Any]]:
        at = tmp_path_factory.mktemp("ranks") / "results.json"
        command = [str(SCRIPT), "--part", part, "--json", str(at)]
        if served_by == "reference":
            command.append("--reference")
        running = forks.Fork(
            command, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        done = child.finish(running, timeout=900)
        assert done.returncode == 0, done.stderr
        found: dict[str, dict[str, Any]] = json.loads(at.read_text())
        return found

    return run


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("served_by", ["native", pytest.param("reference", marks=pytest.mark.full)])
def test_a_step_on_several_ranks_is_that_of_one_process(
    ran: Callable[[str, str], dict[str, dict[str, Any]]], served_by: str, cell: str
) -> None:
    results = ran(served_by, part_of(cell))
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
