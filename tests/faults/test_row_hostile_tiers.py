"""Row 35: whatever a remote tier sends, a load ends in time, and says in a line what it refuses.

``hostile_tiers.py`` is the fuzzer; all 2,000 conversations are held with ``--full-counts``.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import hostile_tiers
import pytest
from loaders import HERE
from sample import child, known

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fault_rows import Cases

pytestmark = [pytest.mark.row(35), pytest.mark.timed]

ENOUGH_TO_FIND = 600
# The seed, and a round shortly before the one that finds a mistake; it is also found from 0 on.
SOON = {
    "requests have no deadline": ("3", "1"),
    "sockets of requests that were given up stay open": ("3", "1"),
    "malformed answers are raw errors": ("2", "9"),
    "signatures are not verified": ("3", "20"),
    "all hosts get the login": ("3", "3"),
    "all servers of tokens get the login": ("1", "34"),
    "what a tier says is printed as it is": ("1", "9"),
    "a blob may be longer than its record says": ("3", "5"),
}


def fuzz(where: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the fuzzer, where the compilers are known."""
    where.mkdir()
    known.make_store(where / "builder")
    script = str(HERE / "hostile_tiers.py")
    return subprocess.run(
        [sys.executable, script, str(where), *options], env=child.environment(),
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_whatever_a_tier_sends_a_load_ends_in_time_and_in_words(
    tmp_path: Path, cases: Cases, note: Callable[[str], None]
) -> None:
    rounds = cases.count(2000, one_in=80)
    # The last of each fifty is a whole load.
    first = 0 if cases.whole else hostile_tiers.LOAD_EVERY - rounds
    done = fuzz(tmp_path / "fuzzed", "--first", str(first), "--rounds", str(rounds))
    assert done.returncode == 0, f"{done.stdout[-5000:]}\n{done.stderr[-5000:]}"
    assert f"{rounds} conversations, 0 problems" in done.stdout
    # It tries something: some were honest, some were not, and some loads were whole ones.
    outcomes = done.stdout.splitlines()[-1]
    assert all(f" {each}" in outcomes for each in ("fetched", "loaded", "not fetched")), outcomes
    cases.tried(rounds)
    note(done.stdout.replace("\n", "; "))


@pytest.mark.parametrize("mistake", hostile_tiers.PLANTS)
def test_a_planted_mistake_is_found(mistake: str, tmp_path: Path) -> None:
    seed, first = SOON[mistake]
    begin = ["--seed", seed, "--first", first, "--rounds", str(ENOUGH_TO_FIND), "--longest", "6"]
    done = fuzz(tmp_path / "planted", *begin, "--plant", mistake)
    assert done.returncode == 1, done.stdout + done.stderr
    assert hostile_tiers.PLANTS[mistake][1] in done.stdout.splitlines()[0], done.stdout
