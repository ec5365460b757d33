"""``opkiln plan OP``: the exact commands that would build an op."""

from __future__ import annotations

import os
import shlex
from typing import Any

import click

from opkiln.cli import output, targets
from opkiln.cli.op_name import complete

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.model import Plan


@click.command("plan", short_help="Print the commands that build an op.")
@click.argument("op", shell_complete=complete)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--compile-commands", is_flag=True, help="Print a compile_commands.json.")
@click.option(
    "--stage", default="./build", metavar="DIR", show_default=True,
    help="The directory that the commands write to. A build uses a private temporary one.",
)  # fmt: skip
@targets.option()
def command(op: str, as_json: bool, compile_commands: bool, stage: str, target: str | None) -> None:
    """Print the commands that build OP here, as a script that may be run by hand.

    The plan is the same whether the op is cached or not, and a build by hand gives the same bytes.
    Nothing is built.
    """
    from opkiln.decision.decide import planned
    from opkiln.decision.terms import BUILD, Request

    if as_json and compile_commands:
        raise click.UsageError("--json and --compile-commands exclude each other")
    with targets.builder_for(op, target) as builder:
        plan = planned(Request(builder.op(), BUILD))
    if as_json:
        output.data_json(_as_json(plan, stage))
    elif compile_commands:
        output.data_json(_compile_commands(plan, stage))
    else:
        output.data(_script(plan, stage))


def _script(plan: Plan, stage: str) -> str:
    from opkiln.plan import anchors, argv

    target, tools = plan.target, plan.toolchain
    cpu = "+".join((target.cpu, *target.cpu_features))
    places = anchors(plan, stage)
    environment = [f"{name}={shlex.quote(value)}" for name, value in plan.environment]
    device = f", {target.backend} {';'.join(target.archs)}" if target.archs else ""
    by = f"# by {tools.version}"
    if tools.device is not None:
        by += f" and {tools.device.family} {tools.device.version}"
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
