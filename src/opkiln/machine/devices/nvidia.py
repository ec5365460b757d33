"""NVIDIA GPUs: those of this machine, and those that this process may use.

The driver is asked through NVML or ``nvidia-smi``, never through CUDA. So no context is created,
and the process may still fork. The answer is remembered for as long as the driver's files under
``/proc`` stay the same.
"""

from __future__ import annotations

import os
import re
from typing import Any

from opkiln.base.lazy import Record
from opkiln.settings import settings

# A machine with an NVIDIA driver has one of these: the kernel module, its device node alone (in a
# sandbox that hides /proc/driver), the Windows driver under WSL.
_TRACES = ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg")


class NvidiaGPU(Record):
    """One GPU, as the driver describes it."""

    index: int  # type: ignore[assignment]  # NVML's, which is the order of PCI addresses
    uuid: str
    name: str
    capability: str  # "9.0"
    memory: int  # bytes; 0 if the driver does not say
    parts: tuple[str, ...] = ()  # UUIDs of its MIG instances

    @property
    def arch(self) -> str:
        """What to compile for."""
        return self.capability


class NvidiaDevices(Record):
    """The GPUs of this machine that the driver shows to this process."""

    gpus: tuple[NvidiaGPU, ...] = ()
    driver: str = ""  # "580.65.06"
    cuda: str = ""  # the highest CUDA that the driver supports: "13.0"; empty if it does not say
    how: str = ""  # who answered: nvml, nvidia-smi, memo; empty if nobody did
    why: str = ""  # why there are none, or which were left out


_known: dict[str, NvidiaDevices] = {}  # by root; plain data, which is still right in a forked child


def devices(memory: tuple[str, ...] = (), root: str = "/") -> NvidiaDevices:
    """Every GPU of the machine. If there are none, ``why`` says why.

    Without a driver this only looks for three files. The answer is kept for this process, and in
    the first directory of ``memory`` for others. Safe in a forked child and from many threads.
    Driver errors are never raised; they are in ``why``.
    """
    if root in _known:
        return _known[root]
    if not any(os.path.exists(os.path.join(root, trace)) for trace in _TRACES):
        return NvidiaDevices(why="there is no NVIDIA driver here")
    subject = _subject(root) if memory else None
    found = _recall(memory, subject) if subject else None
    if found is None:
        from opkiln.machine.devices import nvidia_driver

        facts = nvidia_driver.ask()
        found = make_devices(facts)
        if subject and found.gpus and not found.why:  # a GPU that was left out may come back
            from opkiln.machine.toolchain import probing

            probing.remember(memory, subject, {"answer": facts}, [])
    _known[root] = found
    return found


def make_devices(facts: dict[str, Any]) -> NvidiaDevices:
    """The records of what ``nvidia_driver`` returned."""
    gpus = (NvidiaGPU(*values)._replace(parts=tuple(parts)) for *values, parts in facts["gpus"])
    words = (str(facts[name]) for name in ("driver", "cuda", "how", "why"))
    return NvidiaDevices(tuple(gpus), *words)


def capabilities(devices: NvidiaDevices) -> tuple[str, ...]:
    """Their compute capabilities, each once, in numeric order."""
    found = {gpu.capability for gpu in devices.gpus}
    return tuple(sorted(found, key=lambda version: [*map(int, version.split("."))]))


# Remembering


def _subject(root: str) -> str | None:
    """The kernel module's description of itself and its GPUs; None if there is none.

    Files under /proc have no useful times, so their contents count. So does whether a device node
    can be opened: NVML leaves out GPUs that a container or a batch system withholds, and access(2)
    also asks the device cgroup.
    """
    here = os.path.join(root, "proc/driver/nvidia")
    try:
        told = [_read(f"{here}/version")]
        for bus in sorted(os.listdir(f"{here}/gpus")):
            text = _read(f"{here}/gpus/{bus}/information")
            told += [bus, *(line for line in text.splitlines() if line.startswith(_LASTING))]
        names = sorted(os.listdir(os.path.join(root, "dev")))
    except OSError:
        return None
    nodes = [n for n in names if n.startswith("nvidia") and n.removeprefix("nvidia").isdigit()]
    usable = [n for n in nodes if os.access(os.path.join(root, "dev", n), os.R_OK | os.W_OK)]
    return "\n".join(["NVIDIA GPUs", *told, *usable])


# Left out: the interrupt, which a reboot changes, and the BIOS, which reads ??.?? while the GPU
# sleeps. The UUID does that too, and then the model still says what the GPU can do.
_LASTING = ("Model:", "GPU UUID:", "GPU Excluded:")


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _recall(memory: tuple[str, ...], subject: str) -> NvidiaDevices | None:
    from opkiln.machine.toolchain import probing

    record = probing.recall(memory, subject)
    try:
        return None if record is None else make_devices({**record["answer"], "how": "memo"})
    except (KeyError, TypeError, ValueError):
        return None  # damaged, or written by another version: the driver is asked again


# Which GPUs this process may use


def visible(devices: NvidiaDevices) -> tuple[tuple[NvidiaGPU, ...], bool]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` leaves to this process, and whether that is certain.

    CUDA's rules: entries are indices or UUIDs, or the first characters of a UUID. The list ends at
    the first invalid entry. A GPU named twice makes the list empty. A MIG instance stands for its
    GPU.

    If it is not certain, all GPUs are returned. That is so for an index among GPUs of different
    capability: CUDA puts the fastest first, and only a context would tell which one that is
    (``CUDA_DEVICE_ORDER=PCI_BUS_ID`` makes it certain). It is also so for a UUID that the driver
    was not asked about. Among GPUs of one capability an index may mean another GPU than CUDA's,
    but the capability is right.
    """
    wanted = settings.cuda_visible_devices
    if wanted is None or not devices.gpus:
        return devices.gpus, True
    entries = [entry.strip() for entry in wanted.split(",")]
    if entries[0].upper().startswith(("GPU-", "MIG-")):
        return _choose_by_uuid(devices, entries)
    return _choose_by_index(devices, entries)


def _choose_by_index(
    devices: NvidiaDevices, entries: list[str]
) -> tuple[tuple[NvidiaGPU, ...], bool]:
    gpus = devices.gpus
    chosen: list[int] = []
    for entry in entries:
        digits = re.match(r"\+?([0-9]+)", entry)  # as C's strtoul: ``1gpu`` is 1
        if digits is None or (index := int(digits[1])) >= len(gpus):
            break
        if index in chosen:
            return (), True
        chosen.append(index)
    counted = settings.cuda_device_order == "PCI_BUS_ID" or len(capabilities(devices)) == 1
    if not counted and 0 < len(chosen) < len(gpus):
        return gpus, False
    return tuple(gpus[index] for index in chosen), True


def _choose_by_uuid(
    devices: NvidiaDevices, entries: list[str]
) -> tuple[tuple[NvidiaGPU, ...], bool]:
    gpus = devices.gpus
    chosen: dict[str, NvidiaGPU] = {}  # by the UUID of the GPU or instance
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
            # Instances come and go while the driver runs, and nvidia-smi may not list them. A GPU
            # that was asleep when it was remembered may since have been exchanged for an equal one.
            return gpus, False
        if len(named) != 1:
            break
        if named[0][0] in chosen:
            return (), True
        chosen[named[0][0]] = named[0][1]
    return tuple(dict.fromkeys(chosen.values())), True
