"""The three keys of an entry, and the key of one object.

- ``intent_key``: spec, target, ABI tag; needs no compiler.
- ``build_key``: the plan's steps and environment and the toolchain's identity.
- ``deps_key`` (made in ``store.deps``): the contents of every file the compiler read.
"""

from __future__ import annotations

from typing import Any

from opkiln.digest import key
from opkiln.model import PACKAGE, PLAN_VERSION, ROCM, Anchored, OpSpec, Plan, Step, Target

UNKEYED = ("root", "declared_by")  # fields of a spec that change nothing that is built


def intent_key(spec: OpSpec, target: Target) -> str:
    """What is wanted, in the words of its author and of the machine it is for."""
    return key("intent", intent_inputs(spec, target))


def intent_inputs(spec: OpSpec, target: Target) -> tuple[Any, ...]:
    return (declared(spec), tuple(target))


def spec_key(spec: OpSpec) -> str:
    """What an author declared, whatever it is built for."""
    return key("spec", declared(spec))


def declared(spec: OpSpec) -> tuple[Any, ...]:
    """A declaration as it is keyed: without where its package, or opkiln, is installed."""
    root, ours = spec.root.rstrip("/") + "/", PACKAGE + "/"

    def below(text: str) -> str:
        # Authors write absolute paths; below the root they mean "in my package", wherever it is.
        return text.replace(root, "{src}/").replace(ours, "{opkiln}/") if "/" in text else text

    return tuple(
        tuple(below(item) if isinstance(item, str) else item for item in value)
        if isinstance(value, tuple)
        else value
        for field, value in zip(spec._fields, spec, strict=True)
        if field not in UNKEYED
    )


def step_inputs(plan: Plan, step: Step) -> tuple[Any, ...]:
    """A step as it is keyed: without the paths of the compilers and their launcher.

    The toolchain's identity stands for the compilers, wherever they are installed; a launcher
    changes how fast a result comes, not what it is.
    """
    device = plan.toolchain.device
    tools = {plan.toolchain.cxx, plan.toolchain.launcher}
    if device is not None:
        tools |= {device.path, device.host}
    arguments = tuple(
        tuple(argument) if isinstance(argument, Anchored) else argument
        for argument in step.argv
        if argument not in tools
    )
    return (step.kind, step.output, arguments)


def build_key(plan: Plan) -> str:
    """How it is made."""
    steps = tuple(step_inputs(plan, step) for step in plan.steps)
    return key("build", (PLAN_VERSION, steps, plan.environment, _identity(plan)))


def _identity(plan: Plan) -> tuple[str, ...]:
    tools = plan.toolchain
    parts = [tools.identity]
    if tools.device is not None:
        parts.append(tools.device.identity)
    if plan.target.backend == ROCM and tools.torch is not None:
        from opkiln.toolchain import hipify

        parts.append(hipify.identity(tools.torch))  # what its sources are translated by
    return tuple(parts)


def step_key(plan: Plan, step: Step) -> str:
    """One object: shared by every op, target and build that compiles it the same way."""
    made = (PLAN_VERSION, step_inputs(plan, step), plan.environment, _identity(plan))
    # An inline source is no file, so it is in no list of dependencies: its text stands here.
    text = dict(plan.spec.inline).get(step.source)
    return key("step", (made, plan.target.abi_tag, text))
