"""``opkiln explain``, ``plan`` and ``check``: how ops would be loaded and built."""

from __future__ import annotations

import os
import shlex
import time
from typing import Any

import click

from opkiln.base.build_model import Plan, Step
from opkiln.cli import options, output
from opkiln.errors import UnknownOp, UsageError
from opkiln.report.layout import age, columns, fields

Commands = list[tuple[Step, tuple[str, ...]]]  # each step of a plan, and its argv


@click.command("explain", short_help="Show how an op would be loaded, and why.")
@options.op_argument
@options.target_option()
@options.json_option
def explain_command(op: str, target: str | None, as_json: bool) -> None:
    """Show how OP would be loaded: each candidate, and why it is taken or refused.

    If the newest entry can no longer be used, also show what changed since it was built. An op with
    variants is explained variant by variant.

    OP may also be a module, a source or an output that another program built with the store.
    """
    from opkiln.builder.registry import ALL_OPS, libraries
    from opkiln.loading.explain import explain

    found = []
    if op not in ALL_OPS and (lines := _explain_others(op)):
        output.answer(as_json, {"name": op, "entries": lines}, "\n".join(lines))
        return
    for name, _ in libraries(op, ALL_OPS[op]):
        with options.builder_for(name, target) as builder:
            found.append(explain(builder.op()))
    whole = found[0]._asdict() if found[0].op == op else {"op": op, "variants": found}
    output.answer(as_json, whole, "\n".join(map(str, found)))


def _explain_others(name: str) -> list[str]:
    from opkiln.building import kept
    from opkiln.store.layers import Store

    lines = []
    for each, more, changes in kept.compare(Store(), name):
        when = age(time.time() - each.published)
        lines.append(f"{more.source} of {more.host} {more.group}, kept {when} ago")
        lines.append(f"  made in {dict(more.places).get('dir', 'an unknown directory')}")
        lines += [f"  made again because {more.rebuilt}"] if more.rebuilt else []
        now = f"would be made again: {'; '.join(changes)}" if changes else "serves as it is"
        lines.append(f"  {now}")
    return lines


@click.command("plan", short_help="Print the commands that build an op.")
@options.op_argument
@options.json_option
@click.option("--compile-commands", is_flag=True, help="Print a compile_commands.json.")
@click.option(
    "--stage", default="./build", metavar="DIR", show_default=True,
    help="The directory that the commands write to. A build uses a private temporary one.",
)  # fmt: skip
@options.target_option()
def plan_command(
    op: str, as_json: bool, compile_commands: bool, stage: str, target: str | None
) -> None:
    """Print the commands that build OP here, as a script that can be run by hand.

    The plan is the same whether the op is cached or not, and running it by hand gives the same
    bytes. Nothing is built.
    """
    from opkiln.building.asking import plan_here
    from opkiln.decision.terms import BUILD, Request
    from opkiln.plan.plan import anchors, command

    if as_json and compile_commands:
        raise click.UsageError("--json and --compile-commands exclude each other")
    with options.builder_for(op, target) as builder:
        plan = plan_here(Request(builder.op(), BUILD))
    places = anchors(plan, stage)
    commands = [(step, command(step, places).argv) for step in plan.steps]
    if as_json:
        output.data_json(_plan_document(plan, stage, commands))
    elif compile_commands:
        rows = [
            {
                "directory": os.getcwd(),
                "file": os.path.join(plan.spec.root, step.source),
                "output": os.path.join(stage, step.output),
                "arguments": words,
            }
            for step, words in commands
            if step.kind == "compile"
        ]
        output.data_json(rows)
    else:
        output.data(_script(plan, stage, commands))


def _script(plan: Plan, stage: str, commands: Commands) -> str:
    from opkiln.machine.toolchain import choice

    target, tools = plan.target, plan.toolchain
    cpu = "+".join((target.cpu, *target.cpu_features))
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
        *(" ".join([*environment, shlex.join(words)]) for _, words in commands),
    ]
    return "\n".join(lines)


def _plan_document(plan: Plan, stage: str, commands: Commands) -> dict[str, Any]:
    environment = dict(plan.environment)
    return {
        "op": plan.spec.name,
        "target": plan.target,
        "toolchain": fields(plan.toolchain, "family cxx version machine identity launcher torch"),
        "stage": stage,
        "steps": [
            {
                "kind": step.kind,
                "source": step.source,
                "output": os.path.join(stage, step.output),
                "argv": words,
                "env": environment,
            }
            for step, words in commands
        ],
        "environment": environment,
        "output": os.path.join(stage, plan.output),
    }


@click.command("check", short_help="Exit with 1 unless every op is cached.")
@click.argument("ops", nargs=-1, shell_complete=options.complete_op, metavar="OPS|FILE…")
@options.package_option
@options.json_option
def check_command(ops: tuple[str, ...], package: str | None, as_json: bool) -> int:
    """Show whether each of OPS is cached here; exit with 1 unless all are.

    Of an op with variants, each is shown. An op that is not cached would compile, fall back to its
    reference, or fail. An argument that is not an op is a file with one op per line; # starts a
    comment. Nothing is built. Use it as the last step of an image build, or before a job.
    """
    from opkiln.builder.registry import get_builder, ops_of
    from opkiln.decision.terms import CACHED, WOULD_COMPILE, Request, summary
    from opkiln.loading.explain import look_at

    if bool(ops) == (package is not None):
        raise click.UsageError("give names of ops or files that list them, or --package")
    if package is not None:
        ops = tuple(ops_of(package))
    checked = {name: summary(look_at(Request(get_builder(name).op()))) for name in _op_names(ops)}
    cold = [name for name, each in checked.items() if each.status == WOULD_COMPILE]
    document = [{"op": name, **each._asdict()} for name, each in checked.items()]
    rows = [(name, each.status, each.reason or each.path) for name, each in checked.items()]
    hint = f"hint: opkiln build {' '.join(cold)}" if cold else ""
    output.answer(as_json, {"ops": document, "would_compile": cold}, columns(rows), hint)
    return 0 if all(each.status == CACHED for each in checked.values()) else output.FOUND


def _op_names(arguments: tuple[str, ...]) -> list[str]:
    """The ops that the arguments name, each once. Raises UsageError."""
    from opkiln.builder.registry import ALL_OPS, libraries

    names: list[str] = []
    for argument in arguments:
        try:
            builder = ALL_OPS[argument]
        except UnknownOp as error:
            if not os.path.exists(argument):
                raise UsageError(
                    f"{argument!r} is neither an op nor a file", why=error.why, hint=error.hint
                ) from None
            names += _read_list(argument)
        else:
            names += [name for name, _ in libraries(argument, builder)]
    return list(dict.fromkeys(names))


def _read_list(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.partition("#")[0].strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as a list of ops", why=str(error)) from None
    return [line for line in lines if line]
