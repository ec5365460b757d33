"""Parameters that are chosen by measuring: what is measured, kept and shipped."""

from __future__ import annotations

import json
import shutil
from subprocess import PIPE
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sample import child, forks, known, pool
from torch import Tensor

import opkiln
from opkiln.builder import tuning
from opkiln.errors import SpecError
from opkiln.loading import loader
from opkiln.settings import LAYOUT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# With BLOCK == 256 every call takes at least some hundred microseconds more.
SOURCE = """
#include <opkiln/op.h>
opk::Tensor slow_block(const opk::Tensor& x) {
  opk::Tensor out = opk::empty_like(x);
#if BLOCK == 256
  volatile int64_t spent = 0;
  for (int64_t i = 0; i < 1000000; ++i) spent = spent + 1;
#endif
  for (int64_t i = 0; i < x.numel(); ++i) out.data<float>()[i] = 2 * x.data<const float>()[i];
  return out;
}
OPKILN_OP(slow_block, cpu);
"""
PACKAGE = {
    "__init__.py": """import opkiln
from torch import Tensor

@opkiln.op("slow_block.cpp", tune={"BLOCK": (256, 128)})
def slow_block(x: Tensor) -> Tensor:
    return x * 2
""",
    "slow_block.cpp": SOURCE,
}
# Prints whether anything was measured, and what was chosen.
USE = """
import torch, tuned_package
from opkiln.builder import tuning
times = []
plain = tuning._time
tuning._time = lambda *args: times.append(1) or plain(*args)
x = torch.ones(100)
assert torch.equal(tuned_package.slow_block(x), x * 2)
print(len(times))
print(tuned_package.slow_block.explain(BLOCK=128).notes[0])
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An installed package with a tuned op, and a store in which it is built."""
    place = tmp_path_factory.mktemp("tuned")
    home = place / "site" / "tuned_package"
    home.mkdir(parents=True)
    for name, text in PACKAGE.items():
        (home / name).write_text(text)
    info = place / "site" / "tuned_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tuned-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[opkiln.ops]\ntuned_package = tuned_package\n")
    known.make_store(place / "cache")
    yield place
    pool.add(place / "cache")


def run(site: Path, *argv: str, **more: str) -> str:
    env = {**child.environment(), "PYTHONPATH": str(site / "site"),
           "OPKILN_CACHE_DIR": str(site / "cache"), **more}  # fmt: skip
    done = child.finish(forks.Fork(argv, stdout=PIPE, stderr=PIPE, text=True, env=env))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def kept(site: Path) -> list[Path]:
    return list((site / "cache").glob("*/tuned/tuned_package/slow_block/*.json"))


@pytest.mark.timed
def test_fast_candidate_is_chosen_once_and_the_choice_can_be_moved(
    site: Path, tmp_path: Path
) -> None:
    assert run(site, "-c", USE, OPKILN_MODE="cached").startswith(
        "0\nBLOCK=256 for float32[128], the first candidate: OPKILN_MODE=cached"
    )
    assert kept(site) == []

    measured = run(site, "-c", USE)
    assert measured.startswith("2\nBLOCK=128 for float32[128]"), measured
    assert "measured in this process" in measured
    again = run(site, "-c", USE)
    assert again.startswith("0\nBLOCK=128 for float32[128]"), again
    assert "kept in the store" in again
    assert run(site, "-c", USE, OPKILN_MODE="cached").startswith("0\nBLOCK=128")

    # Damaged, or about something else: measured anew.
    (file,) = kept(site)
    whole = file.read_bytes()
    other = {**json.loads(whole), "shape": "float32[64]"}
    for damage in (b"", whole[:50], b"[" * 10_000, json.dumps(other).encode()):
        file.write_bytes(damage)
        assert run(site, "-c", USE).startswith("2\nBLOCK=128")
        assert json.loads(file.read_bytes())["choice"] == "BLOCK=128"

    listed = run(site, "-m", "opkiln", "tuned", "list")
    assert "tuned_package:slow_block" in listed
    assert "BLOCK=128" in listed
    # As the page says: the directory can be copied, into a store or a layer.
    shutil.copytree(file.parents[2], tmp_path / "layer" / LAYOUT / "tuned")
    run(site, "-m", "opkiln", "tuned", "clear", "slow_block")
    assert kept(site) == []
    assert run(site, "-c", USE, OPKILN_STORE_LAYERS=str(tmp_path / "layer")).startswith(
        "0\nBLOCK=128"
    )

    # A kernel that was rewritten is another question.
    source = site / "site" / "tuned_package" / "slow_block.cpp"
    source.write_text(SOURCE.replace("BLOCK == 256", "BLOCK == 128"))
    try:
        assert run(site, "-c", USE).startswith("2\nBLOCK=256")
    finally:
        source.write_text(SOURCE)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Notes each candidate that is measured."""
    noted: list[str] = []
    plain = tuning._time

    def timed(*args: Any) -> float:
        noted.append("candidate")
        return plain(*args)

    monkeypatch.setattr(tuning, "_time", timed)
    return noted  # type: ignore[return-value]


def test_tuned_op_that_writes_measures_on_copies_and_variants_are_tuned_apart(
    measured: list[str],
) -> None:
    text = """
    #include <opkiln/op.h>
    void count_up(opk::Tensor& x) {
      for (int64_t i = 0; i < x.numel(); ++i) x.data<float>()[i] += STEP + 0 * BLOCK;
    }
    OPKILN_OP(count_up, cpu);
    """

    @opkiln.op(source=text, mutates="x", namespace="tuned_ops", variants={"STEP": (4,)},
               tune={"BLOCK": (1, 2)})  # fmt: skip
    def count_up(x: Tensor) -> None:
        x.add_(x.shape[-1])

    @count_up.variant
    def _(x: Tensor) -> dict[str, int]:
        return {"STEP": x.shape[-1]}

    compiled = torch.compile(count_up, fullgraph=True, backend="aot_eager")
    x = torch.zeros(4)
    compiled(x)
    assert torch.equal(x, torch.full((4,), 4.0)), "one step, however often it was measured"
    assert measured == ["candidate"] * 2
    count_up(x)
    many = torch.zeros(3, 4)
    count_up(many)
    assert torch.equal(many, torch.full((3, 4), 4.0))
    assert measured == ["candidate"] * 4, "another class of shapes"
    count_up(torch.zeros(4, 4))
    assert measured == ["candidate"] * 4, "3 x 4 and 4 x 4 are one class"
    names = {op for _, op, _ in loader.loaded_here() if op.startswith("count_up")}
    assert names == {"count_up__STEP_4_BLOCK_1", "count_up__STEP_4_BLOCK_2"}

    @count_up.tune_key
    def _(x: Tensor) -> int:
        return x.dim()

    count_up(torch.zeros(1000, 4))
    assert measured == ["candidate"] * 6
    count_up(torch.zeros(10, 4))
    assert measured == ["candidate"] * 6
    assert "for STEP=4, 2 on" in count_up.explain(BLOCK=1).notes[-1]


def test_op_without_tune_takes_no_key() -> None:
    @opkiln.op(source="", namespace="tuned_ops")
    def untuned(x: Tensor) -> Tensor:
        return x

    with pytest.raises(SpecError, match="op untuned has nothing to tune"):
        untuned.tune_key(lambda x: 1)
