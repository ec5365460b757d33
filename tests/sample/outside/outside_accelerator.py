"""Another package's accelerators, as it would declare them in ``opkiln.accelerators``."""

from __future__ import annotations

from opkiln.accelerator.cpu import CpuAccelerator
from opkiln.accelerator.interface import Answer


class OutsideAccelerator(CpuAccelerator):
    """A device that answers; torch drives it as it drives the CPU."""

    name = "outside"
    COMMUNICATION = "outccl"

    @classmethod
    def look(cls, root: str = "/", *, asked: bool = False) -> Answer:
        return Answer(cls.name, True, "the card in slot 3")


class AbsentAccelerator(CpuAccelerator):
    """A package without its device."""

    name = "absent"

    @classmethod
    def look(cls, root: str = "/", *, asked: bool = False) -> Answer:
        return Answer(cls.name, False, "slot 3 is empty")


class ForDeepSpeed:
    """One that knows nothing of opkiln: DeepSpeed's methods, and no ``look``."""

    def is_available(self) -> bool:
        return True

    def device_name(self, device_index: int | None = None) -> str:
        return "theirs"

    def device_count(self) -> int:
        return 1

    def create_op_builder(self, class_name: str) -> None:
        return None


class FailingAccelerator(CpuAccelerator):
    """One whose driver's library is missing."""

    name = "failing"

    @classmethod
    def look(cls, root: str = "/", *, asked: bool = False) -> Answer:
        raise OSError("libfailing.so: cannot open shared object file")


class UnmadeAccelerator(OutsideAccelerator):
    """One whose device is there and cannot be had."""

    name = "unmade"

    def __init__(self) -> None:
        raise RuntimeError("the card is held by another process")


class LeavingAccelerator(CpuAccelerator):
    """One that leaves the interpreter where it cannot go on."""

    name = "leaving"

    @classmethod
    def look(cls, root: str = "/", *, asked: bool = False) -> Answer:
        raise SystemExit("no licence")
