"""ALL_OPS: every op by name; the bundled ones, and those of other packages by entry point.

Bundled ops are the folders below ``opkiln/ops``: ``ops/<name>/op.py`` holds one OpBuilder subclass,
or one ``opkiln.library``.
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
from opkiln.loading.register import is_tracing, load_in_trace
from opkiln.machine import packages

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.metadata import EntryPoint

    from opkiln.loading.explain import Explanation, Explanations

GROUP = "opkiln.ops"
_OPS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "ops")


def bundled_ops() -> list[str]:
    """Names of the ops that opkiln ships."""
    return sorted(filter(_is_bundled, os.listdir(_OPS)))


def _is_bundled(name: str) -> bool:
    return os.path.exists(os.path.join(_OPS, name, "op.py"))


def _ops_of_variant(name: str) -> list[str]:
    """The ops whose variant may be called so: ``attn__HEAD_64`` is one of ``attn``."""
    parts = name.split("__")
    return ["__".join(parts[:end]) for end in range(1, len(parts))]


def _variant(name: str, ops: Iterable[type[OpBuilder]]) -> type[OpBuilder] | None:
    """The builder of a variant of one of these ops, by its name."""
    return next((each for op in ops for each in op.variants() if name == each.NAME), None)


class _AllOps(Mapping[str, type[OpBuilder]]):
    """Read-only and lazy: a builder class is imported when it is asked for."""

    def __getitem__(self, name: str) -> type[OpBuilder]:
        owner, _, op = name.rpartition(":")
        own = op.isidentifier() and (not owner or normalize(owner) == "opkiln")
        if own and _is_bundled(op):
            return _only_builder(op)
        from opkiln.builder import deepspeed_names  # most names are of bundled ops

        if own and op in deepspeed_names.ELSEWHERE:
            return _only_builder(deepspeed_names.ELSEWHERE[op])
        above = _ops_of_variant(op)
        if own and (variant := _variant(op, map(_only_builder, filter(_is_bundled, above)))):
            return variant
        entry = _find(owner, op)
        if entry is not None:
            return builder_of(name, entry)
        entries = ((each, _find(owner, each)) for each in above)
        builders = (builder_of(each, entry) for each, entry in entries if entry is not None)
        if variant := _variant(op, builders):
            return variant
        known = list(self)
        if op in deepspeed_names.NOT_HERE:
            raise UnknownOp(
                f"DeepSpeed's op {op} is not here", why=deepspeed_names.NOT_HERE[op],
                hint="opkiln report",
            )  # fmt: skip
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
    if is_tracing():
        return _InTrace(name, backend, archs)  # type: ignore[return-value]
    builder = ALL_OPS[name]()
    if backend is not None or archs is not None:
        # Not through the constructor: an author's may take no arguments.
        builder.ask_for(backend, archs)
    return builder


class _InTrace:
    """Stands for a builder in a function that is traced: finding one cannot be."""

    def __init__(self, name: str, backend: str | None, archs: str | None) -> None:
        self._asked = (name, backend, archs)

    def load(self, verbose: bool = True, *, reload: bool = False) -> Any:
        return load_in_trace(_load, *self._asked, {"verbose": verbose, "reload": reload})

    def jit_load(self, verbose: bool = True) -> Any:
        return load_in_trace(_load, *self._asked, {"verbose": verbose, "must_be_native": True})


def _load(name: str, backend: str | None, archs: str | None, how: dict[str, Any]) -> Any:
    return get_builder(name, backend=backend, archs=archs).loaded(**how).value


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


def _only_builder(name: str) -> type[OpBuilder]:
    module = import_module(f"opkiln.ops.{name}.op")
    # A class may be there twice: by itself, and as the builder of its library.
    builders = dict.fromkeys(filter(None, map(as_builder, vars(module).values())))
    found = [builder for builder in builders if builder.__module__ == module.__name__]
    parts = [part for builder in found for part in builder.PARTS]
    found = [builder for builder in found if builder not in parts]
    if len(found) != 1:
        raise SpecError(f"opkiln/ops/{name}/op.py must hold one OpBuilder, not {len(found)}")
    return found[0]


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

    from opkiln.builder.library import Library

    if entry.attr:
        return [entry]
    try:
        module = entry.load()
    except (Exception, SystemExit):
        return [entry]
    # A function has the name of its op. A library has a name of its own, and its functions and
    # parts have none.
    libraries = [value for value in vars(module).values() if isinstance(value, Library)]
    parts = [part for each in libraries for part in each.builder.PARTS]
    named = {
        value.builder.NAME: variable
        for variable, value in vars(module).items()
        if (isinstance(value, Library) and value.builder not in parts)
        or getattr(getattr(value, "builder", None), "NAME", "") == variable
    }
    made = [EntryPoint(op, f"{entry.module}:{name}", entry.group) for op, name in named.items()]
    for each in made:
        vars(each)["dist"] = entry.dist  # as importlib.metadata does
    return made or [entry]
