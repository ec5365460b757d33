"""The records of a build: Target, TorchSDK, Toolchain, Step and Plan.

All are immutable and hold only immutable values.
"""

from __future__ import annotations

import os

from opkiln.base.lazy import Record
from opkiln.base.model import OpSpec


class Target(Record):
    """What to build for. It does not depend on the machine that runs the build."""

    backend: str  # cpu, cuda, rocm, xpu
    system: str  # linux
    machine: str  # x86_64, aarch64
    cpu: str  # a psABI level: x86-64-v4; or armv8-a
    cpu_features: tuple[str, ...]  # beyond the level, explicit and sorted
    abi_tag: str  # torch-stable-2.10[-cuda13], torch-2.13.0+cpu-cxx11-cpython-311, none
    debug: bool = False
    flags: tuple[tuple[str, tuple[str, ...]], ...] = ()  # the user's own: (("cxxflags", (...)),)
    archs: tuple[str, ...] = ()  # of the device, canonical, as the op's filter left them: 9.0a+PTX


class TorchSDK(Record):
    """The facts about torch that a build needs, read from its files without importing it."""

    path: str  # the package directory
    version: str
    identity: str  # digest of its version.py
    cuda: str | None
    hip: str | None
    cxx11_abi: bool

    @property
    def wheels(self) -> str:
        """The directory that NVIDIA's wheels share: the anchor "wheels"."""
        return os.path.join(os.path.dirname(self.path), "nvidia")


NVCC, NVRTC, HIPCC, ICPX, SYCL_RUNTIME = "nvcc", "nvrtc", "hipcc", "icpx", "sycl-rt"


class DeviceCompiler(Record):
    """A compiler of device code, and what is known of it."""

    family: str  # one of these
    path: str  # absolute, of the program itself, not of a script that runs it
    home: str  # the toolkit's root: the anchor "toolkit"
    version: str  # 13.0, 5.2.3
    identity: str  # digest over the programs and files that decide its output
    archs: tuple[str, ...]  # what it says it can compile for: 7.5, 8.0, …
    accepts: frozenset[str]  # flags that a probe has shown to work
    include_dirs: tuple[str, ...]  # of its runtime's headers
    library_dirs: tuple[str, ...]  # of its runtime's libraries
    host: str = ""  # the host compiler it must use, if that is not the toolchain's own
    # Directories below the anchor "wheels", with headers that the toolkit lacks.
    wheel_include_dirs: tuple[str, ...] = ()
    # NVRTC: libnvrtc and its builtins. ``path`` is the Python that runs opkiln's driver of them.
    libraries: tuple[str, ...] = ()


class Toolchain(Record):
    """The compilers for a target, and what is known of them."""

    family: str  # gcc, clang
    cxx: str  # absolute path
    version: str
    machine: str  # what it compiles for: x86_64-linux-gnu
    identity: str  # digest over the programs that decide its output
    accepts: frozenset[str]  # flags that a compile probe has shown to work
    include_dirs: tuple[str, ...]  # its own search path, in order
    launcher: str | None = None
    torch: TorchSDK | None = None
    python_include: str = ""
    device: DeviceCompiler | None = None
    shared_runtime: str = ""  # libstdc++ to link, for a compiler that would link its own static one
    cross: bool = False  # for another machine than this one, whose torch is not here to link
    tools: tuple[str, ...] = ()  # the assembler, linker and so on that it says it starts
    environment: tuple[tuple[str, str], ...] = ()  # the user's variables that reach it


class Anchored(Record):
    """An argument that holds a path below a named anchor: prefix + anchor's path + rest. A plan is
    made of these, so that it (and the keys made of it) says ``src/cpu.cpp`` wherever the package is
    installed and whatever staging directory a build gets."""

    prefix: str
    anchor: str  # src, opkiln, stage, torch, python, toolkit, wheels, threads, abs
    path: str
    suffix: str = ""


Arg = str | Anchored


class Step(Record):
    """One process to run: its command, its inputs and its one output below ``stage``."""

    # compile, stub (a library to link in the place of torch's), device-link, link
    kind: str
    output: str  # relative to the staging directory
    words: tuple[Arg, ...]  # compile: the compiler and its flags; else the whole command
    file: Arg = ""  # compile: the file to compile
    source: str = ""  # compile: its name, for people
    inputs: tuple[str, ...] = ()  # link, device-link: outputs of other steps
    memory: int = 512 << 20  # bytes that each thread is expected to need
    threads: int = 1  # the most it can use; the number it gets replaces the anchor "threads"
    plain_paths: bool = False  # the compiler hands its arguments to a shell

    @property
    def argv(self) -> tuple[Arg, ...]:
        """The whole command."""
        if not self.file:
            return self.words
        return (*self.words, "-c", self.file, "-o", Anchored("", "stage", self.output))


class Plan(Record):
    """The exact steps that turn a spec into an artifact for a target; JIT and AOT run the same."""

    spec: OpSpec
    target: Target
    toolchain: Toolchain
    steps: tuple[Step, ...]
    environment: tuple[tuple[str, str], ...]
    output: str  # the file that is the artifact, relative to stage
