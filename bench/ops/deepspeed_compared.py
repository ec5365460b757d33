"""One work, done by opkiln and by DeepSpeed's kernels in turns: its time, and how far from exact.

What goes wrong with one of them is written down, and the others go on.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import harness
import torch
from harness import Row
from torch import Tensor

from opkiln.errors import OpkilnError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Modules = Callable[[str], Any]  # a module of DeepSpeed by its name; raises OpkilnError

ROTATED = 512 << 20  # bytes of the tensors that calls take turns with
AGREE = 4.0  # units in the last place, of a tensor's typical number
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class Side(NamedTuple):
    """``call(module, *tensors)`` does the work. ``module`` is one of DeepSpeed's, or none. It may
    write over its tensors; what it gives is compared with the work's reference, or with its own."""

    call: Callable[..., Any]
    module: str = ""
    reference: Callable[..., Any] | None = None


class Work(NamedTuple):
    """``make`` gives the tensors of a call, ``bytes`` are those that it must read and write."""

    name: str
    bytes: int
    make: Callable[[], Sequence[Tensor]]
    sides: dict[str, Side]
    reference: Callable[..., Any]


@dataclass
class Found:
    """Rows; how far each result is from the reference, in units of rounding, and how far it may be;
    what went wrong; the memory that a step took beyond its tensors, in MiB."""

    limit: float = AGREE
    rows: list[Row] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)


class Broken(Exception):
    """A kernel has failed in a way after which the GPU takes no more work from this process."""


def ours(call: Callable[..., Any]) -> Side:
    return Side(lambda _module, *tensors: call(*tensors))


@contextmanager
def failing(work: str, who: str, found: Found) -> Iterator[None]:
    """Write down what goes wrong, and go on. Raises Broken."""
    try:
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except (RuntimeError, TypeError, AttributeError, OpkilnError) as error:
        found.failed[who] = f"{type(error).__name__}: {error}"
        if torch.cuda.is_available():
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                raise Broken(f"{work}, {who}: {error}") from error


def compared(work: Work, modules: Modules, device: torch.device, repeats: int) -> Found:
    """Each side once beside the reference, then all in turns. Raises Broken."""
    first = work.make()
    bound: dict[str, Callable[..., Any]] = {}
    found = Found()
    for who, side in work.sides.items():
        with failing(work.name, who, found):
            call = _bound(side, modules)
            given = call(*[each.clone() for each in first])
            wanted = (side.reference or work.reference)(*(_wide(each) for each in first))
            found.errors[who] = apart(given, wanted)
            bound[who] = call
    calls, sets = 1, 2
    if device.type == "cuda":
        size = sum(each.nbytes for each in first)
        sets = max(2, min(512, -(-ROTATED // size)))
        calls = 32 if size < 8 << 20 else 4
    tensors = [first, *(work.make() for _ in range(sets - 1))]
    turns = {who: [partial(call, *each) for each in tensors] for who, call in bound.items()}
    for who, time in harness.rotated(turns, calls, device, repeats).items():
        found.rows.append(Row(work.name, who, work.bytes, *time))
    return found


def apart(given: Any, wanted: Any) -> float:
    """The largest difference, in units in the last place of its number or of a typical one."""
    if isinstance(given, Tensor):
        given, wanted = [given], [wanted]
    most = 0.0
    for ours, target in zip(given, wanted, strict=True):
        if not ours.is_floating_point():
            most = max(most, float((ours != target).any()) * sys.float_info.max)
            continue
        exact = target.float().reshape(ours.shape)
        unit = exact.abs() + exact.square().mean().sqrt()
        error = ((ours.float() - exact).abs() / unit).max() / torch.finfo(ours.dtype).eps
        most = max(most, float(error.nan_to_num(nan=sys.float_info.max)))
    return most


def _bound(side: Side, modules: Modules) -> Callable[..., Any]:
    module = modules(side.module) if side.module else None
    return lambda *tensors: side.call(module, *tensors)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor.clone()
