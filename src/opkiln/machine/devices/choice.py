"""The accelerator that the user requested, by ``set_accelerator`` or by ``OPKILN_ACCELERATOR``, and
the installed packages that drive devices.

Asks no device, imports none of these packages, and itself imports almost nothing: op builders call
this on their way to a cache hit.
"""

from __future__ import annotations

import os
from typing import Any

from opkiln.errors import AcceleratorError
from opkiln.machine import packages
from opkiln.settings import origin_of, settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# opkiln's own accelerators, in the order of preference.
OWN = ("cuda", "rocm", "xpu", "hpu", "npu", "mlu", "sdaa", "supa", "mps", "cpu")

UNKNOWN = "there is no accelerator of this name"

_given: Any = None  # the object that set_accelerator was given


def given_accelerator() -> Any:
    """The object that ``set_accelerator`` was given; None if there is none."""
    return _given


def set_given(accelerator: Any) -> None:
    """Make this object the accelerator from now on; None undoes that."""
    global _given
    _given = accelerator


def requested_name() -> str | None:
    """The name of the accelerator that was requested; None without a request. Not checked."""
    if _given is not None:
        # DeepSpeed's own accelerators have no name, only torch's word for their devices.
        return str(getattr(_given, "name", "") or _given.device_name())
    name: str | None = settings.accelerator
    return name


def requested_backend(backends: tuple[str, ...]) -> str | None:
    """Which of an op's backends serves the requested accelerator; None if no accelerator was
    requested, or if the op has no backend for it.

    Its device need not be here: an op can be built for another machine. Raises AcceleratorError for
    an unknown name, and for ``rocm`` if torch is built without it.
    """
    name = requested_name()
    if name is None:
        return None
    if _given is None and (name not in OWN or name == "rocm"):
        _check(name)
    return find_backend(name, backends)


def _check(name: str) -> None:
    if name == "rocm":
        if why := why_torch_lacks("ROCm"):
            raise unusable(name, why)
        return
    theirs = [entry.name.lower() for entry in accelerators()]
    if name not in theirs:
        raise unusable(name, UNKNOWN, "known: " + ", ".join([*theirs, *OWN]))


def unusable(name: str, reason: str, why: str = "", usable: str = "cpu") -> AcceleratorError:
    """The error for an accelerator that was requested by name and cannot be used."""
    variable = origin_of("accelerator")[1]
    from_environment = variable.isupper()
    what = f"{variable}={name}" if from_environment else f"accelerator {name!r}"
    hint = f"unset {variable}" if from_environment else f"one that can be used: {usable}"
    return AcceleratorError(f"{what} cannot be used: {reason}", why=why, hint=hint)


def find_backend(accelerator: str, backends: tuple[str, ...]) -> str | None:
    """Which of an op's backends is for an accelerator: its own, else the CPU's, else None. ``cuda``
    also means the devices of a ROCm torch, because torch calls them that."""
    names = ("cuda", "rocm", "cpu") if accelerator == "cuda" else (accelerator, "cpu")
    return next((name for name in names if name in backends), None)


# Installed packages

GROUP = "opkiln.accelerators"


def has_package(name: str) -> bool:
    """Whether a package of this name can be imported, or has been."""
    from importlib.util import find_spec

    try:
        return find_spec(name) is not None
    except ValueError:
        return True  # a module without a spec, which a program put into sys.modules


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
    return packages.entry_points(GROUP)
