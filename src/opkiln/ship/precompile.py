"""Precompiles a package's ops into the package. Every build backend calls this.

It selects ops by the variables, builds them in one parallel graph in the user's store, audits them,
and writes the layer ``<package>/prebuilt``, where the loader of the installed package looks.
"""

from __future__ import annotations

import copy
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from typing import NamedTuple

from opkiln import errors
from opkiln.builder import registry
from opkiln.builder.base import OpBuilder
from opkiln.machine.toolchain import torch_sdk
from opkiln.settings import LAYOUT, override, settings
from opkiln.ship import audit, prebuild, selection
from opkiln.ship.prebuild import BuildOutcome, BuildRequest
from opkiln.ship.selection import DeclaredOp, NamedTarget, OpChoice
from opkiln.store import layer

PURE = "py3-none-any"
_NO_ISOLATION = "pip install --no-build-isolation ."


class Shipment(NamedTuple):
    """The result of precompiling a package's ops."""

    outcomes: tuple[BuildOutcome, ...]
    tag: str  # of the wheel: ``py3-none-any`` if nothing in it was compiled
    report: str  # for people: what was built for what, and what was skipped and why


def precompile(
    package: str,
    ops: Sequence[DeclaredOp],
    where: str,
    out: str | None,
    extensions: Sequence[OpBuilder] = (),
) -> Shipment:
    """Precompile the ops that the variables select into the layer ``out``.

    ``where`` is the directory that the package is imported from: its source tree. A layer at
    ``out`` from an earlier build is always removed. Without ``out`` (an editable install) the ops
    are built for this machine, in the user's store. ``extensions`` are builders that the package's
    author asks for; the variables do not affect them.

    Raises BuildError if an op does not compile, if a named one cannot be built here, or if one does
    not match its tag; SettingError, OSError.
    """
    if out is not None and os.path.lexists(out):
        shutil.rmtree(out)
    chosen = [each for each in selection.choose(ops) if each.wanted]
    notes = [f"{name}: {package} has no such op" for name in selection.unknown_variables(ops)]
    if not chosen and not extensions:
        return Shipment((), PURE, _report(package, (), "", notes))
    tag = PURE
    with _use_environments_torch(), _import_from_sources(where, package):
        asked, origins = _collect_requests(chosen, extensions, here=out is None)
        unnamed = {name for name, each in origins.items() if not each.named}
        outcomes = [
            _skip_unsupported(each) if each.op in unnamed else each
            for each in (*asked.refused, *prebuild.prebuild(asked.requests))
        ]
        _require_built(package, origins, outcomes)
        payloads = sorted({each.path for each in outcomes if each.path})
        if out is not None and payloads:
            layer.export(payloads, out)
            for entry in layer.entries(out):
                audit.require(entry.payload, entry.manifest, audit.torch_library())
            tag = tag_of(out)
        if torch_sdk.locate() is None and any(each.reason for each in outcomes):
            notes.append(f"torch was not found by this build. hint: {_NO_ISOLATION}")
    to = f"precompiled, wheel tag {tag}" if out is not None else "built for this machine"
    return Shipment(tuple(outcomes), tag, _report(package, outcomes, to, notes))


# A compiler or a device is missing. Anything else is a mistake in the op, which a wheel without it
# would hide.
_NOT_HERE = (errors.ToolchainError, errors.LoadError, errors.UnknownBackend, errors.ArchError)


def _skip_unsupported(outcome: BuildOutcome) -> BuildOutcome:
    """The outcome of an op that nobody named: skipped if it cannot be built here."""
    error = outcome.error
    if not isinstance(error, _NOT_HERE):
        return outcome
    reason = " ".join(f"{error.what}: {error.why}".split()).rstrip(": ")
    return outcome._replace(status=prebuild.SKIPPED, reason=reason, error=None)


def tag_of(directory: str) -> str:
    """The tag of a wheel with the layer in this directory; ``py3-none-any`` if there is none.

    Raises StoreError for a layer that is damaged, UsageError for one of two machines.
    """
    has_layer = os.path.isdir(os.path.join(directory, LAYOUT))
    return audit.tag_for(layer.entries(directory)) if has_layer else PURE


def list_unshipped_sources(directory: str, package: str) -> list[str]:
    """The sources of a layer's ops that are not in ``package``, the directory to be shipped.

    The loader refuses an op if only some of its sources are there: it looks changed. A package
    without any sources is fine, so nothing is listed for it.
    """
    if not os.path.isdir(os.path.join(directory, LAYOUT)):
        return []
    files = {
        path
        for entry in layer.entries(directory)
        for anchor, path, *_ in entry.manifest["deps"]["own"]
        if anchor == "src"
    }
    missing = sorted(f for f in files if not os.path.exists(os.path.join(package, f)))
    return missing if len(missing) < len(files) else []


@contextmanager
def _use_environments_torch() -> Iterator[None]:
    """Lets an isolated build use the torch of the environment that its interpreter belongs to.

    Such a build can import only what it requires. But it can read torch's headers and libraries,
    and a package whose ops are decorated functions imports torch. So the directory that has torch
    comes last on the path: what the build requires goes before what is installed there.
    """
    from importlib.util import find_spec

    path = None if find_spec("torch") else torch_sdk.locate() or _find_environments_torch()
    if path is None:
        yield
        return
    where = os.path.dirname(path)
    sys.path.append(where)
    try:
        with override(torch_dir=path):
            yield
    finally:
        sys.path.remove(where)


def _find_environments_torch() -> str | None:
    """The torch among the packages of this interpreter's environment."""
    for scheme in ("purelib", "platlib"):
        path = os.path.join(sysconfig.get_path(scheme), "torch")
        if os.path.isfile(os.path.join(path, "version.py")):
            return path
    return None


@contextmanager
def _import_from_sources(where: str, package: str) -> Iterator[None]:
    """Import the package from its source tree, not an older one that is installed."""
    top = package.partition(".")[0]
    loaded = getattr(sys.modules.get(top), "__file__", None) or ""
    if not os.path.abspath(loaded).startswith(os.path.join(os.path.abspath(where), "")):
        for name in [each for each in sys.modules if each.partition(".")[0] == top]:
            del sys.modules[name]
    sys.path.insert(0, where)
    try:
        yield
    finally:
        sys.path.remove(where)


def _collect_requests(
    chosen: Sequence[OpChoice], extensions: Sequence[OpBuilder], *, here: bool
) -> tuple[prebuild.Requests, dict[str, OpChoice]]:
    """(the requests, for this machine or for others, and the ops that cannot be requested; the
    choice for each library by its name). A variant has the choice of its op."""
    requests: list[BuildRequest] = []
    refused: list[BuildOutcome] = []
    origins = {each.op.name: each for each in chosen}
    for each in chosen:
        try:
            kind = _builder(each.op)
            wanted: Sequence[NamedTarget | None] = (None,) if here else _targets(each.op, kind)
            for name, library in registry.libraries(each.op.name, kind, ahead=True):
                origins[name] = each
                requests += [
                    BuildRequest(selection.ask(library(), target), target, each.named)
                    for target in wanted
                ]
        except errors.SettingError:
            raise  # it affects all ops: a misspelt setting must not produce a wheel
        except errors.OpkilnError as error:
            refused.append(prebuild.BuildOutcome(each.op.name, prebuild.FAILED, error=error))
    for builder in extensions:
        archs = builder.op().asked
        if here or archs:
            wanted = (NamedTarget(builder.backend, archs),) if archs else (None,)
        else:
            wanted = selection.targets((builder.backend,))
        for target in wanted:
            again = copy.copy(builder)
            vars(again).pop("backend", None)  # it may have chosen one already
            requests.append(BuildRequest(selection.ask(again, target), target))
    return prebuild.Requests(tuple(requests), tuple(refused)), origins


def _targets(op: DeclaredOp, kind: type[OpBuilder]) -> tuple[NamedTarget, ...]:
    found = selection.targets(kind.BACKENDS)
    if not found:
        raise errors.UnknownBackend(
            f"op {op.name} has no version for {settings.build_targets}",
            why=f"it has {', '.join(kind.BACKENDS)}; OPKILN_BUILD_TARGETS names others",
        )
    return found


def _builder(op: DeclaredOp) -> type[OpBuilder]:
    """The builder of an op. Raises SpecError, and LoadError where a module is not installed."""
    if not op.value:
        return registry.ALL_OPS[op.name]
    try:
        kind = registry.as_builder(EntryPoint(op.name, op.value, registry.GROUP).load())
    except (Exception, SystemExit) as error:
        lacks = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
        own = op.value.partition(":")[0].strip().partition(".")[0]
        of_others = lacks and lacks.partition(".")[0] != own
        raise (errors.LoadError if of_others else errors.SpecError)(
            f"op {op.name}: {op.value} cannot be imported from the package's sources",
            why=f"{type(error).__name__}: {error}",
            hint=_NO_ISOLATION if lacks == "torch" else "",
        ) from error
    if kind is None:
        raise errors.SpecError(f"op {op.name}: {op.value} is not an OpBuilder")
    if (name := kind().name) != op.name:
        raise errors.SpecError(
            f"the entry point {op.name} = {op.value} is for an op called {name}",
            why="an op must have the same name in variables, reports and the loader",
            hint=f'{name} = "{op.value}"',
        )
    return kind


def _require_built(
    package: str, origins: dict[str, OpChoice], outcomes: Sequence[BuildOutcome]
) -> None:
    """Raise BuildError if an op failed, with the reason for each."""
    failures = [each.error for each in outcomes if each.error is not None]
    if not failures:
        return
    ops = dict.fromkeys(each.op for each in outcomes if each.error is not None)
    variables = ", ".join(dict.fromkeys(origins[op].origin for op in ops if op in origins))
    asks = f", as {variables} asks" if variables else ""
    hint = next((each.hint for each in failures if each.hint), "")
    if torch_sdk.locate() is None:
        hint = _NO_ISOLATION
    whys = ("\n  ".join((each.what, *each.why.splitlines())) for each in failures)
    raise errors.BuildError(
        f"{package} cannot be installed with {', '.join(ops)} precompiled{asks}",
        why="\n".join(dict.fromkeys(whys)),
        hint=hint,
    )


def _report(package: str, outcomes: Sequence[BuildOutcome], to: str, notes: Sequence[str]) -> str:
    from opkiln.report.layout import columns, count

    done = [each for each in outcomes if each.path]
    lines = []
    if outcomes:
        lines.append(f"{package}: {count(len({each.op for each in done}), 'op')} {to}")
        rows = [
            (each.op, _describe_target(each), each.status, f"{each.seconds:.1f} s") for each in done
        ]
        lines += [columns(rows, indent=2)] if rows else []
        lines += [
            f"  skipped {each.op}{f' ({each.target})' if each.target else ''}: {each.reason}"
            for each in outcomes
            if not each.path and each.reason
        ]
    lines += [f"  note: {note}" for note in notes]
    return "\n".join(lines)


def _describe_target(outcome: BuildOutcome) -> str:
    if ":" in outcome.target or not outcome.archs:
        return outcome.target or outcome.backend
    return f"{outcome.backend}:{','.join(outcome.archs)}"
