"""NVIDIA GPUs: which there are, what they are, and which of them this process may use.

The driver's management library (NVML) is asked, else ``nvidia-smi``; never CUDA itself, so no
context comes to be and a fork stays possible. An answer is remembered for as long as the driver's
own files under ``/proc`` read the same.

NVML is called directly (``nvml.py``) and not through nvidia-ml-py: that takes ten times as long to
import, is rarely installed where the GPUs are, and shares its name with another package.
"""

from __future__ import annotations

import os

from opkiln.accelerator.gpu import GPU, Devices
from opkiln.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# A machine with an NVIDIA driver has one of these: the kernel module, its device node alone (in a
# sandbox that shows no /proc/driver), the Windows driver under WSL.
_TRACES = ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg")


_known: dict[str, Devices] = {}  # by root; plain data, as true in a forked child as here


def devices(memory: tuple[str, ...] = (), root: str = "/") -> Devices:
    """Every GPU of the machine. None where there is no driver, or none that answers: ``why``.

    Without a driver this looks for three files and does nothing else. Asked once in a process, and
    remembered in the directories of ``memory`` for others. Safe in a forked child and from many
    threads. Never raises for what the driver does.
    """
    if root in _known:
        return _known[root]
    if not any(os.path.exists(os.path.join(root, trace)) for trace in _TRACES):
        return Devices(why="there is no NVIDIA driver here")
    subject = _subject(root) if memory else None
    found = _recall(memory, subject) if subject else None
    if found is None:
        found = _ask()
        if subject and found.gpus and not found.why:  # a GPU that was left out may come back
            _remember(memory, subject, found)
    _known[root] = found
    return found


def capabilities(devices: Devices) -> tuple[str, ...]:
    """Their compute capabilities, each once, in numeric order."""
    return tuple(sorted({gpu.capability for gpu in devices.gpus}, key=_numbers))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


# Asking


def _ask() -> Devices:
    from opkiln.accelerator import nvml

    try:
        return nvml.ask()
    except nvml.NoLibrary as error:
        missing = str(error)
    from opkiln.accelerator import nvidia_smi

    found = nvidia_smi.ask()
    return found if found.gpus else found._replace(why=f"{missing}; {found.why}")


# Remembering


def _subject(root: str) -> str | None:
    """What the kernel module tells of itself and its GPUs; None where it tells nothing.

    The times of files under /proc mean nothing, so it is the contents that count. Whether a device
    node may be opened is part of it: NVML leaves out the GPUs that a container or a batch system
    withholds, and access(2) asks the device cgroup, too.
    """
    here = os.path.join(root, "proc/driver/nvidia")
    try:
        told = [_read(f"{here}/version")]
        for bus in sorted(os.listdir(f"{here}/gpus")):
            text = _read(f"{here}/gpus/{bus}/information")
            told += [bus, *(line for line in text.splitlines() if line.startswith(_LASTING))]
        nodes = sorted(name for name in os.listdir(os.path.join(root, "dev")) if _is_node(name))
    except OSError:
        return None
    usable = [n for n in nodes if os.access(os.path.join(root, "dev", n), os.R_OK | os.W_OK)]
    return "\n".join(["NVIDIA GPUs", *told, *usable])


# Not the interrupt, which a reboot changes, nor the BIOS, which reads ??.?? while the GPU sleeps.
# So does the UUID; then it is the model that says what the GPU can do.
_LASTING = ("Model:", "GPU UUID:", "GPU Excluded:")


def _is_node(name: str) -> bool:
    return name.startswith("nvidia") and name.removeprefix("nvidia").isdigit()


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _recall(memory: tuple[str, ...], subject: str) -> Devices | None:
    from opkiln.toolchain import probing

    record = probing.recall(memory, subject)
    try:
        return None if record is None else _revived(record["devices"])
    except (KeyError, TypeError, ValueError):
        return None  # damaged, or of another version: the driver is asked again


def _revived(facts: dict[str, Any]) -> Devices:
    gpus = tuple(GPU(**{**gpu, "parts": tuple(gpu["parts"])}) for gpu in facts["gpus"])
    return Devices(gpus, str(facts["driver"]), str(facts["cuda"]), "memo")


def _remember(memory: tuple[str, ...], subject: str, found: Devices) -> None:
    from opkiln.toolchain import probing

    gpus = [gpu._asdict() for gpu in found.gpus]
    facts = {"gpus": gpus, "driver": found.driver, "cuda": found.cuda}
    probing.remember(memory, subject, {"devices": facts}, [])


# Choosing


def visible(devices: Devices) -> tuple[tuple[GPU, ...], bool]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` leaves to this process, and whether that is certain.

    CUDA's rules: indices or UUIDs, of which the first characters suffice; the list ends at the
    first entry that is none; a GPU named twice leaves none at all; an empty list is none. A MIG
    instance stands for its GPU.

    Not certain, and then all of them: an index among GPUs of different capability, since CUDA
    counts the fastest first and only a context would tell which that is
    (``CUDA_DEVICE_ORDER=PCI_BUS_ID`` makes it plain); a UUID that the driver was not asked about.
    Among GPUs of one capability the index is taken as it is: the capability is right, the GPU may
    be its twin.
    """
    wanted = settings.cuda_visible_devices
    if wanted is None or not devices.gpus:
        return devices.gpus, True
    entries = [entry.strip() for entry in wanted.split(",")]
    if entries[0].upper().startswith(("GPU-", "MIG-")):
        return _by_uuid(devices, entries)
    return _by_index(devices, entries)


def _by_index(devices: Devices, entries: list[str]) -> tuple[tuple[GPU, ...], bool]:
    gpus = devices.gpus
    chosen: list[int] = []
    for entry in entries:
        index = _leading_number(entry)
        if index is None or index >= len(gpus):
            break
        if index in chosen:
            return (), True
        chosen.append(index)
    counted = settings.cuda_device_order == "PCI_BUS_ID" or len(capabilities(devices)) == 1
    if not counted and 0 < len(chosen) < len(gpus):
        return gpus, False
    return tuple(gpus[index] for index in chosen), True


def _leading_number(entry: str) -> int | None:
    """As C's strtoul: ``1gpu`` is 1. None for a negative number, or where there is none."""
    entry = entry.removeprefix("+")
    digits = entry[: len(entry) - len(entry.lstrip("0123456789"))]
    return int(digits) if digits else None


def _by_uuid(devices: Devices, entries: list[str]) -> tuple[tuple[GPU, ...], bool]:
    gpus = devices.gpus
    chosen: dict[str, GPU] = {}  # by the UUID of the GPU or instance
    for entry in entries:
        prefix = entry.lower()
        if prefix.startswith("mig-gpu-"):  # the older form: MIG-GPU-<uuid>/<instance>/<instance>
            parent = prefix.removeprefix("mig-").partition("/")[0]
            named = [(prefix, gpu) for gpu in gpus if gpu.uuid.lower() == parent]
        elif prefix.startswith(("gpu-", "mig-")):
            named = [
                (uuid, gpu)
                for gpu in gpus
                for uuid in (gpu.uuid, *gpu.parts)
                if uuid.lower().startswith(prefix)
            ]
        else:
            break
        if not named and (prefix.startswith("mig-") or devices.how == "memo"):
            # Instances are made and unmade while the driver runs, and nvidia-smi may not list
            # them; a GPU that slept when it was remembered may have been replaced by its like.
            return gpus, False
        if len(named) != 1:
            break
        if named[0][0] in chosen:
            return (), True
        chosen[named[0][0]] = named[0][1]
    return tuple(dict.fromkeys(chosen.values())), True
