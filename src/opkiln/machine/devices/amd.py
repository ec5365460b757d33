"""AMD GPUs, read from the kernel driver's files under ``/sys``, without a program or a library.

Reading these few files is fast, so the answer is not remembered.
"""

from __future__ import annotations

import os

from opkiln.base.lazy import Record
from opkiln.machine.uname import read_text
from opkiln.settings import settings

_NODES = "sys/class/kfd/kfd/topology/nodes"


class AmdGPU(Record):
    """One GPU, as the driver describes it."""

    index: int  # type: ignore[assignment]  # the driver's, by which ROCR_VISIBLE_DEVICES counts
    arch: str  # "gfx90a"; HSA_OVERRIDE_GFX_VERSION replaces it
    wavefront: int  # threads: 64 or 32
    name: str
    memory: int  # bytes; 0 if the driver does not say
    uuid: str = ""  # "GPU-" and 16 digits; empty if the GPU has none


class AmdDevices(Record):
    """The GPUs of this machine that the kernel shows to this process."""

    gpus: tuple[AmdGPU, ...] = ()
    why: str = ""  # why there are none


def devices(root: str = "/") -> AmdDevices:
    """Every GPU of the machine. If there are none, ``why`` says why. Raises SettingError if
    ``HSA_OVERRIDE_GFX_VERSION`` is not a version."""
    here = os.path.join(root, _NODES)
    try:
        nodes = sorted((name for name in os.listdir(here) if name.isdigit()), key=int)
    except OSError:
        return AmdDevices(why="there is no AMD GPU driver here")
    # CPUs are nodes too. The files of a GPU that a container withholds cannot be read.
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
    return AmdDevices(gpus, "" if gpus else "the AMD driver shows no GPU to this process")


def _properties(path: str) -> dict[str, int]:
    words = [line.split() for line in read_text(path).splitlines()]
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdigit()}


def _gpu(index: int, node: str, properties: dict[str, int], root: str) -> AmdGPU:
    minor = properties.get("drm_render_minor", 0)
    card = os.path.join(root, f"sys/class/drm/renderD{minor}/device")
    name = read_text(f"{card}/product_name").strip() or read_text(f"{node}/name").strip()
    memory = read_text(f"{card}/mem_info_vram_total").strip()
    unique = properties.get("unique_id", 0)
    return AmdGPU(
        index,
        _arch(properties["gfx_target_version"]),
        properties.get("wave_front_size", 64),
        name,
        int(memory) if memory.isdigit() else 0,
        f"GPU-{unique:016x}" if unique else "",
    )


def _arch(version: int) -> str:
    """The compiler's name for the driver's number: 90010 is ``gfx90a``, 110001 ``gfx1101``."""
    # With an override, the runtime loads code for that architecture on every GPU.
    split = version // 10000, version // 100 % 100, version % 100
    major, minor, stepping = settings.gfx_override or split
    return f"gfx{major}{minor:x}{stepping:x}"


# Which GPUs this process may use


def visible(devices: AmdDevices) -> tuple[AmdGPU, ...]:
    """The GPUs that the runtime leaves to this process.

    Two filters apply in turn. ``ROCR_VISIBLE_DEVICES`` selects among all GPUs, by index or UUID.
    ``HIP_VISIBLE_DEVICES``, or ``CUDA_VISIBLE_DEVICES`` if that is empty or not set, selects among
    the remaining ones. Each list ends at its first invalid entry.
    """
    gpus = devices.gpus
    first = settings.rocr_visible_devices
    if first is not None:
        gpus = _choose(gpus, first, stops_at_repetition=True)
    second = settings.hip_visible_devices or settings.cuda_visible_devices
    if second:
        gpus = _choose(gpus, second, stops_at_repetition=False)
    return gpus


def _choose(
    gpus: tuple[AmdGPU, ...], text: str, *, stops_at_repetition: bool
) -> tuple[AmdGPU, ...]:
    chosen: list[AmdGPU] = []
    for entry in text.split(","):
        gpu = _find_gpu(gpus, entry.strip().lower())
        if gpu is None or (stops_at_repetition and gpu in chosen):
            break
        if gpu not in chosen:
            chosen.append(gpu)
    return tuple(chosen)


def _find_gpu(gpus: tuple[AmdGPU, ...], entry: str) -> AmdGPU | None:
    if entry.isascii() and entry.isdigit():
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    if not entry.startswith("gpu-"):
        return None
    named = [gpu for gpu in gpus if gpu.uuid.lower().startswith(entry)]
    return named[0] if len(named) == 1 else None


# What DeepSpeed's builders ask for


def get_rocm_gpu_arch(root: str = "/") -> str:
    """The architectures of all GPUs of the machine, each once: ``gfx90a;gfx942``; may be empty."""
    return ";".join(dict.fromkeys(gpu.arch for gpu in devices(root).gpus))


def get_rocm_wavefront_size(root: str = "/") -> str:
    """Threads in a wavefront, ``64`` or ``32``: the smallest of all GPUs; ``32`` without a GPU.
    Code for 32 threads also runs on a wavefront of 64. Code for 64 would read lanes that a
    wavefront of 32 does not have."""
    return str(min((gpu.wavefront for gpu in devices(root).gpus), default=32))
