"""``opkiln explain``, ``plan`` and ``check``: how ops would be loaded and built."""

from __future__ import annotations

import os
import shlex
from typing import Any, NamedTuple

import click

from opkiln.cli import output
from opkiln.cli.arguments import (
    builder_for,
    complete_op,
    json_option,
    package_option,
    target_option,
)
from opkiln.errors import UnknownOp, UsageError
from opkiln.report.layout import columns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.build_model import Plan


# opkiln explain


@click.command("explain", short_help="Show how an op would be loaded, and why.")
@click.argument("op", shell_complete=complete_op)
@target_option()
@json_option
def explain_command(op: str, target: str | None, as_json: bool) -> None:
    """Show how OP would be loaded: each candidate, and why it is taken or refused.

    If the newest entry can no longer be used, also show what changed since it was built. An op with
    variants is explained variant by variant.
    """
    from opkiln.loading.explain import explain
    from opkiln.registry import ALL_OPS, libraries

    found = []
    for name, _ in libraries(op, ALL_OPS[op]):
        with builder_for(name, target) as builder:
            found.append(explain(builder.op()))
    if not as_json:
        output.data("\n".join(map(str, found)))
        return
    documents: list[dict[str, Any]] = [
        {**each._asdict(), "candidates": [one._asdict() for one in each.candidates]}
        for each in found
    ]
    whole = documents[0] if found[0].op == op else {"op": op, "variants": documents}
    output.data_json({"schema": 1, **whole})


# opkiln plan


@click.command("plan", short_help="Print the commands that build an op.")
@click.argument("op", shell_complete=complete_op)
@json_option
@click.option("--compile-commands", is_flag=True, help="Print a compile_commands.json.")
@click.option(
    "--stage", default="./build", metavar="DIR", show_default=True,
    help="The directory that the commands write to. A build uses a private temporary one.",
)  # fmt: skip
@target_option()
def plan_command(
    op: str, as_json: bool, compile_commands: bool, stage: str, target: str | None
) -> None:
    """Print the commands that build OP here, as a script that can be run by hand.

    The plan is the same whether the op is cached or not, and running it by hand gives the same
    bytes. Nothing is built.
    """
    from opkiln.building.asking import planned
    from opkiln.decision.terms import BUILD, Request

    if as_json and compile_commands:
        raise click.UsageError("--json and --compile-commands exclude each other")
    with builder_for(op, target) as builder:
        plan = planned(Request(builder.op(), BUILD))
    if as_json:
        output.data_json(_as_json(plan, stage))
    elif compile_commands:
        output.data_json(_compile_commands(plan, stage))
    else:
        output.data(_script(plan, stage))


def _script(plan: Plan, stage: str) -> str:
    from opkiln.plan import anchors, argv
    from opkiln.toolchain import choice

    target, tools = plan.target, plan.toolchain
    cpu = "+".join((target.cpu, *target.cpu_features))
    places = anchors(plan, stage)
    environment = [f"{name}={shlex.quote(value)}" for name, value in plan.environment]
    device = f", {target.backend} {';'.join(target.archs)}" if target.archs else ""
    by = f"# by {tools.version}"
    if tools.device is not None:
        told = choice.reason(tools, plan.spec)
        by += f" and {told or f'{tools.device.family} {tools.device.version}'}"
    lines = [
        f"# {plan.spec.name} for {target.system} {target.machine}, {cpu}{device}, {target.abi_tag}",
        by,
        f"mkdir -p {shlex.quote(stage)}",
    ]
    for step in plan.steps:
        lines.append(" ".join([*environment, shlex.join(argv(step, places))]))
    return "\n".join(lines)


def _as_json(plan: Plan, stage: str) -> dict[str, Any]:
    from opkiln.plan import anchors, argv

    tools = plan.toolchain
    places = anchors(plan, stage)
    environment = dict(plan.environment)
    return {
        "schema": 1,
        "op": plan.spec.name,
        "target": plan.target._asdict(),
        "toolchain": {
            "family": tools.family,
            "cxx": tools.cxx,
            "version": tools.version,
            "machine": tools.machine,
            "identity": tools.identity,
            "launcher": tools.launcher,
            "torch": None if tools.torch is None else tools.torch._asdict(),
        },
        "stage": stage,
        "steps": [
            {
                "kind": step.kind,
                "source": step.source,
                "output": os.path.join(stage, step.output),
                "argv": list(argv(step, places)),
                "env": environment,
            }
            for step in plan.steps
        ],
        "environment": environment,
        "output": os.path.join(stage, plan.output),
    }


def _compile_commands(plan: Plan, stage: str) -> list[dict[str, Any]]:
    from opkiln.plan import anchors, argv

    places = anchors(plan, stage)
    return [
        {
            "directory": os.getcwd(),
            "file": os.path.join(plan.spec.root, step.source),
            "output": os.path.join(stage, step.output),
            "arguments": list(argv(step, places)),
        }
        for step in plan.steps
        if step.kind == "compile"
    ]


# opkiln check


class Checked(NamedTuple):
    """The state of one op."""

    op: str
    status: str
    reason: str
    path: str


@click.command("check", short_help="Exit with 1 unless every op is cached.")
@click.argument("ops", nargs=-1, shell_complete=complete_op, metavar="OPS|FILE…")
@package_option
@json_option
def check_command(ops: tuple[str, ...], package: str | None, as_json: bool) -> int:
    """Show whether each of OPS is cached here; exit with 1 unless all are.

    Of an op with variants, each is shown. An op that is not cached would compile, fall back to its
    reference, or fail. An argument that is not an op is a file with one op per line; # starts a
    comment. Nothing is built. Use it as the last step of an image build, or before a job.
    """
    from opkiln.decision.terms import CACHED, WOULD_COMPILE
    from opkiln.registry import ops_of

    if bool(ops) == (package is not None):
        raise click.UsageError("give names of ops or files that list them, or --package")
    if package is not None:
        ops = tuple(ops_of(package))
    checked = [_check(name) for name in _named(ops)]
    missing = [each for each in checked if each.status != CACHED]
    cold = [each for each in missing if each.status == WOULD_COMPILE]
    if as_json:
        rows = [each._asdict() for each in checked]
        output.data_json({"schema": 1, "ops": rows, "would_compile": [each.op for each in cold]})
    else:
        output.data(columns((each.op, each.status, each.reason or each.path) for each in checked))
        if cold:
            output.say("hint: opkiln build " + " ".join(each.op for each in cold))
    return output.FOUND if missing else 0


def _named(arguments: tuple[str, ...]) -> list[str]:
    """The ops that the arguments name, each once. Raises UsageError."""
    from opkiln.registry import ALL_OPS, libraries

    names: list[str] = []
    for argument in arguments:
        try:
            builder = ALL_OPS[argument]
        except UnknownOp as error:
            if not os.path.exists(argument):
                raise UsageError(
                    f"{argument!r} is neither an op nor a file", why=error.why, hint=error.hint
                ) from None
            names += _listed(argument)
        else:
            names += [name for name, _ in libraries(argument, builder)]
    return list(dict.fromkeys(names))


def _listed(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.partition("#")[0].strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as a list of ops", why=str(error)) from None
    return [line for line in lines if line]


def _check(name: str) -> Checked:
    from opkiln.decision.terms import Request, summary
    from opkiln.loading.explain import looked
    from opkiln.registry import get_builder

    return Checked(name, *summary(looked(Request(get_builder(name).op()))))
