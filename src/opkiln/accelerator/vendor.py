"""Devices that torch learns of from a package of their vendor's."""

from __future__ import annotations

import os
from importlib import import_module

from opkiln.accelerator.answer import Answer
from opkiln.accelerator.base import Accelerator
from opkiln.accelerator.packages import installed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ClassVar


class VendorAccelerator(Accelerator):
    """``torch.<name>``, there once one of ``PACKAGES`` is imported."""

    PACKAGES: ClassVar[tuple[str, ...]] = ()
    NODES: ClassVar[tuple[str, ...]] = ()  # the devices' files, less their number

    @classmethod
    def look(cls, root: str = "/", *, asked: bool = False) -> Answer:
        """The package is installed, the driver has made a file for a device, and the package counts
        one. It is imported only for the last, or where the user asks for it by name."""
        package = cls._package()
        if package is None:
            return Answer(cls.name, False, f"{' or '.join(cls.PACKAGES)} is not installed")
        if not asked and not any(_numbered(root, node) for node in cls.NODES):
            files = " or ".join(f"/{node}*" for node in cls.NODES)
            return Answer(cls.name, False, f"{package} is installed, but there is no {files} here")
        try:
            count = cls().device_count()
        # A vendor's package fails in ways of its own; some leave the interpreter when they are
        # imported without their driver.
        except (Exception, SystemExit) as error:
            told = f"{type(error).__name__}: {error}"
            return Answer(cls.name, False, f"{package} is installed, but fails: {told}")
        if not count:
            return Answer(cls.name, False, f"{package} is installed, but counts no device")
        return Answer(cls.name, True, f"{package} counts {count}")

    @classmethod
    def _package(cls) -> str | None:
        return next((name for name in cls.PACKAGES if installed(name)), None)

    def _find_module(self) -> Any:
        import_module(self._package() or self.PACKAGES[0])  # which makes torch know the device
        return super()._find_module()


def _numbered(root: str, node: str) -> bool:
    """Whether there is a file of this name and a number."""
    directory, stem = os.path.split(os.path.join(root, node))
    try:
        names = os.listdir(directory)
    except OSError:
        return False
    return any(name.startswith(stem) and name.removeprefix(stem).isdigit() for name in names)
