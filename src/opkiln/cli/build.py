"""``opkiln build``: build ops now, so that no process has to later."""

from __future__ import annotations

import contextvars
import os
import threading
import time
from contextlib import ExitStack
from typing import Any, NamedTuple

import click

from opkiln.cli import output, targets
from opkiln.cli.op_name import complete
from opkiln.errors import (
    CompilingOff,
    LoadError,
    OpkilnError,
    SpecError,
    StoreError,
    UnknownBackend,
)
from opkiln.report.layout import columns
from opkiln.settings import override, settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.builder import OpBuilder
    from opkiln.model import Artifact

BUILT, CACHED, SKIPPED, FAILED = "built", "cached", "skipped", "failed"


class Outcome(NamedTuple):
    """What became of one op."""

    op: str
    status: str
    backend: str = ""
    archs: tuple[str, ...] = ()
    seconds: float = 0.0
    path: str = ""
    sha256: str = ""
    reason: str = ""
    error: OpkilnError | None = None


@click.command("build", short_help="Build ops now, instead of at their first use.")
@click.argument("ops", nargs=-1, shell_complete=complete)
@click.option("--all", "everything", is_flag=True, help="Build every op that can run here.")
@click.option(
    "--trace", type=click.Path(dir_okay=False), metavar="FILE",
    help="Write a trace for chrome://tracing or Perfetto.",
)  # fmt: skip
@click.option(
    "-j", "--jobs", type=click.IntRange(min=1), metavar="N",
    help="Run at most N steps at once. The host's budget applies as well.",
)  # fmt: skip
@targets.option(multiple=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    ops: tuple[str, ...],
    everything: bool,
    trace: str | None,
    jobs: int | None,
    target: tuple[str, ...],
    as_json: bool,
) -> int:
    """Build OPS, unless they are built already.

    An op that is named must be built natively, or it is an error; it never falls back. With --all,
    an op that cannot run here (its torch is too old, its author says so) is skipped and listed.
    """
    from opkiln.registry import ALL_OPS

    if bool(ops) == everything:
        raise click.UsageError("name the ops to build, or say --all")
    wanted: list[targets.Wanted | None] = [targets.parse(text) for text in dict.fromkeys(target)]
    outcomes: list[Outcome] = []
    with ExitStack() as stack:
        if jobs is not None:
            stack.enter_context(override(max_jobs=jobs))
        for each in wanted or [None]:
            names = list(ALL_OPS if everything else dict.fromkeys(ops))
            with targets.applied(each):
                builders = []
                for name in names:
                    try:
                        builders.append(targets.builder(name, each))
                    except UnknownBackend as none:
                        if not everything:
                            raise
                        outcomes.append(Outcome(name, SKIPPED, reason=f"{none.what}: {none.why}"))
                    except SpecError as wrong:  # another package's, which the rest need not suffer
                        outcomes.append(Outcome(name, FAILED, error=wrong))
                outcomes += _build(builders, trace, skipping=everything)
    if as_json:
        output.data_json({"schema": 1, "ops": [_as_json(each) for each in outcomes]})
    else:
        _show(outcomes)
    failures = [each.error for each in outcomes if each.error is not None]
    for error in failures:
        output.say_failure(error)
    return failures[0].exit_code if failures else 0


def _build(builders: list[OpBuilder], trace: str | None, *, skipping: bool) -> list[Outcome]:
    """What is there is found first: where nothing is missing, no thread and no display starts."""
    outcomes: dict[str, Outcome] = {}
    missing: list[OpBuilder] = []
    for builder in builders:
        found = _look(builder, skipping)
        if found is None:
            missing.append(builder)
        else:
            outcomes[builder.name] = found
    if missing or trace is not None:
        from opkiln.loading import progress

        with progress.shown(trace):
            outcomes |= _in_parallel(missing)
    return [outcomes[builder.name] for builder in builders]


def _look(builder: OpBuilder, skipping: bool) -> Outcome | None:
    """The outcome for an op that is cached, or that is not to be tried; None for one to build."""
    from opkiln.loading.resolve import would_compile
    from opkiln.toolchain.choice import available

    try:
        compiles, _ = would_compile(builder.op())
        if not compiles:
            return _make(builder)
    except LoadError as error:
        if skipping and not isinstance(error, CompilingOff):
            return Outcome(builder.name, SKIPPED, reason=f"{error.what}: {error.why}")
        return Outcome(builder.name, FAILED, error=error)
    except OpkilnError as error:
        return Outcome(builder.name, FAILED, error=error)
    # Without any compiler nothing is skipped: that is no trait of an op, but an error.
    if skipping and settings.jit and available(builder.backend) and not builder.is_compatible():
        return Outcome(builder.name, SKIPPED, reason=builder.error_log or "not compatible")
    return None


def _in_parallel(builders: list[OpBuilder]) -> dict[str, Outcome]:
    """Build each in a thread: the engine's budget decides how many steps run at once."""
    outcomes: dict[str, Outcome] = {}

    def work(builder: OpBuilder) -> None:
        try:
            outcomes[builder.name] = _make(builder)
        except OpkilnError as error:
            outcomes[builder.name] = Outcome(builder.name, FAILED, error=_with_hint(error, builder))

    if len(builders) == 1:
        work(builders[0])  # in this thread, where an interrupt reaches it
        return outcomes
    threads = []
    for builder in builders:
        # Each sees this thread's settings and its display. Daemons: an interrupt waits for none.
        run = contextvars.copy_context().run
        thread = threading.Thread(target=run, args=(work, builder), daemon=True)
        thread.start()
        threads.append(thread)
    for thread in threads:
        while thread.is_alive():
            # Not for ever: the kernel may hand an interrupt to another thread, and this one only
            # sees it when it wakes.
            thread.join(0.2)
    return outcomes


def _make(builder: OpBuilder) -> Outcome:
    """Find or build one op. Raises OpkilnError."""
    from opkiln.loading.archs import wanted
    from opkiln.loading.resolve import artifact as find_or_build
    from opkiln.loading.trace import Trace

    began = time.monotonic()
    op = builder.op()
    artifact = find_or_build(op, Trace())
    seconds = time.monotonic() - began
    _require_stored(builder.name, artifact)
    status = BUILT if artifact.origin == "built" else CACHED
    archs = wanted(op).archs
    return Outcome(
        builder.name, status, builder.backend, archs, seconds, artifact.path, artifact.sha256
    )


def _require_stored(op: str, artifact: Artifact) -> None:
    """A build that no store could take lasts only as long as this process. Raises StoreError."""
    from opkiln.store.layers import Store

    layers = [layer.root for layer in Store().location.layers]
    if not any(artifact.path.startswith(os.path.join(root, "")) for root in layers):
        raise StoreError(
            f"op {op} was built, but could not be stored",
            hint="set OPKILN_CACHE_DIR to a directory that can be written to",
        )


def _with_hint(error: OpkilnError, builder: OpBuilder) -> OpkilnError:
    """The loader's hint for a forbidden compile is this very command; ours is how to allow it."""
    if not isinstance(error, CompilingOff):
        return error
    variable = "OPKILN_SEAL=off" if settings.jit else "OPKILN_JIT=on"
    hint = f"{variable} opkiln build {builder.name}"
    return CompilingOff(error.what, why=error.why, hint=hint)


def _show(outcomes: list[Outcome]) -> None:
    done = [each for each in outcomes if each.status in (BUILT, CACHED)]
    if done:
        rows = [("op", "for", "status", "seconds", "path")]
        rows += [
            (each.op, _for(each), each.status, f"{each.seconds:.2f}", each.path) for each in done
        ]
        output.data(columns(rows))
    for each in outcomes:
        if each.status == SKIPPED:
            output.say(f"skipped {each.op}: {' '.join(each.reason.split())}")


def _for(each: Outcome) -> str:
    return f"{each.backend} {';'.join(each.archs)}".strip()


def _as_json(each: Outcome) -> dict[str, Any]:
    error = each.error
    told = None
    if error is not None:
        told = {
            "kind": type(error).__name__,
            "what": error.what,
            "why": error.why,
            "hint": error.hint,
            "exit_code": error.exit_code,
        }
    return {**each._asdict(), "error": told}
