"""What several checks ask of this machine, asked once."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from functools import cached_property

from opkiln.decision import policy
from opkiln.errors import ToolchainError
from opkiln.model import CPU, CUDA
from opkiln.settings import override, settings
from opkiln.store.layers import Store
from opkiln.toolchain import choice, torch_sdk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from opkiln.devices.nvidia import Devices
    from opkiln.model import DeviceCompiler, Toolchain, TorchSDK


class Here:
    """This machine, as the settings in force describe it. Every answer is kept."""

    @cached_property
    def store(self) -> Store:
        """The store, as loads find it."""
        return Store()

    @cached_property
    def torch(self) -> TorchSDK | None:
        """The torch of this interpreter. Raises OSError where it cannot be read."""
        return torch_sdk.find()

    @cached_property
    def host(self) -> Toolchain | ToolchainError:
        """The host compiler, or why there is none."""
        return self._chosen(CPU)

    @property
    def compiler(self) -> Toolchain | None:
        """The host compiler, or None."""
        return None if isinstance(self.host, ToolchainError) else self.host

    @cached_property
    def never_compiles(self) -> str:
        """Why nothing is ever compiled here, by the settings; empty where something may be."""
        return policy.never_compiles()

    @cached_property
    def cuda(self) -> DeviceCompiler | ToolchainError:
        """The nvcc that builds use, or why there is none."""
        return self.device_compiler(CUDA)

    def device_compiler(self, backend: str) -> DeviceCompiler | ToolchainError:
        """A backend's compiler of device code, or why there is none."""
        found = self._chosen(backend)
        if isinstance(found, ToolchainError):
            return found
        assert found.device is not None
        return found.device

    @cached_property
    def nvidia(self) -> Devices:
        """The NVIDIA GPUs of this machine."""
        from opkiln.devices import nvidia

        return nvidia.devices(self.store.memory)

    @cached_property
    def scratch(self) -> str:
        """Where probes may write: the temporary directory of the settings, if it can be used."""
        wanted = settings.tmpdir or "/tmp"
        for place in (wanted, "/tmp", "/var/tmp", "/dev/shm"):
            if os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK):
                return place
        return wanted

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Probes write where they can: that TMPDIR cannot be used is one finding, not ten."""
        with override(tmpdir=self.scratch):
            yield

    def _chosen(self, backend: str) -> Toolchain | ToolchainError:
        with self.probing():
            try:
                return choice.choose(self.store.memory, backend)
            except ToolchainError as error:
                return error


def interpreter() -> str:
    """This Python, as a command: ``python`` where that is what PATH leads to."""
    import shlex

    from opkiln.toolchain import find

    program = sys.executable or "python3"
    for name in ("python", "python3"):
        # The path, not the file behind it: that of a virtual environment is a link to the system's.
        if find.first(name) == program:
            return name
    return shlex.quote(program)


def pip(*words: str) -> str:
    """A pip command for the environment of this interpreter."""
    import shlex

    return f"{interpreter()} -m pip {shlex.join(words)}"


def of_this_python(command: str) -> str:
    """A hint's ``pip`` as that of this interpreter; another command as it is."""
    return f"{interpreter()} -m {command}" if command.startswith("pip ") else command
