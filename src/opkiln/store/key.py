"""The three keys of an entry, and the key of one object.

- ``intent_key``: spec, target and ABI tag. Computing it needs no compiler.
- ``build_key``: the plan's steps and environment, and the toolchain's identity.
- ``deps_key`` (see ``store.facts``): all that the steps read and looked up.
"""

from __future__ import annotations

from typing import Any

from opkiln.build_model import Plan, Step, Target
from opkiln.digest import key
from opkiln.model import PACKAGE, PLAN_VERSION, ROCM, OpSpec

# Fields of a spec that do not affect the build, or that another field says, too: an emulated op has
# the emulator's runtime among its sources.
UNKEYED = ("root", "declared_by", "schemas", "emulated")


def intent_key(spec: OpSpec, target: Target) -> str:
    """What to build: the author's declaration, and the target."""
    return key("intent", (declared(spec), tuple(target)))


def spec_key(spec: OpSpec) -> str:
    """The author's declaration, for any target."""
    return key("spec", declared(spec))


def declared(spec: OpSpec) -> tuple[Any, ...]:
    """A declaration as it enters the key."""
    return tuple(value for field, value in anchored(spec).items() if field not in UNKEYED)


def anchored(spec: OpSpec) -> dict[str, Any]:
    """The fields of a declaration, without the paths where its package and opkiln are installed."""
    root, ours = spec.root.rstrip("/") + "/", PACKAGE + "/"

    def below(text: str) -> str:
        # Authors write absolute paths. Below the root they mean "in my package", wherever that is
        # installed.
        return text.replace(root, "{src}/").replace(ours, "{opkiln}/") if "/" in text else text

    return {
        field: tuple(below(item) if isinstance(item, str) else item for item in value)
        if isinstance(value, tuple)
        else value
        for field, value in zip(spec._fields, spec, strict=True)
    }


def step_inputs(plan: Plan, step: Step) -> tuple[Any, ...]:
    """A step as it enters the key: without the paths of the compilers and their launcher.

    The toolchain's identity represents the compilers, wherever they are installed. A launcher only
    changes how fast the result comes.
    """
    device = plan.toolchain.device
    tools = {plan.toolchain.cxx, plan.toolchain.launcher}
    if device is not None:
        tools |= {device.path, device.host}
    arguments = tuple(argument for argument in step.argv if argument not in tools)
    return (step.kind, step.output, arguments)


def build_key(plan: Plan) -> str:
    """How to build it: the steps, their environment and the toolchain."""
    steps = tuple(step_inputs(plan, step) for step in plan.steps)
    return key("build", (PLAN_VERSION, steps, plan.environment, _identity(plan)))


def _identity(plan: Plan) -> tuple[str, ...]:
    tools = plan.toolchain
    parts = [tools.identity]
    if tools.device is not None:
        parts.append(tools.device.identity)
    if plan.target.backend == ROCM and tools.torch is not None:
        from opkiln.toolchain import hipify

        parts.append(hipify.identity(tools.torch))  # the translator of the sources
    return tuple(parts)


def step_key(plan: Plan, step: Step) -> str:
    """The key of one object. Every op, target and build that compiles it the same way shares it."""
    made = (PLAN_VERSION, step_inputs(plan, step), plan.environment, _identity(plan))
    # An inline source is not a file, so it is not in the dependencies. Its text is in the key.
    text = dict(plan.spec.inline).get(step.source)
    return key("step", (made, plan.target.abi_tag, text))
