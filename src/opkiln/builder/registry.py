"""ALL_OPS: every op by name; the bundled ones, and those of other packages by entry point.

Bundled ops are the folders below ``opkiln/ops``: ``ops/<name>/op.py`` has the library,
``kit``.
Another package adds ops with an entry point in the group ``opkiln.ops``:

    [project.entry-points."opkiln.ops"]
    my_package = "my_package.ops"             # a module: all ops that @opkiln.op declares in it
    my_op = "my_package.other:MyOpBuilder"    # one builder, or one decorated function

Of several ops with one name, the bundled one or else the first found goes by that name, and the
others by ``DISTRIBUTION:OP``. Every op can be asked for as ``DISTRIBUTION:OP``, where DISTRIBUTION
is what was installed, in any spelling that an installer takes, or the package that is imported.

An op with variants is listed once. Each variant can be asked for by the name of its library,
``attn__HEAD_64``, and ``libraries`` gives all of them.

Looking up a bundled op imports its module and nothing else; entry points are only read when a name
is not bundled, or when all are asked for (reading them takes longer than loading an op).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from opkiln.builder.base import OpBuilder
from opkiln.errors import SpecError, UnknownOp
from opkiln.loading.register import at_trace_time
from opkiln.machine import packages

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from opkiln.loading.explain import Explanation, Explanations

GROUP = "opkiln.ops"
_OPS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "ops")


def bundled_ops() -> list[str]:
    """Names of the ops that opkiln ships."""
    return sorted(filter(_is_bundled, os.listdir(_OPS)))


def _is_bundled(name: str) -> bool:
    return os.path.exists(os.path.join(_OPS, name, "op.py"))


class _AllOps(Mapping[str, type[OpBuilder]]):
    """Read-only and lazy: a builder class is imported when it is asked for."""

    def __getitem__(self, name: str) -> type[OpBuilder]:
        owner, _, op = name.rpartition(":")
        if (found := _whole_op(owner, op)) is not None:
            return found
        # ``attn__HEAD_64`` is a variant of ``attn``.
        parts = op.split("__")
        above = (_whole_op(owner, "__".join(parts[:end])) for end in range(1, len(parts)))
        variants = (each for builder in above if builder is not None for each in builder.variants())
        if found := next((each for each in variants if op == each.NAME), None):
            return found
        from opkiln.builder import deepspeed_names

        if op in deepspeed_names.NOT_HERE:
            raise UnknownOp(
                f"DeepSpeed's op {op} is not here", why=deepspeed_names.NOT_HERE[op],
                hint="opkiln report",
            )  # fmt: skip
        known = list(self)
        raise UnknownOp(
            f"there is no op {name!r}", why="known: " + ", ".join(known), hint=_meant(op, known)
        )

    def __iter__(self) -> Iterator[str]:
        return iter([*bundled_ops(), *declared_ops()])

    def __len__(self) -> int:
        return sum(1 for _ in self)


# Every op by name, bundled or of an installed package: the builder class, imported when it is asked
# for. Raises UnknownOp, which is a KeyError.
ALL_OPS: Mapping[str, type[OpBuilder]] = _AllOps()


def get_builder(name: str, *, backend: str | None = None, archs: str | None = None) -> OpBuilder:
    """A new builder for an op; for this machine, or for a backend and an arch list.

    In a function that torch.compile traces it can be asked to load the op, and for nothing else.
    Raises UnknownOp, and UsageError where the op has no version for the backend.
    """
    builder = _find_builder(name)()
    if backend is not None or archs is not None:
        # Not through the constructor: an author's may take no arguments.
        builder.ask_for(backend, archs)
    return builder


@at_trace_time
def _find_builder(name: str) -> type[OpBuilder]:
    return ALL_OPS[name]


def explain(name: str) -> Explanation | Explanations:
    """Why an op, or each of its variants, is served as it is, and what changed since it was last
    built. Raises UnknownOp."""
    from opkiln.loading import explain as explaining

    builder = ALL_OPS[name]
    if not builder.variants():
        return explaining.explain(get_builder(name).op())
    found = (explaining.explain(each().op()) for each in builder.variants())
    return explaining.Explanations(builder.NAME, tuple(found))


def libraries(
    name: str, builder: type[OpBuilder], *, ahead: bool = False
) -> list[tuple[str, type[OpBuilder]]]:
    """(name, builder) of every library of an op: one, or one for each of its variants; if
    ``ahead``, for those that are built before a call needs them. ``name`` is what the op is asked
    for as."""
    owner, colon, _ = name.rpartition(":")
    found = builder.ahead() if ahead else builder.variants()
    return [(f"{owner}{colon}{each.NAME}", each) for each in found] or [(name, builder)]


def builder_of(name: str, entry: EntryPoint) -> type[OpBuilder]:
    """The builder that an entry point names, itself or by a decorated function.

    Raises SpecError.
    """
    try:
        found = entry.load()
    except (Exception, SystemExit) as error:
        raise SpecError(
            f"op {name}: {entry.value} cannot be imported",
            why=f"{type(error).__name__}: {error}",
            hint=f"python -c 'import {entry.module}'",
        ) from error
    builder = as_builder(found)
    if builder is None:
        raise SpecError(
            f"entry point {name} = {entry.value} is not an OpBuilder",
            why="it is not a function that @opkiln.op decorates either, nor a module with "
            "such functions",
        )
    return builder


def as_builder(value: Any) -> type[OpBuilder] | None:
    """The builder class that a value is, or that is under a decorated function or a library."""
    builder = value if isinstance(value, type) else getattr(value, "builder", None)
    return builder if isinstance(builder, type) and issubclass(builder, OpBuilder) else None


def _meant(name: str, known: list[str]) -> str:
    """The hint for a name that no op has: those that are spelled much like it."""
    from difflib import get_close_matches

    close = get_close_matches(name.lower().replace("-", "_"), known, n=3)
    if not close:
        return "opkiln report"
    return f"did you mean {' or '.join(close)}?"


def _whole_op(owner: str, op: str) -> type[OpBuilder] | None:
    """The builder of an op: bundled, or of an entry point. None if there is none, or if the op is
    one variant of another."""
    own = op.isidentifier() and (not owner or normalize(owner) == "opkiln")
    if own and _is_bundled(op):
        builder: type[OpBuilder] = import_module(f"opkiln.ops.{op}.op").kit.builder
        return builder
    from opkiln.builder import deepspeed_names  # most names are of bundled ops

    if own and op in deepspeed_names.ELSEWHERE:
        return _whole_op(owner, deepspeed_names.ELSEWHERE[op])
    entry = _find(owner, op)
    return None if entry is None else builder_of(op, entry)


def declared_ops() -> dict[str, EntryPoint]:
    """The ops of other packages, by the names under which ``ALL_OPS`` lists them."""
    taken = set(bundled_ops())
    found: dict[str, EntryPoint] = {}
    for entry in _entry_points(expanded=True):
        name = f"{distribution(entry)}:{entry.name}" if entry.name in taken else entry.name
        taken.add(entry.name)
        found.setdefault(name, entry)
    return found


def ops_of(package: str) -> list[str]:
    """The names in ``ALL_OPS`` of a package's ops. ``package`` is what was installed, or what is
    imported. Raises UnknownOp if it has none."""
    wanted = normalize(package)
    if wanted == "opkiln":
        return bundled_ops()
    entries = declared_ops()
    found = [name for name, entry in entries.items() if wanted in _owners(entry)]
    if not found:
        owners = sorted({distribution(entry) for entry in entries.values()} | {"opkiln"})
        raise UnknownOp(
            f"there is no package {package!r} with ops",
            why="packages with ops: " + ", ".join(owners),
            hint=f"pip install {package}",
        )
    return found


def _owners(entry: EntryPoint) -> tuple[str, str]:
    """The names of the package of an entry point: as it is installed, and as it is imported."""
    return normalize(distribution(entry)), normalize(entry.module.partition(".")[0])


def listed_as(op: str) -> list[str]:
    """The names in ``ALL_OPS`` of all the ops called ``op``, each of another package."""
    return [name for name in ALL_OPS if name.rpartition(":")[2] == op]


def normalize(distribution: str) -> str:
    """A distribution's name in the one spelling that all others stand for (PEP 503)."""
    parts = distribution.lower().replace("_", "-").replace(".", "-").split("-")
    return "-".join(part for part in parts if part)


def _find(owner: str, op: str) -> EntryPoint | None:
    """The entry point of ``op``: the first, or that of the owner."""
    named = [entry for entry in _entry_points() if entry.name == op and entry.attr]
    named = named or [entry for entry in _entry_points(expanded=True) if entry.name == op]
    if owner:
        # As it is installed goes before as it is imported, which the store and records have.
        wanted = normalize(owner)
        named = [entry for entry in named if wanted in _owners(entry)]
        named.sort(key=lambda entry: _owners(entry).index(wanted))
    return named[0] if named else None


def distribution(entry: EntryPoint) -> str:
    """The name of the package that declares an entry point, as it is installed."""
    return "" if entry.dist is None else entry.dist.name


def _entry_points(*, expanded: bool = False) -> list[EntryPoint]:
    """The entry points of the group; if ``expanded``, with one for each op of a module."""
    found = packages.entry_points(GROUP)
    return [each for entry in found for each in _entries_of_module(entry)] if expanded else found


def _entries_of_module(entry: EntryPoint) -> list[EntryPoint]:
    """An entry point for each decorated function and each ``opkiln.library`` of a module; the entry
    point itself for another, and for a module that cannot be imported: whoever asks is told."""
    from importlib.metadata import EntryPoint

    if entry.attr:
        return [entry]
    try:
        module = entry.load()
    except (Exception, SystemExit):
        return [entry]
    values = {name: each for name, each in vars(module).items() if not isinstance(each, type)}
    builders = {name: found for name, each in values.items() if (found := as_builder(each))}
    parts = [part for each in builders.values() for part in each.PARTS]
    named = {each.NAME: name for name, each in builders.items() if each not in parts}
    made = [EntryPoint(op, f"{entry.module}:{name}", entry.group) for op, name in named.items()]
    for each in made:
        vars(each)["dist"] = entry.dist  # as importlib.metadata does
    return made or [entry]
