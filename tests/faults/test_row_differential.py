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


def start(where: Path, *options: str) -> subprocess.Popen[str]:
    # -S: without site-packages there is no torch, and a fork is cheap.
    where.mkdir()
    command = [sys.executable, "-S", str(HERE / "differential.py"), str(where), *options]
    return subprocess.Popen(command, env=child.environment(), stdout=subprocess.PIPE, text=True)


def test_the_cache_serves_what_an_empty_cache_builds(
    tmp_path: Path, cases: Cases, note: Callable[[str], None]
) -> None:
    rounds = 2500 if cases.whole else 10
    fuzzers = [
        start(tmp_path / seed, "--rounds", str(rounds), "--seed", seed) for seed in ("1", "2")
    ]
    for fuzzer in fuzzers:
        told, _ = fuzzer.communicate()
        assert fuzzer.returncode == 0, told[-5000:]
        assert f"{rounds} rounds, 0 differences" in told
        cases.tried(rounds)
        note(told.replace("\n", "; "))


@pytest.mark.parametrize("mistake", differential.PLANTS)
def test_a_planted_mistake_is_found(mistake: str, tmp_path: Path) -> None:
    where = tmp_path / "planted"
    fuzzer = start(where, "--rounds", str(ENOUGH_TO_FIND), "--seed", "1", "--plant", mistake)
    told, _ = fuzzer.communicate()
    assert fuzzer.returncode == 1, told
    assert told.startswith("round "), told
