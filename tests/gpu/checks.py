"""What the scripts of checks on a GPU share: inputs, comparisons, and the run of the checks."""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opkiln.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


sys.path.append(str(Path(__file__).parents[1]))  # whose `sample` the scripts use


class Skipped(Exception):
    """A check that cannot be made here, with the reason."""


def parameters(
    *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, device: Any = "cuda"
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes]


def give_gradients(*models: list[Tensor], seed: int = 0, scale: float = 1.0) -> None:
    """The same gradients to each model, into the tensors that are there, if any."""
    generator = torch.Generator().manual_seed(seed)
    for members in zip(*models, strict=True):
        value = torch.randn(members[0].shape, generator=generator) * scale
        for param in members:
            if param.grad is None:
                param.grad = torch.empty_like(param)
            param.grad.copy_(value)


def assert_same(ours: list[Tensor], theirs: list[Tensor], rtol: float = 5e-6) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=rtol, atol=2e-6)


def assert_equal(ours: list[list[Tensor]], theirs: list[list[Tensor]]) -> None:
    for row, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(row, other, strict=True))


def refusal(call: Callable[[], Any]) -> str:
    """What a call that must fail says."""
    try:
        call()
    except (RuntimeError, UsageError) as error:
        return str(error)
    raise AssertionError("it was not refused")


def main(checks: Sequence[Callable[[], str | None]], about: str | None) -> int:
    """Run them, print a line for each, and give the exit code."""
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("--only", metavar="WORD", default="", help="checks with this in their name")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("FAIL there is no GPU that torch can use")
        return 1
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name()}", flush=True)
    failed = 0
    for check in checks:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        if options.only not in name:
            continue
        try:
            said = check()
            torch.cuda.synchronize()
            print(f"PASS {name}" + (f" ({said})" if said else ""), flush=True)
        except Skipped as reason:
            print(f"SKIP {name}: {reason}", flush=True)
        except Exception:  # whatever it is, the other checks are still to be made
            failed += 1
            print(f"FAIL {name}\n{traceback.format_exc()}", flush=True)
    print(f"{'FAIL' if failed else 'PASS'}: {failed} failed")
    return 1 if failed else 0
