"""Wheels of prebuilt ops, unpacked, on a GPU. Needs torch with CUDA, and no pytest.

    PYTHONPATH=src python tests/gpu/prebuilt.py served DIR    # every op of the wheel, no compiler
    PYTHONPATH=src python tests/gpu/prebuilt.py refused DIR   # of a wheel for another GPU

DIR is where a wheel was unpacked, made with such a command as:

    opkiln build --all --target cpu:x86-64-v2,x86-64-v3,x86-64-v4 --target cuda:9.0 --wheel OUT
    opkiln build fused_adam --target cuda:8.0 --wheel OUT

The exit code is 0 when every check passed, otherwise 1. Without a GPU, ``served`` looks at the CPU
ops alone, and says so.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import opkiln
from opkiln.decision.terms import Request
from opkiln.errors import OpkilnError
from opkiln.loading import loader
from opkiln.loading.here import Loaded
from opkiln.loading.loader import look
from opkiln.settings import override
from opkiln.store import entry

Op = tuple[str, str]  # name, backend


def ops_in(directory: Path) -> dict[Op, list[str]]:
    """What the wheel has, and for which CPUs or GPUs."""
    found: dict[Op, list[str]] = {}
    for manifest in sorted(directory.glob(f"opkiln_prebuilt/*/v1/ops/*/*/*/*/*/{entry.MANIFEST}")):
        said = entry.parse_manifest(manifest.read_bytes())
        target = said["target"]
        made_for = ";".join(target["archs"]) or "+".join([target["cpu"], *target["cpu_features"]])
        found.setdefault((said["op"], target["backend"]), []).append(made_for)
    return found


def loaded(op: Op) -> Loaded:
    """Load an op, which must be native."""
    builder = opkiln.get_builder(op[0], backend=op[1])
    builder.jit_load(verbose=False)
    return loader.loaded_here()[builder.op().name][0]


def step(kind: type, device: str, **options: Any) -> str:
    """Three steps of an optimizer beside torch's AdamW. Raises AssertionError."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(size, generator=generator) for size in (7, 4096, 100_003)]
    mine, theirs = (
        [value.to(device).clone().requires_grad_() for value in values] for _ in range(2)
    )
    optimizers = [
        kind(mine, lr=0.01, weight_decay=0.1, **options),
        torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1),
    ]
    for _ in range(3):
        for a, b in zip(mine, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator).to(device)
            b.grad = a.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
    return f"3 steps on {device}, as torch's AdamW"


class Checks:
    """Prints a line for each check, and counts those that failed."""

    def __init__(self) -> None:
        self.failed = 0

    def __call__(self, name: str, check: Any, *arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            said = check(*arguments, **named)
        except (OpkilnError, AssertionError, RuntimeError):
            self.failed += 1
            print(f"FAIL {name}\n{traceback.format_exc()}", flush=True)
            return None
        took = (time.perf_counter() - began) * 1e3
        print(f"PASS {name}: {said} ({took:.1f} ms)", flush=True)
        return said


def served(directory: Path, check: Checks) -> None:
    """Every op of the wheel loads where nothing may compile, and two of them compute."""
    found = ops_in(directory)
    assert found, f"there is no wheel of ops in {directory}"
    has_gpu = torch.cuda.is_available()

    def load(op: Op) -> str:
        artifact = loaded(op).artifact
        assert artifact is not None
        assert artifact.origin == "prebuilt", artifact
        assert Path(artifact.path).is_relative_to(directory), artifact
        taken = next(
            d for d in loader.loaded_here()[_name(op)][0].trace.candidates if d.verdict == "taken"
        )
        return f"of {', '.join(found[op])}: {taken.reason}"

    for op in found:
        if op[1] == "cuda" and not has_gpu:
            print(f"SKIP load {op[0]} for cuda: there is no GPU that torch can use")
        else:
            check(f"load {op[0]} for {op[1]}", load, op)
    if ("cpu_adam", "cpu") in found:
        check("call cpu_adam", step, opkiln.optim.CPUAdam, "cpu")
    if ("fused_adam", "cuda") in found and has_gpu:
        check("call fused_adam", step, opkiln.optim.FusedAdam, "cuda")


def _name(op: Op) -> tuple[str, str, str]:
    return opkiln.get_builder(op[0], backend=op[1]).op().name


def refused(directory: Path, check: Checks) -> None:
    """No CUDA op of the wheel serves this GPU: each is refused with its reason, then compiled."""
    found = [op for op in ops_in(directory) if op[1] == "cuda"]
    assert found, f"there is no wheel of CUDA ops in {directory}"

    def refuse(op: Op) -> str:
        with override(mode="cached"):
            seen = look(Request(opkiln.get_builder(op[0], backend="cuda").op()))
        prebuilt = [each for each in seen.trace.candidates if each.resort == "prebuilt"]
        assert prebuilt, seen
        assert all(each.verdict == "refused" for each in prebuilt), prebuilt
        return "; ".join(dict.fromkeys(each.reason for each in prebuilt))

    def compile_instead(op: Op) -> str:
        now = loaded(op)
        assert now.artifact is not None
        assert now.artifact.origin == "built", now.artifact
        assert str(directory) not in Path("/proc/self/maps").read_text()
        return "; ".join(map(str, now.trace.candidates))

    for op in found:
        check(f"refuse {op[0]}", refuse, op)
        check(f"compile {op[0]}", compile_instead, op)
    if ("fused_adam", "cuda") in found:
        check("call fused_adam", step, opkiln.optim.FusedAdam, "cuda")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=("served", "refused"))
    parser.add_argument("directory", type=Path, help="where a wheel was unpacked")
    options = parser.parse_args()
    directory = options.directory.resolve()
    sys.path.insert(0, str(directory))
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    python = ".".join(map(str, sys.version_info[:3]))
    print(f"Python {python}, torch {torch.__version__}, {gpu}", flush=True)
    check = Checks()
    with tempfile.TemporaryDirectory() as private:
        compiles = options.part == "refused"
        # An empty store, and a reference that serves silently is no success.
        with override(cache_dir=private, mode="native" if compiles else "sealed"):
            (refused if compiles else served)(directory, check)
    print(f"{'FAIL' if check.failed else 'PASS'}: {check.failed} failed")
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
