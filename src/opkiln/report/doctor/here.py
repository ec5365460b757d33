"""What the checks share: facts about this machine, found out once, and child processes.

Code of other packages, and code that imports torch, runs in a child: if it crashes, that is a
finding.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from opkiln.decision import policy
from opkiln.errors import ToolchainError
from opkiln.model import CPU, CUDA
from opkiln.process import capture, python_code, signal_name
from opkiln.settings import override, settings, whole_environment
from opkiln.store.layers import Store
from opkiln.toolchain import choice, torch_sdk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from opkiln.build_model import DeviceCompiler, Toolchain, TorchSDK
    from opkiln.devices.nvidia import Devices

_LONGEST = 120.0  # seconds: importing torch from a network file system is slow


class Here:
    """This machine, with the current settings. Every answer is kept."""

    @cached_property
    def store(self) -> Store:
        """The store, as loads find it."""
        return Store()

    @cached_property
    def torch(self) -> TorchSDK | None:
        """The torch of this interpreter. Raises OSError if it cannot be read."""
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
        """A backend's device compiler, or why there is none."""
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
        """A writable directory for probes: OPKILN_TMPDIR, if it is usable."""
        wanted = settings.tmpdir or "/tmp"
        for place in (wanted, "/tmp", "/var/tmp", "/dev/shm"):
            if os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK):
                return place
        return wanted

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Lets probes use a writable directory, so that a bad TMPDIR is one finding and not ten."""
        with override(tmpdir=self.scratch):
            yield

    def _chosen(self, backend: str) -> Toolchain | ToolchainError:
        with self.probing():
            try:
                return choice.choose(self.store.memory, backend)
            except ToolchainError as error:
                return error


# Child processes


def child_answer(code: str, *arguments: str) -> tuple[Any, str]:
    """(the JSON in the last line that ``code`` prints, why there is none). One of them is empty."""
    done = capture(python_code(code, *arguments), env=whole_environment(), timeout=_LONGEST)
    lines = done.output.strip().splitlines()
    if done.returncode == 0 and lines:
        try:
            return json.loads(lines[-1]), ""
        except json.JSONDecodeError:
            pass  # it ended early, and printed something else
    said = done.stderr.strip().splitlines()[-1:]
    return None, "; ".join([f"the child {how_it_ended(done.returncode)}", *said])


def how_it_ended(returncode: int) -> str:
    """How a process ended, in words."""
    if returncode < 0:
        return f"died of {signal_name(returncode)}"
    return f"ended with {returncode}"
