"""The accelerator that somebody asked for: by ``set_accelerator``, or by ``OPKILN_ACCELERATOR``.

Asks no device and imports next to nothing: op builders look here on their way to a cache hit.
"""

from __future__ import annotations

from opkiln.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# opkiln's own accelerators and their classes, each in the module of its name, in the order of
# preference.
OWN = {
    "cuda": "CudaAccelerator",
    "rocm": "RocmAccelerator",
    "xpu": "XpuAccelerator",
    "hpu": "HpuAccelerator",
    "npu": "NpuAccelerator",
    "mlu": "MluAccelerator",
    "sdaa": "SdaaAccelerator",
    "supa": "SupaAccelerator",
    "mps": "MpsAccelerator",
    "cpu": "CpuAccelerator",
}

_given: Any = None  # the object that set_accelerator was given


def given() -> Any:
    """The object that ``set_accelerator`` was given; None where it was not called."""
    return _given


def give(accelerator: Any) -> None:
    """Have this object be the accelerator from now on; None: nobody asks for one any more."""
    global _given
    _given = accelerator


def asked_name() -> str | None:
    """The name of the accelerator that is asked for; None where none is. Not checked."""
    if _given is not None:
        # DeepSpeed's own accelerators have no name but torch's word for their devices.
        return str(getattr(_given, "name", "") or _given.device_name())
    name: str | None = settings.accelerator
    return name


def asked_backend(backends: tuple[str, ...]) -> str | None:
    """Which of an op's backends the accelerator that is asked for takes; None where none is asked
    for, or where the op has nothing for it.

    Its device need not be here: an op can be built for another machine's. Raises AcceleratorError
    for a name that no accelerator has, and for ``rocm`` where torch is built without it.
    """
    name = asked_name()
    if name is None:
        return None
    if _given is None and (name not in OWN or name == "rocm"):
        from opkiln.accelerator import detect  # not on the way to a hit of CUDA's or the CPU's

        detect.must_be_known(name)
    return serving(name, backends)


def serving(accelerator: str, backends: tuple[str, ...]) -> str | None:
    """Which of an op's backends is for an accelerator: its own, else the CPU's; None: neither.

    ``cuda`` also means the devices of a ROCm torch, which go by that name in torch.
    """
    names = ("cuda", "rocm", "cpu") if accelerator == "cuda" else (accelerator, "cpu")
    return next((name for name in names if name in backends), None)
