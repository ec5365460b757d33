"""A small transformer is trained: the optimizers here give the losses that torch's give."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from fault_rows import whole

if TYPE_CHECKING:
    from collections.abc import Iterator

from opkiln import optim

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "ops"))
from training import CONTESTS, STEPS, losses


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The model is small: threads would wait for each other, the longer the busier the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def assert_alike(ours: list[float], theirs: list[float]) -> None:
    assert ours[-1] < ours[0] - 0.5, "it learns"
    # Rounding differs; where Lion's mean is nearly zero its sign may, too.
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-3, atol=1e-3)


# Each trains a model three times. The optimizers share their step, so one of them is in every run.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "CPUAdam" else pytest.mark.full)
        for name in CONTESTS
        if name.startswith("CPU")
    ],
)
@pytest.mark.usefixtures("native_optimizer")
def test_the_losses_are_torchs_eager_and_compiled(
    request: pytest.FixtureRequest, name: str
) -> None:
    short = name == "CPUAdam" and not whole(request.config)
    contest, steps = CONTESTS[name], 60 if short else STEPS
    ours = losses(contest.ours(getattr(optim, name)), steps=steps)
    assert_alike(ours, losses(contest.theirs, steps=steps))
    compiled = losses(contest.ours(getattr(optim, name)), steps=10, backend="aot_eager")
    torch.testing.assert_close(compiled, ours[:10], rtol=1e-3, atol=1e-3)
