"""What a driver tells of NVIDIA GPUs, as records."""

from __future__ import annotations

from opkiln.record import Record


class GPU(Record):
    """One GPU, as the driver tells of it."""

    index: int  # type: ignore[assignment]  # NVML's, which is the order of PCI addresses
    uuid: str
    name: str
    capability: str  # "9.0"
    memory: int  # bytes; 0 where the driver does not say
    parts: tuple[str, ...] = ()  # UUIDs of its MIG instances


class Devices(Record):
    """The GPUs of this machine that the driver lets this process see."""

    gpus: tuple[GPU, ...] = ()
    driver: str = ""  # "580.65.06"
    cuda: str = ""  # the highest CUDA that the driver takes: "13.0"; empty where it does not say
    how: str = ""  # who answered: nvml, nvidia-smi, memo; empty for nobody
    why: str = ""  # why there are none, or which were left out
