"""Row 34: after any change, the cache serves what an empty cache builds.

``differential.py`` is the fuzzer; all 5,000 rounds are run with ``--full-counts``.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import differential
import pytest
from loaders import HERE
from sample import child

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fault_rows import Cases

pytestmark = pytest.mark.row(34)

ENOUGH_TO_FIND = 200


def fuzz(where: Path, *options: str) -> subprocess.CompletedProcess[str]:
    # -S: without site-packages there is no torch, and a fork is cheap.
    command = [sys.executable, "-S", str(HERE / "differential.py"), str(where), *options]
    return subprocess.run(
        command, env=child.environment(), capture_output=True, text=True, check=False
    )


def test_the_cache_serves_what_an_empty_cache_builds(
    tmp_path: Path, cases: Cases, note: Callable[[str], None]
) -> None:
    rounds = 5000 if cases.whole else 75
    cases.tried(rounds)
    done = fuzz(tmp_path, "--rounds", str(rounds), "--seed", "1")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert f"{rounds} rounds, 0 differences" in done.stdout
    note(done.stdout.replace("\n", "; "))


@pytest.mark.parametrize("mistake", differential.PLANTS)
def test_a_planted_mistake_is_found(mistake: str, tmp_path: Path) -> None:
    done = fuzz(tmp_path, "--rounds", str(ENOUGH_TO_FIND), "--seed", "1", "--plant", mistake)
    assert done.returncode == 1, done.stdout + done.stderr[-2000:]
    assert "an empty cache builds" in done.stdout
