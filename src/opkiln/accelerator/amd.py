"""AMD GPUs, read from what the kernel's driver shows under ``/sys``. No program, no library.

The files are few and the kernel's own, so nothing is remembered.
"""

from __future__ import annotations

import os

from opkiln.record import Record
from opkiln.settings import settings

_NODES = "sys/class/kfd/kfd/topology/nodes"


class GPU(Record):
    """One GPU, as the driver tells of it."""

    index: int  # type: ignore[assignment]  # the driver's, by which ROCR_VISIBLE_DEVICES counts
    arch: str  # "gfx90a"; what HSA_OVERRIDE_GFX_VERSION says where it is set
    wavefront: int  # threads: 64 or 32
    name: str
    memory: int  # bytes; 0 where the driver does not say
    uuid: str = ""  # "GPU-" and 16 digits; empty for a GPU that has none


class Devices(Record):
    """The GPUs of this machine that the kernel lets this process see."""

    gpus: tuple[GPU, ...] = ()
    why: str = ""  # why there are none


def devices(root: str = "/") -> Devices:
    """Every GPU of the machine. None where there is no driver, or none to be seen: ``why``.

    Raises SettingError when ``HSA_OVERRIDE_GFX_VERSION`` is no version.
    """
    here = os.path.join(root, _NODES)
    try:
        nodes = sorted((name for name in os.listdir(here) if name.isdigit()), key=int)
    except OSError:
        return Devices(why="there is no AMD GPU driver here")
    # Nodes are CPUs, too. Those of GPUs that a container withholds cannot be read.
    found = [_properties(os.path.join(here, name, "properties")) for name in nodes]
    named = [
        (name, properties)
        for name, properties in zip(nodes, found, strict=True)
        if properties.get("simd_count") and properties.get("gfx_target_version")
    ]
    gpus = tuple(
        _gpu(index, os.path.join(here, name), properties, root)
        for index, (name, properties) in enumerate(named)
    )
    return Devices(gpus, "" if gpus else "the AMD driver shows no GPU to this process")


def _properties(path: str) -> dict[str, int]:
    words = [line.split() for line in _read(path).splitlines()]
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdigit()}


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _gpu(index: int, node: str, properties: dict[str, int], root: str) -> GPU:
    minor = properties.get("drm_render_minor", 0)
    card = os.path.join(root, f"sys/class/drm/renderD{minor}/device")
    name = _read(f"{card}/product_name").strip() or _read(f"{node}/name").strip()
    memory = _read(f"{card}/mem_info_vram_total").strip()
    unique = properties.get("unique_id", 0)
    return GPU(
        index,
        _arch(properties["gfx_target_version"]),
        properties.get("wave_front_size", 64),
        name,
        int(memory) if memory.isdigit() else 0,
        f"GPU-{unique:016x}" if unique else "",
    )


def _arch(version: int) -> str:
    """The compiler's name for the driver's number: 90010 is ``gfx90a``, 110001 ``gfx1101``."""
    # A runtime that is told to take every GPU for another loads that one's code.
    split = version // 10000, version // 100 % 100, version % 100
    major, minor, stepping = settings.gfx_override or split
    return f"gfx{major}{minor:x}{stepping:x}"


# Choosing


def visible(devices: Devices) -> tuple[GPU, ...]:
    """The GPUs that the runtime leaves to this process.

    Two filters, one upon the other: ``ROCR_VISIBLE_DEVICES`` takes from all of them, by index or
    UUID; ``HIP_VISIBLE_DEVICES``, or ``CUDA_VISIBLE_DEVICES`` where that is empty or not set,
    counts among what is left. Each list ends at its first invalid entry.
    """
    gpus = devices.gpus
    first = settings.rocr_visible_devices
    if first is not None:
        gpus = _chosen(gpus, first, stops_at_repetition=True)
    second = settings.hip_visible_devices or settings.cuda_visible_devices
    if second:
        gpus = _chosen(gpus, second, stops_at_repetition=False)
    return gpus


def _chosen(gpus: tuple[GPU, ...], text: str, *, stops_at_repetition: bool) -> tuple[GPU, ...]:
    chosen: list[GPU] = []
    for entry in text.split(","):
        gpu = _named(gpus, entry.strip().lower())
        if gpu is None or (stops_at_repetition and gpu in chosen):
            break
        if gpu not in chosen:
            chosen.append(gpu)
    return tuple(chosen)


def _named(gpus: tuple[GPU, ...], entry: str) -> GPU | None:
    if entry.isascii() and entry.isdigit():
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    if not entry.startswith("gpu-"):
        return None
    named = [gpu for gpu in gpus if gpu.uuid.lower().startswith(entry)]
    return named[0] if len(named) == 1 else None


# DeepSpeed's questions


def get_rocm_gpu_arch(root: str = "/") -> str:
    """The architectures of all GPUs of the machine, each once: ``gfx90a;gfx942``. Empty: none."""
    return ";".join(dict.fromkeys(gpu.arch for gpu in devices(root).gpus))


def get_rocm_wavefront_size(root: str = "/") -> str:
    """Threads in a wavefront, ``64`` or ``32``: the least of all GPUs; ``32`` without any.

    Code for 32 also runs where a wavefront is 64, in halves; the reverse reads lanes that are not
    there.
    """
    return str(min((gpu.wavefront for gpu in devices(root).gpus), default=32))
