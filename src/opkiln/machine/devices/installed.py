"""Which packages that drive devices are installed, found without importing them."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "opkiln.accelerators"


def has_package(name: str) -> bool:
    """Whether a package of this name can be imported, or has been."""
    from importlib.util import find_spec

    try:
        return find_spec(name) is not None
    except ValueError:
        return True  # a module without a spec, which somebody put into sys.modules


def why_torch_lacks(kind: str) -> str:
    """Why torch cannot drive devices of a kind (CUDA, ROCm, XPU); empty if it can."""
    from opkiln.machine.toolchain import torch_sdk  # only needed once a device is found

    try:
        sdk = torch_sdk.find()
    except OSError as error:
        return f"torch cannot be read: {error}"
    if sdk is None:
        return "torch is not installed"
    has = {
        "CUDA": sdk.cuda is not None,
        "ROCm": sdk.hip is not None,
        "XPU": os.path.exists(os.path.join(sdk.path, "lib", "libtorch_xpu.so")),
    }
    return "" if has[kind] else f"torch {sdk.version} is built without {kind}"


def accelerators() -> list[EntryPoint]:
    """The accelerators of other packages, by their entry points."""
    if not _may_have_accelerators():
        return []
    from importlib.metadata import entry_points

    return list(entry_points(group=GROUP))


def _may_have_accelerators() -> bool:
    """Whether an installed distribution may declare an accelerator.

    Few do, and this check is about a hundred times faster than importing importlib.metadata. A path
    that is not a directory, such as a zip file, may contain anything.
    """
    mark = GROUP.encode()
    for place in sys.path:
        try:
            names = os.listdir(place or ".")
        except NotADirectoryError:
            return True
        except OSError:
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")):
                try:
                    with open(os.path.join(place, name, "entry_points.txt"), "rb") as file:
                        if mark in file.read():
                            return True
                except OSError:
                    continue  # there is no such file, or an .egg-info that is a file itself
    return False
