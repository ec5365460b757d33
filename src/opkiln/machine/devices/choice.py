"""The accelerator that the user requested, by ``set_accelerator`` or by ``OPKILN_ACCELERATOR``.

Asks no device and imports almost nothing: op builders call this on their way to a cache hit.
"""

from __future__ import annotations

from typing import Any

from opkiln.errors import AcceleratorError
from opkiln.settings import origin_of, settings

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
    from opkiln.machine.devices import installed  # a hit for CUDA or the CPU does not need it

    if name == "rocm":
        if why := installed.why_torch_lacks("ROCm"):
            raise unusable(name, why)
        return
    theirs = [entry.name.lower() for entry in installed.accelerators()]
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
    """Which of an op's backends is for an accelerator: its own, else the CPU's, else None.

    ``cuda`` also means the devices of a ROCm torch, because torch calls them that.
    """
    names = ("cuda", "rocm", "cpu") if accelerator == "cuda" else (accelerator, "cpu")
    return next((name for name in names if name in backends), None)
