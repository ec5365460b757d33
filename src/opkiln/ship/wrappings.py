"""The three forms of a layer: a directory, a wheel, a bundle. Their contents are the same."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from opkiln import __version__
from opkiln.errors import BuildError, StoreError, UsageError
from opkiln.ship import audit
from opkiln.store import layer, publish


class Wrapping(NamedTuple):
    """The forms to write: a layer, a wheel, a bundle. None stands for one that is not written."""

    out: str | None = None
    wheel: str | None = None
    bundle: str | None = None
    name: str | None = None
    version: str | None = None
    max_size: int | None = None

    @property
    def places(self) -> tuple[str, ...]:
        """The places of the forms that are written."""
        return tuple(place for place in (self.out, self.wheel, self.bundle) if place is not None)


def check(wrapping: Wrapping, owners: Iterable[str]) -> None:
    """Check that everything can be written, before anything is compiled. Raises UsageError.

    ``owners`` are the distributions that the ops belong to.
    """
    for place in wrapping.places:
        parent = os.path.abspath(place)
        while not os.path.lexists(parent):
            parent = os.path.dirname(parent)
        if not os.access(parent, os.W_OK):
            raise UsageError(
                f"{place} cannot be written",
                why=f"{parent} is not writable",
                hint=f"ls -ld {shlex.quote(parent)}",
            )
    if wrapping.wheel is None:
        return
    from opkiln.ship.wheel import check_names, wheel_name

    name = wrapping.name or _wheel_name(set(owners))
    check_names(name, wrapping.version or __version__)
    taken = {"opkiln", "torch", *owners}
    if wheel_name(name) in map(wheel_name, taken):
        raise UsageError(
            f"a wheel of ops cannot be called {name!r}",
            why=f"there is a package {name}: installing the wheel would remove it",
            hint=f"--name {name}-ops",
        )


def audit_libraries(
    payloads: Sequence[str],
) -> tuple[tuple[tuple[str, audit.Finding], ...], list[BuildError]]:
    """Audit libraries of the store: (op, finding), and an error for each that fails."""
    from opkiln.store.entry import read_manifest

    torch = audit.torch_library()
    findings: list[tuple[str, audit.Finding]] = []
    violations = []
    for path in dict.fromkeys(payloads):
        try:
            manifest = read_manifest(layer.leaf_of(path))
        except (OSError, ValueError) as error:
            raise StoreError(f"{layer.leaf_of(path)} cannot be shipped: {error}") from error
        try:
            findings += [(manifest["op"], each) for each in audit.require(path, manifest, torch)]
        except BuildError as error:
            violations.append(error)
    return tuple(dict.fromkeys(findings)), violations


def write(payloads: Sequence[str], wrapping: Wrapping) -> list[str]:
    """Write libraries of the store in these forms, and return the paths.

    Raises StoreError, and UsageError for an invalid wheel.
    """
    written = []
    if wrapping.out is not None:
        layer.export(payloads, wrapping.out)
        written.append(wrapping.out)
    if wrapping.wheel is None and wrapping.bundle is None:
        return written
    with publish.scratch("ship") as stage:
        layer.export(payloads, stage)
        if wrapping.wheel is not None:
            written += _wheel(stage, wrapping)
        if wrapping.bundle is not None:
            from opkiln.store.bundle import write_bundle

            os.makedirs(os.path.dirname(os.path.abspath(wrapping.bundle)), exist_ok=True)
            written.append(write_bundle(stage, wrapping.bundle).path)
    return written


def _wheel(stage: str, wrapping: Wrapping) -> list[str]:
    """Write a wheel for one release of the package that owns the ops, with the same version.

    An op is loaded only with the sources that it was built from.
    """
    from opkiln.ship.wheel import write_wheel

    assert wrapping.wheel is not None
    owners = {each.manifest["distribution"] for each in layer.entries(stage)}
    releases = [_release(owner) for owner in sorted(owners)]
    requires = [f"{name}=={version}" for name, version in releases if version]
    if "opkiln" not in owners:
        requires.insert(0, "opkiln")
    release = releases[0][1] if len(owners) == 1 else ""
    return write_wheel(
        stage,
        wrapping.wheel,
        name=wrapping.name or _wheel_name(owners),
        version=wrapping.version or release or __version__,
        requires=requires,
        max_size=wrapping.max_size,
    )


def _wheel_name(owners: set[str]) -> str:
    """``opkiln-ops`` for ops of opkiln itself, or of several packages."""
    return f"{next(iter(owners)) if len(owners) == 1 else 'opkiln'}-ops"


def _release(package: str) -> tuple[str, str]:
    """The name that a package is installed by, which may differ from its import name, and its
    version; empty if it is not installed."""
    from importlib.metadata import PackageNotFoundError, packages_distributions, version

    if package == "opkiln":
        return package, __version__
    name = next(iter(packages_distributions().get(package, ())), package)
    try:
        return name, version(name)
    except PackageNotFoundError:
        return name, ""
