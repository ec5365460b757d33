"""``opkiln build``: builds ops ahead of their first use, for this machine or for others."""

from __future__ import annotations

import os
from typing import Any

import click

from opkiln.base.digest import LARGEST_BUNDLE, sha256_file
from opkiln.cli import options, output
from opkiln.errors import UsageError
from opkiln.report.layout import columns
from opkiln.ship import prebuild, wrappings
from opkiln.ship.audit import Finding
from opkiln.ship.prebuild import BUILT, CACHED, SKIPPED, BuildOutcome, Requests
from opkiln.ship.selection import NamedTarget, parse_all


@click.command("build", short_help="Build ops now, instead of at their first use.")
@options.ops_argument
@click.option("--all", "everything", is_flag=True, help="Build every op that can run here.")
@options.package_option
@options.file_option(
    "--recorded",
    help="Build the ops in FILE, which `opkiln cache record` or `opkiln run --record` wrote, for "
    "the devices in it; and modules of other JITs, by the commands that are in FILE.",
)
@options.file_option(
    "--for-script", type=click.Path(exists=True, dir_okay=False), metavar="SCRIPT",
    help="Run a Python script and build the ops that it loads; its arguments follow `--`.",
)  # fmt: skip
@options.target_option(multiple=True)
@options.file_option(
    "--targets",
    help='Build for the targets in a TOML FILE: targets = ["cpu:x86-64-v3", "cuda:9.0a"]. It may '
    "name the ops, too: ops = [...].",
)
@click.option(
    "--executor", metavar="MODULE:FUNCTION",
    help="Build on a farm, each op for each target as a task for the concurrent.futures.Executor "
    "that FUNCTION returns. A lost task runs again.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(file_okay=False), metavar="DIR",
    help="Put the libraries into DIR, a layer for OPKILN_STORE_LAYERS.",
)  # fmt: skip
@click.option(
    "--wheel", type=click.Path(file_okay=False), metavar="DIR",
    help="Write them as a wheel to DIR. Where it is installed, opkiln finds them.",
)  # fmt: skip
@options.file_option(
    "--bundle", help="Write them to one FILE, for `opkiln cache import` and OPKILN_STORE_LAYERS."
)
@click.option("--name", metavar="NAME", help="The wheel's name.  [default: <package>-ops]")
@click.option("--version", metavar="VERSION", help="The wheel's version.  [default: the package's]")
@click.option(
    "--max-wheel-size", "max_size", callback=options.parse_size_option, metavar="SIZE",
    help="Split the wheel, by backend and architecture, so that each is at most SIZE: 80M.",
)  # fmt: skip
@click.option(
    "--verify", is_flag=True,
    help="Check what each library needs from torch, glibc and libstdc++; exit with 4 if that is "
    "more than the tag of its wheel allows.",
)  # fmt: skip
@options.file_option("--trace", help="Write a trace for chrome://tracing or Perfetto.")
@click.option(
    "-j", "--jobs", type=click.IntRange(min=1), metavar="N",
    help="Run at most N steps at once, on a farm N on each worker. The host's budget applies as "
    "well.",
)  # fmt: skip
@options.json_option
def command(
    ops: tuple[str, ...],
    everything: bool,
    package: str | None,
    recorded: str | None,
    for_script: str | None,
    target: tuple[str, ...],
    targets: str | None,
    executor: str | None,
    verify: bool,
    trace: str | None,
    jobs: int | None,
    as_json: bool,
    **forms: Any,
) -> int:
    """Build OPS, unless they are already built.

    If a named op cannot be built natively, that is an error; it does not fall back. With --all or
    --package, an op that cannot run here (torch is too old, or its author says so) is skipped and
    listed.
    """
    wrapping = wrappings.Wrapping(**forms)
    wanted = wanted_targets(target)
    if targets is not None:
        from opkiln.ship.farm import read_matrix

        listed, more = read_matrix(targets)
        wanted = list(dict.fromkeys([*wanted, *more]))
        ops = ops or (() if everything or package or recorded or for_script else tuple(listed))
    if wrapping.wheel is None and (wrapping.name or wrapping.version or wrapping.max_size):
        raise click.UsageError("--name, --version and --max-wheel-size need --wheel")
    named = bool(ops) and for_script is None
    others = sum(each is not None for each in (package, recorded, for_script))
    if named + everything + others != 1:
        raise click.UsageError(
            "give one of: names of ops, --all, --package, --recorded, --for-script"
        )
    if for_script is not None:
        asked = _script_requests(for_script, ops, wanted)
    else:
        asked = requests(ops, everything, package, wanted, recorded)
    wrappings.check(wrapping, {each.builder.distribution for each in asked.requests})
    if executor is None:
        outcomes = prebuild.prebuild(asked.requests, jobs=jobs, trace=trace)
    else:
        from opkiln.ship import farm

        outcomes = farm.run(asked.requests, executor, jobs=jobs, trace=trace)
    outcomes += [*asked.refused, *prebuild.build_modules(recorded)]
    failures = [each.error for each in outcomes if each.error is not None]
    done = [each.path for each in outcomes if each.path]
    findings: tuple[tuple[str, Finding], ...] = ()
    if wrapping.places and not done and not failures:
        raise UsageError(
            f"there is nothing to put into {', '.join(wrapping.places)}",
            why="; ".join(each.reason for each in outcomes) or "no op was requested",
        )
    if verify and not failures:
        findings, violations = wrappings.audit_libraries(done)
        failures += violations
    written = wrappings.write(done, wrapping) if done and not failures else []
    digests = {
        path: sha256_file(path, LARGEST_BUNDLE) for path in written if path == wrapping.bundle
    }
    if as_json:
        told = [{"op": op, **each._asdict()} for op, each in findings]
        output.data_json({"ops": outcomes, "findings": told, "written": written, "sha256": digests})
    else:
        _show(outcomes, findings, {path: digests.get(path, "") for path in written})
    for error in failures:
        output.say_failure(error)
    return failures[0].exit_code if failures else 0


def requests(
    ops: tuple[str, ...],
    everything: bool,
    package: str | None,
    wanted: list[NamedTarget],
    recorded: str | None = None,
) -> Requests:
    """The ops that were named, all, or those of a package or a record, each for each target."""
    from opkiln.builder.registry import ALL_OPS, ops_of

    if recorded is not None:
        return prebuild.recorded_requests(recorded, wanted)
    if package is not None:
        return prebuild.requests(ops_of(package), wanted, named=False)
    names = list(ALL_OPS if everything else dict.fromkeys(ops))
    return prebuild.requests(names, wanted, named=not everything)


def _script_requests(
    script: str, arguments: tuple[str, ...], wanted: list[NamedTarget]
) -> Requests:
    from opkiln.store import publish

    output.say(f"running {script}; ops that are not built yet run as references")
    with publish.scratch("record") as stage:
        noted = os.path.join(stage, "ops.jsonl")
        prebuild.run_script(script, arguments, noted, **output.child_variables())
        if not os.path.exists(noted):
            output.say(f"{script} loaded no op")
            return Requests((), ())
        return prebuild.recorded_requests(noted, wanted, ran_here=True)


def wanted_targets(texts: tuple[str, ...]) -> list[NamedTarget]:
    """The targets that the options ``--target`` name. Raises UsageError."""
    try:
        return parse_all(texts)
    except UsageError as error:
        raise UsageError(f"--target: {error.what}", why=error.why, hint=error.hint) from None


def _show(
    outcomes: list[BuildOutcome], findings: tuple[tuple[str, Finding], ...], written: dict[str, str]
) -> None:
    rows = [("op", "for", "status", "seconds", "path")]
    for each in outcomes:
        if each.status in (BUILT, CACHED):
            made_for = each.target.replace(":", " ") or each.backend
            if each.archs:
                made_for = f"{each.backend} {';'.join(each.archs)}"
            rows.append((each.op, made_for, each.status, f"{each.seconds:.2f}", each.path))
    if len(rows) > 1:
        output.data(columns(rows))
    for each in outcomes:
        if each.status == SKIPPED:
            target = f" for {each.target}" if each.target else ""
            output.say(f"skipped {each.op}{target}: {' '.join(each.reason.split())}")
    for op, found in findings:
        tell = output.say_always if found.level == "error" else output.say
        tell(f"{found.level}: {op}: {found.what}" + (f" ({found.why})" if found.why else ""))
    for path, digest in written.items():
        output.data(f"wrote {path}" + (f" (SHA-256 {digest})" if digest else ""))
