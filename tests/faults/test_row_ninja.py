"""Row 36: what ``opkiln ninja`` builds, plain ninja builds from nothing.

``ninja_graphs.py`` is the fuzzer; all 300 rounds are run with ``--full-counts``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import ninja_graphs
import pytest
from loaders import HERE
from sample import child

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fault_rows import Cases

pytestmark = [
    pytest.mark.row(36),
    pytest.mark.skipif(shutil.which("ninja") is None, reason="there is no ninja on PATH"),
]

ENOUGH_TO_FIND = 60
# The round of the tree that shows a mistake first, with seed 3.
FIRST = {
    "variables are not in the key": 15,
    "paths in outputs are overlooked": 15,
    "the words after the first ten are not in the key": 15,
}


def run(where: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(HERE / "ninja_graphs.py"), str(where), *options],
        env=child.environment(), stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip


def test_every_output_is_that_of_plain_ninja(
    tmp_path: Path, cases: Cases, note: Callable[[str], None]
) -> None:
    rounds = cases.count(300)
    done = run(tmp_path / "trees", "--rounds", str(rounds), "--seed", "5")
    assert done.returncode == 0, done.stdout[-5000:]
    assert f"{rounds} rounds, 0 differences" in done.stdout
    cases.tried(rounds)
    note(done.stdout.replace("\n", "; "))


@pytest.mark.parametrize("mistake", ninja_graphs.PLANTS)
def test_a_planted_mistake_is_found(mistake: str, tmp_path: Path) -> None:
    rounds = ["--rounds", str(ENOUGH_TO_FIND), "--first", str(FIRST.get(mistake, 0))]
    done = run(tmp_path / "trees", *rounds, "--seed", "3", "--plant", mistake)
    assert done.returncode == 1, done.stdout
    assert done.stdout.startswith("round "), done.stdout
