"""The arguments and results of checks: facts that several checks need, and a diagnosis."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

from opkiln.base.build_model import DeviceCompiler, Toolchain, TorchSDK
from opkiln.base.forks import cached_property
from opkiln.base.model import CPU, CUDA
from opkiln.errors import OpkilnError, SettingError, ToolchainError
from opkiln.machine.devices.nvidia import NvidiaDevices
from opkiln.machine.toolchain import choice, torch_sdk
from opkiln.run.process import capture, python_code, signal_name
from opkiln.settings import override, settings, whole_environment
from opkiln.store.layers import Store

Check = Callable[["Facts"], "Diagnosis"]

PASS, SKIP, WARN, FAIL = "PASS", "SKIP", "WARN", "FAIL"  # from good to bad

# The first words of hints that are commands. Any other hint is prose.
PROGRAMS = {
    "apt-get", "c++filt", "chmod", "command", "conda", "df", "ds_report", "echo", "export", "head",
    "ls", "mkdir", "mv", "nm", "opkiln", "pip", "python", "python3", "readelf", "sha256sum",
    "ulimit", "unset",
}  # fmt: skip

_LONGEST = 120.0  # seconds: importing torch from a network file system is slow


class Diagnosis(NamedTuple):
    """A verdict, the facts behind it, and a command to copy into a shell."""

    verdict: str
    evidence: str
    command: str = ""  # empty if nothing needs to be done, or no command helps


# All is well.
passed = partial(Diagnosis, PASS)
# The check does not apply here, or is not possible; the evidence says why.
skipped = partial(Diagnosis, SKIP)
# It works, but not as well as it could, or not as the user asked.
warned = partial(Diagnosis, WARN)
# Something that builds or loads of ops need does not work.
failed = partial(Diagnosis, FAIL)


def copyable_command(hint: str) -> str:
    """The command in an error's hint, in a form that a shell takes.

    A remark after the command is removed, and a variable alone gets its ``export``. The result is
    empty for any other hint: prose, or a line of Python.
    """
    command = hint.partition("    ")[0].strip()
    try:
        words = shlex.split(command)
    except ValueError:
        return ""  # an apostrophe of prose
    program = next((word for word in words if not re.match(r"[^\W\d]\w*=", word)), "")
    if not program:
        return f"export {command}" if words else ""
    return command if program in PROGRAMS or program.startswith("/") else ""


def join(*parts: str | OpkilnError) -> str:
    """The parts that are not empty, on one line. The parts of an error: what happened, and why."""
    texts: list[str] = []
    for part in parts:
        texts += [part.what, *part.why.splitlines()] if isinstance(part, OpkilnError) else [part]
    return "; ".join(" ".join(text.split()).rstrip(";") for text in texts if text.strip())


class Missing(Exception):
    """A check needs something that is missing. The check is skipped, and another one reports it."""


class Facts:
    """The facts about this machine, with the current settings. Each is found out once."""

    @cached_property
    def store(self) -> Store:
        """The store, as loads find it."""
        return Store()

    @property
    def root(self) -> str:
        """The layer of the store that is written to. Raises Missing."""
        if self.store.root is None:
            raise Missing("nothing can be written: see store")
        return self.store.root

    @cached_property
    def torch(self) -> TorchSDK | None:
        """The torch of this interpreter. Raises OSError if it cannot be read."""
        return torch_sdk.find()

    @property
    def installed_torch(self) -> TorchSDK:
        """The same. Raises Missing if there is none."""
        if self.torch is None:
            raise Missing("torch is not installed")
        return self.torch

    @cached_property
    def host(self) -> Toolchain | ToolchainError:
        """The host compiler, or why there is none."""
        return self._choose(CPU)

    def need_compiler(self, otherwise: str) -> Toolchain:
        """The host compiler. Raises Missing with the text ``otherwise`` if there is none."""
        if isinstance(self.host, ToolchainError):
            raise Missing(otherwise)
        return self.host

    @cached_property
    def cuda(self) -> DeviceCompiler | ToolchainError:
        """The nvcc that builds use, or why there is none."""
        return self.device_compiler(CUDA)

    def device_compiler(self, backend: str) -> DeviceCompiler | ToolchainError:
        """A backend's device compiler, or why there is none."""
        found = self._choose(backend)
        if isinstance(found, ToolchainError):
            return found
        assert found.device is not None
        return found.device

    @cached_property
    def nvidia(self) -> NvidiaDevices:
        """The NVIDIA GPUs of this machine."""
        from opkiln.machine.devices import nvidia

        return nvidia.devices(self.store.memory)

    @cached_property
    def scratch(self) -> str:
        """A writable directory for probes: OPKILN_TMPDIR, if it is usable."""
        wanted = settings.tmpdir or "/tmp"
        for place in (wanted, "/tmp", "/var/tmp", "/dev/shm"):
            if os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK):
                return place
        return wanted

    def probing(self) -> AbstractContextManager[object]:
        """Gives probes a writable directory, so that a bad TMPDIR is one finding, not ten."""
        return override(tmpdir=self.scratch)

    def _choose(self, backend: str) -> Toolchain | ToolchainError:
        with self.probing():
            try:
                return choice.choose(self.store.memory, backend)
            except ToolchainError as error:
                return error


def run_check(check: Check, here: Facts) -> Diagnosis:
    """The diagnosis of a check. A check that raises has failed, or is skipped."""
    try:
        return check(here)
    except Missing as reason:
        return skipped(str(reason))
    except SettingError as error:
        return skipped(f"not possible while {error.what}")  # `settings` reports that
    except OpkilnError as error:
        return failed(join(error), copyable_command(error.hint))
    except Exception as error:
        return failed(f"{type(error).__name__}: {error}")


def ask_child(code: str, *arguments: str) -> tuple[Any, str]:
    """(the value of ``answer`` after ``code`` ran, why there is none). One of them is empty.

    Code of other packages, and code that imports torch, runs in such a child process, so that a
    crash is reported like any other fault.
    """
    argv = python_code(f"{code}\nimport json\nprint()\nprint(json.dumps(answer))", *arguments)
    done = capture(argv, env=whole_environment(), timeout=_LONGEST)
    lines = done.output.strip().splitlines()
    if done.returncode == 0 and lines:
        try:
            return json.loads(lines[-1]), ""
        except json.JSONDecodeError:
            pass  # it ended early, and printed something else
    said = done.stderr.strip().splitlines()[-1:]
    return None, "; ".join([f"the child {describe_exit(done.returncode)}", *said])


def describe_exit(returncode: int) -> str:
    """How a process ended, in words."""
    if returncode < 0:
        return f"died of {signal_name(returncode)}"
    return f"ended with {returncode}"
