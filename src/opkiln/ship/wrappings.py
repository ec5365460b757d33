"""The wrappings of a layer: a directory, a wheel, a bundle. What is in them is the same."""

from __future__ import annotations

import os

from opkiln import __version__
from opkiln.errors import BuildError
from opkiln.ship import audit, layer
from opkiln.store import publish

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def violations(payloads: Sequence[str]) -> list[BuildError]:
    """The libraries of the store that need more than their tags promise, each with its reasons."""
    from opkiln.store.entry import MANIFEST, parse_manifest
    from opkiln.toolchain import torch_sdk

    sdk = torch_sdk.find()
    torch = None if sdk is None else os.path.join(sdk.path, "lib", "libtorch_cpu.so")
    found = []
    for path in dict.fromkeys(payloads):
        with open(os.path.join(os.path.dirname(path), MANIFEST), "rb") as file:
            manifest = parse_manifest(file.read())
        try:
            audit.require(path, manifest, torch)
        except BuildError as error:
            found.append(error)
    return found


def write(
    payloads: Sequence[str],
    *,
    out: str | None = None,
    wheel: str | None = None,
    bundle: str | None = None,
    name: str | None = None,
    version: str | None = None,
    max_size: int | None = None,
) -> list[str]:
    """Wrap libraries of the store, and give the paths of what was written. Raises StoreError, and
    UsageError for what no wheel can be."""
    written = []
    if out is not None:
        layer.export(payloads, out)
        written.append(out)
    if wheel is None and bundle is None:
        return written
    with publish.scratch("ship") as stage:
        layer.export(payloads, stage)
        if wheel is not None:
            from opkiln.ship.wheel import write_wheel

            written += write_wheel(
                stage, wheel, name=name or _wheel_name(stage), version=version or __version__,
                requires=("opkiln",), max_size=max_size,
            )  # fmt: skip
        if bundle is not None:
            from opkiln.ship.bundle import write_bundle

            written.append(write_bundle(stage, bundle).path)
    return written


def _wheel_name(stage: str) -> str:
    """``opkiln-ops`` of opkiln's own ops; those of several packages go by opkiln's name, too."""
    from opkiln.ship import contents

    owners = {each.manifest["distribution"] for each in contents.entries(stage)}
    return f"{owners.pop() if len(owners) == 1 else 'opkiln'}-ops"
