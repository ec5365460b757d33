"""``opkiln demo``: trains a small model with an op that is built on the way, cold and then warm."""

from __future__ import annotations

import json
import os
from typing import Any

import click

from opkiln.cli import output
from opkiln.errors import OpkilnError, ToolchainError
from opkiln.report.layout import columns, duration, paint, size

# The two implementations round differently, and the differences add up over the steps. A wrong
# formula is off by 1e-3 or more: one step changes a parameter by 3e-3.
TOLERANCE = 1e-5

_TRAIN = """
from opkiln.ops.cpu_adam.demo import main
sys.exit(main(sys.argv[1]))
"""


class DemoError(OpkilnError):
    """The training process ended without a result. It has the exit code of that process."""

    def __init__(self, what: str, *, why: str = "", hint: str = "", code: int = 1) -> None:
        super().__init__(what, why=why, hint=hint)
        self.exit_code = code


@click.command("demo", short_help="Train a small model with an op, cold and warm.")
@click.option("--keep", is_flag=True, help="Keep the demo's store, and print its path.")
def command(keep: bool) -> int:
    """Train a small model with opkiln.optim.CPUAdam, cold and then warm.

    The first process finds an empty store, so it builds the op. The second finds it there. Both
    trainings are compared with torch.optim.AdamW; exits with 1 if they differ.
    """
    import shutil
    import tempfile

    from opkiln.settings import settings

    work = tempfile.mkdtemp(prefix="opkiln-demo-", dir=settings.tmpdir)
    try:
        return _demo(work)
    finally:
        if keep:
            output.say(f"kept: {work}")
        else:
            shutil.rmtree(work, ignore_errors=True)


def _demo(work: str) -> int:
    from opkiln.machine.toolchain import host, torch_sdk
    from opkiln.report.machine import machine
    from opkiln.store.layers import Store

    torch = torch_sdk.find()
    if torch is None:
        raise ToolchainError(
            "the demo needs torch", why="torch is not installed", hint="pip install torch"
        )
    output.data("A small model, trained with opkiln.optim.CPUAdam: cold, then warm.\n")
    try:
        tools = host.choose(Store().memory)
        compiler = f"{tools.cxx}, {tools.version}"
    except ToolchainError as error:
        compiler = error.what
    here = machine()
    cpu = f"{here.cpu} ({here.simd})"
    rows = [("compiler", compiler), ("cpu", cpu), ("python", here.python), ("torch", torch.version)]
    _show("found")
    output.data(columns(rows, indent=2))
    _show("\ncold: a new process and an empty store")
    cold = _run(work)
    _show("\nwarm: another new process, the same store")
    warm = _run(work)
    _show("\ncompared with torch.optim.AdamW")
    return _compare(cold, warm)


def _show(title: str) -> None:
    output.data(paint(title, "strong"))


def _run(work: str) -> dict[str, Any]:
    """Run one training process, and show what it did. Raises DemoError if it fails."""
    from opkiln.run import process
    from opkiln.settings import environment_with_store

    result = os.path.join(work, "result.json")
    done = process.run(
        process.python_code(_TRAIN, result), env=environment_with_store(work, "lines")
    )
    try:
        with open(result) as file:
            found: dict[str, Any] = json.load(file)
        os.unlink(result)
    except FileNotFoundError:
        tail = "\n".join(done.output.splitlines()[-12:])
        raise DemoError("the training process ended without a result", why=tail) from None
    if "error" in found:
        raise DemoError(**found["error"], code=done.returncode)
    trained = f"{found['steps']} steps in {duration(found['train'])}"
    rows = [
        *((resort, f"{verdict}: {reason}") for resort, verdict, reason in found["candidates"]),
        ("load", f"{duration(found['load'])}, `import opkiln` included, torch imported before"),
        ("entry", f"{found['entry']} ({size(os.path.getsize(found['entry']))})"),
        ("train", f"{trained}, loss {found['first_loss']:.4f} -> {found['last_loss']:.4f}"),
    ]
    lines = [f"  {line}" for line in done.output.splitlines()]
    output.data("\n".join([*lines, columns(rows, indent=2)]))
    return found


def _compare(cold: dict[str, Any], warm: dict[str, Any]) -> int:
    largest = max(cold["difference"], warm["difference"])
    learnt = cold["last_loss"] < 0.5 * cold["first_loss"]
    passed = largest <= TOLERANCE and learnt
    same = "the same parameters, bit for bit"
    if cold["digest"] != warm["digest"]:
        same = "parameters that differ in rounding"
    ratio = f"{cold['load'] / warm['load']:,.0f} times faster"
    word, look = ("PASS", "good") if passed else ("FAIL", "bad")
    rows = [
        ("largest difference", f"{largest:.1e} of {cold['parameters']:,} parameters"),
        ("allowed for rounding", f"{TOLERANCE:.1e}"),
        ("cold and warm trained", same),
        ("warm loading is", f"{ratio}: {duration(cold['load'])} -> {duration(warm['load'])}"),
        ("result", paint(word, look)),
    ]
    output.data(columns(rows, indent=2))
    return 0 if passed else output.FOUND
