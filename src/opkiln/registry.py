"""ALL_OPS: every op by name; the bundled ones, and those of other packages by entry point.

Bundled ops are the folders below ``opkiln/ops``: ``ops/<name>/op.py`` holds one OpBuilder subclass.
Another package adds ops with an entry point in the group ``opkiln.ops``:

    [project.entry-points."opkiln.ops"]
    my_op = "my_package.ops.my_op:MyOpBuilder"

Of two ops with one name the bundled one, else the first found, has it; ``DISTRIBUTION:OP`` is any
of them. Looking up a bundled op imports its module and nothing else; entry points are only read
when a name is not bundled, or when all are asked for (reading them takes longer than loading an
op).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib import import_module

from opkiln.builder.base import OpBuilder
from opkiln.errors import SpecError, UnknownOp

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from opkiln.loading.explain import Explanation

GROUP = "opkiln.ops"
_OPS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "ops")


def bundled() -> list[str]:
    """Names of the ops that opkiln ships."""
    return sorted(
        name for name in os.listdir(_OPS) if os.path.exists(os.path.join(_OPS, name, "op.py"))
    )


class _AllOps(Mapping[str, type[OpBuilder]]):
    """Read-only and lazy: a builder class is imported when it is asked for."""

    def __getitem__(self, name: str) -> type[OpBuilder]:
        owner, _, op = name.rpartition(":")
        own = owner in ("", "opkiln") and op.isidentifier()
        if own and os.path.exists(os.path.join(_OPS, op, "op.py")):
            return _only_builder(op)
        for entry in _entry_points():
            if entry.name == op and owner in ("", distribution(entry)):
                try:
                    found = entry.load()
                except (Exception, SystemExit) as error:
                    raise SpecError(
                        f"op {name}: {entry.value} cannot be imported",
                        why=f"{type(error).__name__}: {error}",
                        hint=f"python -c 'import {entry.module}'",
                    ) from error
                if not (isinstance(found, type) and issubclass(found, OpBuilder)):
                    raise SpecError(f"entry point {name} = {entry.value} is not an OpBuilder")
                return found
        raise UnknownOp(
            f"there is no op {name!r}", why="known: " + ", ".join(self), hint="opkiln report"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*bundled(), *(entry.name for entry in _entry_points())]))

    def __len__(self) -> int:
        return sum(1 for _ in self)


ALL_OPS: Mapping[str, type[OpBuilder]] = _AllOps()


def get_builder(name: str, *, backend: str | None = None, archs: str | None = None) -> OpBuilder:
    """A new builder for an op; for this machine, or for a backend and an arch list.

    Raises UnknownOp, and UsageError where the op has no version for the backend.
    """
    builder = ALL_OPS[name]()
    if backend is not None or archs is not None:
        # Not through the constructor: an author's may take no arguments.
        builder.ask_for(backend, archs)
    return builder


def explain(name: str) -> Explanation:
    """Why an op is served as it is, and what changed since it was last built. Raises UnknownOp."""
    from opkiln.loading import explain as explaining

    return explaining.explain(get_builder(name).op())


def _only_builder(name: str) -> type[OpBuilder]:
    module = import_module(f"opkiln.ops.{name}.op")
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, OpBuilder)
        and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise SpecError(f"opkiln/ops/{name}/op.py must hold one OpBuilder, not {len(found)}")
    return found[0]


def distribution(entry: EntryPoint) -> str:
    """The name of the package that declares an entry point, as it is installed."""
    return "" if entry.dist is None else entry.dist.name


def _entry_points() -> list[EntryPoint]:
    from importlib.metadata import entry_points

    return list(entry_points(group=GROUP))
