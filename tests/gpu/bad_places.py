"""An index, offset or length without a place ends a kernel with an error: one line per function.

    PYTHONPATH=src python tests/gpu/bad_places.py

Each wrong call has a process of its own, because the error ends the GPU's context. The exit code is
0 if every right call ran and every wrong one raised, otherwise 1.
"""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))

from bad_indices import INDEXED, copied, wrong_calls

_AT_ONCE = 8


def _run(function: Any, given: dict[str, Any]) -> str:
    """What the call raised; empty if it ran."""
    on_gpu = {n: v.cuda() if isinstance(v, torch.Tensor) else v for n, v in given.items()}
    try:
        function(**on_gpu)
        torch.cuda.synchronize()
    except RuntimeError as error:  # also what torch raises for a kernel that was stopped
        return str(error).partition("\n")[0]
    return ""


def _right(name: str) -> str:
    indexed = INDEXED[name]
    if not indexed.function.load("cuda"):  # or the reference would be asked
        return str(indexed.function.explain("cuda"))
    return _run(indexed.function, copied(indexed.given))


def _wrong(name: str, number: int) -> tuple[str, int, str]:
    wrong = list(wrong_calls(INDEXED[name]))[number]
    return wrong.name, wrong.value, _run(wrong.function, wrong.given)


def main() -> int:
    failures = calls = 0
    with multiprocessing.get_context("fork").Pool(_AT_ONCE, maxtasksperchild=1) as pool:
        rights = {name: pool.apply_async(_right, (name,)) for name in INDEXED}
        built = {name: each.get() for name, each in rights.items()}
        wrongs = {name: [pool.apply_async(_wrong, (name, number))
                         for number in range(len(list(wrong_calls(INDEXED[name]))))]
                  for name in INDEXED}  # fmt: skip
        for name, answers in wrongs.items():
            told = [each.get() for each in answers]
            silent = [f"{argument} = {value}" for argument, value, raised in told if not raised]
            calls += len(told)
            why = f": {built[name] or silent}" if built[name] or silent else ""
            failures += bool(why)
            print("FAIL" if why else "PASS", name, f"({len(told)} wrong calls){why}")
    print(f"{calls} wrong calls of {len(INDEXED)} functions, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
