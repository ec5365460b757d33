"""What is wanted of an op, and what serves it: short forms for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opkiln.building.asking import plan_here
from opkiln.decision.terms import BUILD, SHIP, Request
from opkiln.loading import loader

if TYPE_CHECKING:
    from opkiln.base.build_model import Target, Toolchain
    from opkiln.base.model import Artifact, Op
    from opkiln.decision.terms import Trace


def artifact(op: Op, *, elsewhere: bool = False) -> Artifact:
    """The op's artifact, found or built."""
    return traced(op, elsewhere=elsewhere)[0]


def traced(op: Op, *, elsewhere: bool = False) -> tuple[Artifact, Trace]:
    """As ``artifact``, with the trace."""
    return loader.obtain(Request(op, SHIP if elsewhere else BUILD))


def target_of(op: Op) -> Target:
    """What the op would be built for."""
    return Request(op, BUILD).target


def chosen(op: Op) -> tuple[Target, Toolchain]:
    """The target and the compilers of a build here."""
    plan = plan_here(Request(op, BUILD))
    return plan.target, plan.toolchain
