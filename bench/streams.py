"""The loops of sources/optimizer_streams.cpp: how they are compiled, and steps that call them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = Path(__file__).resolve().parent / "sources" / "optimizer_streams.cpp"


def compiling(output: Path) -> list[str]:
    """The compiler's command, with the flags that the loops need to be vectorised.

    Raises FileNotFoundError where there is no torch.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("torch is not installed")
    root = Path(spec.origin).parent
    return [
        "g++", "-std=c++20", "-O3", "-march=native", "-fno-math-errno", "-fPIC", "-shared",
        "-DTORCH_TARGET_VERSION=0x020a000000000000", f"-I{root / 'include'}", str(SOURCE),
        "-o", str(output), f"-L{root / 'lib'}", "-ltorch_cpu",
    ]  # fmt: skip


def stepping(
    library: Path, function: str, lists: Sequence[list[Tensor]], numbers: Sequence[float],
    *, counted: bool = False,
) -> Callable[[], None]:  # fmt: skip
    """A step over tensors of the types that the function takes, every pointer gathered beforehand.

    ``lists`` are parameters, gradients, states; with ``counted`` the function wants to know which
    step it makes.
    """
    call = getattr(ctypes.CDLL(str(library)), function)
    n = len(lists[0])
    pointers = [(ctypes.c_void_p * n)(*(t.data_ptr() for t in tensors)) for tensors in lists]
    ends, total = [], 0
    for tensor in lists[0]:
        total += tensor.numel()
        ends.append(total)
    ends_array = (ctypes.c_int64 * n)(*ends)
    floats = [ctypes.c_float(value) for value in numbers]
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        made = [ctypes.c_int64(count)] if counted else []
        call(ctypes.c_int64(n), *pointers, ends_array, *made, *floats)

    step.keep = lists  # type: ignore[attr-defined]  # the pointers do not own the tensors
    return step
