"""Every environment variable opkiln reads: typed, documented, in one table.

This is the only module that touches ``os.environ``, and it only ever reads it. The table below
is also the documentation: ``docs/settings.md`` is generated from it (``report/forms.py``)
and a test holds the two together.

A value is read when it is asked for, so a program may set variables after ``import opkiln``.
``override(...)`` sets values for a scope, in this thread and what it starts, without touching the
environment; tests and callers use it instead of writing variables.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from contextvars import ContextVar

from opkiln.errors import SettingError
from opkiln.trust import followed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

# The form of manifests. Bump it when one version of opkiln cannot read the entries of the other.
# Schema 1 did not record what a library needs from the machine that loads it.
SCHEMA = 2
# The directory of this schema's entries, in stores, layers, wheels and bundles. It follows from the
# schema, so that two versions live side by side: in one directory, each would take the other's
# entries for damaged, and build them again for ever.
LAYOUT = f"v{SCHEMA - 1}"

_OVERRIDES: ContextVar[dict[str, Any] | None] = ContextVar("opkiln_settings", default=None)


class Setting:
    """One documented variable. As a class attribute it reads as its parsed value."""

    __slots__ = (
        "aliases", "default", "doc", "empty_counts", "field", "group", "parse", "shown", "variable",
    )  # fmt: skip

    def __init__(
        self,
        variable: str,
        parse: Callable[[str], Any],
        default: Any,
        doc: str,
        *,
        aliases: tuple[str, ...] = (),
        shown: str = "",
        group: str = "opkiln",
        empty_counts: bool = False,
    ) -> None:
        self.variable = variable
        self.parse = parse
        self.default = default
        self.doc = doc
        self.aliases = aliases
        self.shown = shown  # how the default reads in the docs, where it is not its repr
        self.group = group
        self.empty_counts = empty_counts  # an empty variable is a value of its own
        self.field = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.field = name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self.resolve()[0]

    def resolve(self) -> tuple[Any, str]:
        """The value in force and where it comes from: a variable's name, ``default``, ``call``."""
        overrides = _OVERRIDES.get()
        if overrides is not None and self.field in overrides:
            return overrides[self.field], "call"
        for name in (self.variable, *self.aliases):
            text = os.environ.get(name)
            # An empty variable means "not set", as shells' `VAR= cmd` is used. Of GPUs it means
            # "none": that is how a job hides them all.
            if text or (text is not None and self.empty_counts):
                try:
                    return self.parse(text), name
                except ValueError as error:
                    raise SettingError(
                        f"{name}={text!r} is not a valid value: {error}",
                        why=self.doc,
                        hint=f"unset {name}",
                    ) from None
        return self.default, "default"


def _choice(*values: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in values:
            raise ValueError("expected " + " or ".join(values))
        return text.lower()

    return parse


def _switch(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("1", "on", "true", "yes"):
        return True
    if lowered in ("0", "off", "false", "no"):
        return False
    raise ValueError("expected 1 or 0, on or off")


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError("expected a whole number of at least 1")
    return int(text)


def _number(text: str) -> float:
    """A number, or one that is in no range."""
    try:
        return float(text)
    except ValueError:
        return -1.0


def _seconds(text: str) -> float:
    value = _number(text)
    if not 0 < value < 1e9:
        raise ValueError("expected a positive number of seconds")
    return value


_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_size(text: str) -> int:
    """Bytes from ``512M``, ``4GiB``, ``1048576``. Raises ValueError."""
    lowered = text.strip().lower().removesuffix("ib").removesuffix("b")
    unit = lowered[-1:] if lowered[-1:] in ("k", "m", "g", "t") else ""
    number = _number(lowered.removesuffix(unit) if unit else lowered)
    if not 0 < number < 1e18:
        raise ValueError("expected a size such as 512M or 4G")
    return int(number * _UNITS[unit])


def _words(text: str) -> tuple[str, ...]:
    import shlex

    return tuple(shlex.split(text))


def _command(text: str) -> tuple[str, ...]:
    """A program, or a launcher and a program: ``g++``, ``/opt/my gcc/g++``, ``ccache g++``."""
    return (text,) if os.access(text, os.X_OK) else _words(text)


def _paths(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(os.pathsep) if part)


def _directories(text: str) -> tuple[str, ...]:
    # A compiler runs in a directory of its own; these are meant as seen from the user's.
    return tuple(os.path.abspath(part) for part in _paths(text))


def _keys(text: str) -> tuple[str, ...]:
    # Empty is no list of keys: `OPKILN_TRUSTED_KEYS=$KEY` must not trust everybody for lack of KEY.
    if not (words := _words(text)):
        raise ValueError("it has no key")
    import re

    for word in words:
        if word.startswith("ed25519:") and not re.fullmatch("ed25519:[A-Za-z0-9+/]{43}=", word):
            raise ValueError(f"{word} is no public key, which has 43 characters and =")
    return words


def _deepspeed(text: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Which resorts serve each of DeepSpeed's ops; those that are not named, under ""."""
    general: list[str] = []
    named: dict[str, tuple[str, ...]] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        op, equals, resort = word.rpartition("=")
        if resort not in ("ops", "engine", "off") or (equals and not op.isidentifier()):
            raise ValueError(f"{word!r} is not ops, engine, off or OP=one of these")
        if equals:
            named[op] = () if resort == "off" else (resort,)
        else:
            general.append(resort)
    if "off" in general and len(general) > 1:
        raise ValueError("off goes with no other")
    chosen = tuple(each for each in ("ops", "engine") if each in general)
    return (("", chosen if general else ("ops", "engine")), *named.items())


def _ops(text: str) -> tuple[str, ...]:
    """Names of ops; those that a file records, under "1"."""
    if text.lower() in ("0", "off", "false", "no"):
        return ()
    if text.lower() in ("1", "on", "true", "yes"):
        return ("1",)
    return tuple(word for word in text.replace(",", " ").split() if word)


def _gfx_version(text: str) -> tuple[int, ...]:
    words = text.split(".")
    if len(words) != 3 or not all(word.isascii() and word.isdigit() for word in words):
        raise ValueError("expected a version such as 10.3.0")
    return tuple(map(int, words))


class Settings:
    """The table. Attribute access gives the value in force now."""

    # Where things are kept
    cache_dir = Setting(
        "OPKILN_CACHE_DIR", str, None,
        "Root of the writable store. A directory that others can write to, or that belongs to "
        "somebody else, is not used: a private one is, and a warning says so.",
        shown="`$XDG_CACHE_HOME/opkiln` or `~/.cache/opkiln`",
    )  # fmt: skip
    store_layers = Setting(
        "OPKILN_STORE_LAYERS", _paths, (),
        "Read-only stores below the writable one, first match wins, separated by `:`. "
        "Naming a directory here is what makes it trusted.",
        shown="none",
    )  # fmt: skip
    trusted_keys = Setting(
        "OPKILN_TRUSTED_KEYS", _keys, None,
        "Public keys (`ed25519:…`), or files with one on each line, separated by blanks. Where it "
        "is set, a bundle is only imported, or used as a layer, if one of them has signed it. Set "
        "and empty, it is an error.",
        shown="none: bundles need no signature", empty_counts=True,
    )  # fmt: skip
    runtime_dir = Setting(
        "OPKILN_RUNTIME_DIR", str, None,
        "Node-local directory for the host-wide build budget.",
        shown="`/dev/shm/opkiln-<uid>` or `<tmp>/opkiln-<uid>`",
    )  # fmt: skip
    tmpdir = Setting(
        "OPKILN_TMPDIR", str, None,
        "Node-local directory in which builds are staged; each build makes a private one inside.",
        aliases=("TMPDIR",), shown="`/tmp`",
    )  # fmt: skip
    cache_max_size = Setting(
        "OPKILN_CACHE_MAX_SIZE", parse_size, 20 << 30,
        "Size that `opkiln cache gc` shrinks the store to, oldest use first.", shown="20G",
    )  # fmt: skip

    # What happens
    mode = Setting(
        "OPKILN_MODE",
        _choice("auto", "native", "cached", "sealed", "needed", "source", "reference"), "auto",
        "Whether to compile, and what to do otherwise. `auto`: use what is cached or installed, "
        "else compile, else run the op's reference with a warning. `native`: as `auto`, but an op "
        "that would fall back is an error. `cached`: never compile. `sealed`: never compile or "
        "fall back. `needed`: compile only ops that have no reference. `source`: as `auto`, but "
        "ignore the libraries that packages were installed with. `reference`: run the reference of "
        "every op that has one.",
    )  # fmt: skip
    patch_torch = Setting(
        "OPKILN_PATCH_TORCH", _switch, False,
        "Extensions of programs that use `torch.utils.cpp_extension` are built by opkiln. "
        "`opkiln run` sets it.", shown="off",
    )  # fmt: skip
    deepspeed = Setting(
        "OPKILN_DEEPSPEED", _deepspeed, (("", ("ops", "engine")),),
        "What DeepSpeed's builders load where opkiln serves them: `ops` opkiln's own ops, `engine` "
        "DeepSpeed's sources built by opkiln, both in this order; `off` what DeepSpeed builds. "
        "`OP=ops`, `OP=engine` and `OP=off` say it of one op: `cpu_adam=engine,quantizer=off`.",
        shown="`ops,engine`",
    )  # fmt: skip
    check = Setting(
        "OPKILN_CHECK", _switch, False,
        "Run the native version and the reference of every op declared with `@opkiln.op`, and "
        "compare what they give; the first difference is an error. For tests and for the search "
        "for a wrong kernel: a call takes several times as long.",
    )  # fmt: skip
    record = Setting(
        "OPKILN_RECORD", str, None,
        "A file to which each process appends the ops that it loads, for "
        "`opkiln build --recorded FILE`.", shown="none",
    )  # fmt: skip
    build_ops = Setting(
        "OPKILN_BUILD_OPS", _switch, False,
        "When a package is installed: precompile all its ops, skipping those that cannot be built "
        "here. `OPKILN_BUILD_<OP>` (`DS_BUILD_<OP>`) decides for one op: `1` builds it or fails, "
        "`0` leaves it out.",
        aliases=("DS_BUILD_OPS",), shown="off",
    )  # fmt: skip
    build_targets = Setting(
        "OPKILN_BUILD_TARGETS", str, None,
        "What ops are precompiled for when a package is installed: "
        "`cuda:8.0,9.0a+PTX;cpu:x86-64-v3`, as `opkiln build --target` takes them, separated by "
        "`;`.",
        shown="three levels of this machine's CPU family, and the GPUs of `OPKILN_CUDA_ARCH_LIST`, "
        "else those here, else all that nvcc knows",
    )  # fmt: skip
    build_string = Setting(
        "DS_BUILD_STRING", str, None,
        "Marks the version of a package that is built: `cu130` gives `1.0+cu130`, `.dev7` gives "
        "`1.0.dev7`.",
        shown="none", group="compiler",
    )  # fmt: skip

    accelerator = Setting(
        "OPKILN_ACCELERATOR", str.lower, None,
        "The accelerator to use, by name: `cuda`, `rocm`, `xpu`, `hpu`, `npu`, `mlu`, `sdaa`, "
        "`supa`, `mps`, `cpu`, or that of another package. One that has no device here is an "
        "error.",
        aliases=("DS_ACCELERATOR",), shown="the first one with a device",
    )  # fmt: skip

    device = Setting(
        "OPKILN_DEVICE", _choice("emulated"), None,
        "`emulated`: CUDA kernels of ops written with `op.h` run on the CPU, on CPU tensors, and "
        "their races, bounds and barriers are checked. For tests on machines without a GPU; see "
        "[emulator.md](emulator.md).",
        shown="none: kernels run on the GPU",
    )  # fmt: skip

    # How it is built
    cxx = Setting(
        "OPKILN_CXX", _command, None,
        "The host C++ compiler, a name on PATH or a path; a launcher may come before it "
        "(`ccache g++`).",
        aliases=("CXX",), shown="the first of `g++`, `clang++`, `c++` on PATH that works",
    )  # fmt: skip
    torch_dir = Setting(
        "OPKILN_TORCH_DIR", str, None,
        "torch's package directory, for builds by a Python that has no torch of its own, such as "
        "that of an isolated build environment.",
        shown="the torch that is imported",
    )  # fmt: skip
    cxx_aarch64 = Setting(
        "OPKILN_CXX_AARCH64", str, None,
        "The C++ compiler for aarch64 on another machine (`--target cpu:armv8-a`), a name on PATH "
        "or a path.", shown="`aarch64-linux-gnu-g++`",
    )  # fmt: skip
    cpu = Setting(
        "OPKILN_CPU", str, "native",
        "The CPU to build for: `native`, a psABI level (`x86-64-v3`), or either with features "
        "(`x86-64-v3+avx512f`).",
    )  # fmt: skip
    debug = Setting(
        "OPKILN_DEBUG", _switch, False, "Build with `-O0 -g3` instead of `-O3`.", shown="off",
    )  # fmt: skip
    cppflags = Setting(
        "CPPFLAGS", _words, (),
        "Flags added to every compile, before the author's. nvcc takes "
        "macros and include directories itself and hands the rest to its host compiler; one with a "
        "comma or a character that a shell reads is refused.",
        shown="none", group="compiler",
    )  # fmt: skip
    cxxflags = Setting(
        "OPKILN_CXXFLAGS", _words, (),
        "Flags added to every compile of C++, SYCL's too, after the author's; nvcc and hipcc are "
        "given those of `OPKILN_CUDAFLAGS`.",
        aliases=("CXXFLAGS",), shown="none",
    )  # fmt: skip
    ldflags = Setting(
        "OPKILN_LDFLAGS", _words, (), "Flags added to every link, after the author's.",
        aliases=("LDFLAGS",), shown="none",
    )  # fmt: skip
    cpath = Setting(
        "CPATH", _directories, (), "Include directories; each enters the command line as `-I`.",
        shown="none", group="compiler",
    )  # fmt: skip
    cplus_include_path = Setting(
        "CPLUS_INCLUDE_PATH", _directories, (),
        "Include directories; each enters the command line as `-isystem`.",
        shown="none", group="compiler",
    )  # fmt: skip
    library_path = Setting(
        "LIBRARY_PATH", _directories, (), "Library directories; each enters the link line as `-L`.",
        shown="none", group="compiler",
    )  # fmt: skip

    # CUDA
    cuda = Setting(
        "OPKILN_CUDA", _choice("auto", "nvcc", "nvrtc"), "auto",
        "What compiles CUDA sources. `nvcc`: a CUDA toolkit. `nvrtc`: the library of this name, "
        "which torch's CUDA wheels bring along, and the C++ compiler; for sources on "
        "`opkiln/op.h`. `auto`: `nvcc` where there is a toolkit, else `nvrtc`.",
    )  # fmt: skip
    cuda_home = Setting(
        "OPKILN_CUDA_HOME", str, None,
        "The CUDA toolkit to use. It is used or refused, never replaced by another.",
        shown="the toolkit that fits torch best",
    )  # fmt: skip
    system_cuda_home = Setting(
        "CUDA_HOME", str, None, "A CUDA toolkit, one of those that are looked at.",
        shown="none", group="compiler",
    )  # fmt: skip
    cuda_path = Setting(
        "CUDA_PATH", str, None, "A CUDA toolkit, one of those that are looked at.",
        shown="none", group="compiler",
    )  # fmt: skip
    cuda_arch_list = Setting(
        "OPKILN_CUDA_ARCH_LIST", str, None,
        "The GPU architectures to build for: `8.0;9.0a;10.0f+PTX`, `Hopper`, `native`, `all`, "
        "`all-major` (`opkiln arch LIST` shows what a list comes to).",
        aliases=("TORCH_CUDA_ARCH_LIST",), shown="those of this machine's GPUs",
    )  # fmt: skip
    skip_cuda_check = Setting(
        "OPKILN_SKIP_CUDA_CHECK", _switch, False,
        "Take a CUDA toolkit of another major version than torch's.",
        aliases=("DS_SKIP_CUDA_CHECK",), shown="off",
    )  # fmt: skip
    ccbin = Setting(
        "NVCC_CCBIN", str, None, "The host compiler of nvcc, a name on PATH or a path.",
        aliases=("CUDAHOSTCXX",), shown="the host C++ compiler", group="compiler",
    )  # fmt: skip
    cudaflags = Setting(
        "OPKILN_CUDAFLAGS", _words, (),
        "Flags added to every compile of device code, after the author's; `-lineinfo` is for "
        "profilers.",
        aliases=("CUDAFLAGS",), shown="none",
    )  # fmt: skip
    debug_cuda = Setting(
        "DS_DEBUG_CUDA", _switch, False,
        "Show each kernel's registers, shared memory and spills when it is compiled.",
        shown="off", group="compiler",
    )  # fmt: skip
    nvcc_threads = Setting(
        "NVCC_THREADS", _positive, None,
        "Architectures that one nvcc compiles at once; each takes a CPU of the budget.",
        aliases=("DS_NVCC_THREADS",), shown="as many as there are and fit", group="compiler",
    )  # fmt: skip
    cuda_visible_devices = Setting(
        "CUDA_VISIBLE_DEVICES", str, None,
        "The GPUs that this process may use: indices, UUIDs, MIG UUIDs. Empty: none.",
        shown="all", group="job", empty_counts=True,
    )  # fmt: skip
    cuda_device_order = Setting(
        "CUDA_DEVICE_ORDER", str, "FASTEST_FIRST", "How GPUs are counted.", group="job",
    )  # fmt: skip

    # ROCm
    rocm_home = Setting(
        "OPKILN_ROCM_HOME", str, None,
        "The ROCm installation to use. It is used or refused, never replaced by another.",
        aliases=("ROCM_HOME", "ROCM_PATH"), shown="found by `hipcc` on PATH, `/opt/rocm*`",
    )  # fmt: skip
    rocm_arch_list = Setting(
        "OPKILN_ROCM_ARCH_LIST", str, None,
        "The GPU architectures to build for: `gfx90a;gfx942:sramecc+`, `native`.",
        aliases=("PYTORCH_ROCM_ARCH",), shown="those of this machine's GPUs",
    )  # fmt: skip
    gfx_override = Setting(
        "HSA_OVERRIDE_GFX_VERSION", _gfx_version, None,
        "The architecture that the ROCm runtime takes every AMD GPU for, as `10.3.0`.",
        shown="each GPU's own", group="job",
    )  # fmt: skip
    rocr_visible_devices = Setting(
        "ROCR_VISIBLE_DEVICES", str, None,
        "The AMD GPUs that this process may use, by index or UUID. Empty: none.",
        shown="all", group="job", empty_counts=True,
    )  # fmt: skip
    hip_visible_devices = Setting(
        "HIP_VISIBLE_DEVICES", str, None,
        "Which of the GPUs that `ROCR_VISIBLE_DEVICES` leaves, counted among them. "
        "`CUDA_VISIBLE_DEVICES` says it where this one does not.",
        shown="all", group="job",
    )  # fmt: skip

    # SYCL
    sycl_cxx = Setting(
        "OPKILN_SYCL_CXX", str, None, "The SYCL compiler, a name on PATH or a path.",
        shown="`icpx`, `dpcpp`; else the runtime compiler of `intel-sycl-rt`",
    )  # fmt: skip
    cmplr_root = Setting(
        "CMPLR_ROOT", str, None, "The oneAPI compiler's directory, one of the places looked at.",
        shown="none", group="compiler",
    )  # fmt: skip

    ocl_icd_filenames = Setting(
        "OCL_ICD_FILENAMES", str, None,
        "OpenCL's drivers, by path. SYCL finds a CPU only through one: "
        "`<env>/lib/libintelocl.so` of `intel-opencl-rt`.",
        shown="those in `/etc/OpenCL/vendors`", group="job",
    )  # fmt: skip

    # The engine
    max_jobs = Setting(
        "OPKILN_MAX_JOBS", _positive, None,
        "Most steps this process runs at once. The host-wide budget (CPUs, cgroup, memory) holds "
        "besides.",
        aliases=("MAX_JOBS",), shown="the budget",
    )  # fmt: skip
    memory = Setting(
        "OPKILN_MEMORY", parse_size, None, "Memory that all builds of this user may take together.",
        shown="80% of the cgroup's or the machine's",
    )  # fmt: skip
    build_timeout = Setting(
        "OPKILN_BUILD_TIMEOUT", _seconds, 1800.0,
        "The longest time, in seconds, in which a load may get no further. It is for a step, not "
        "for a build: a build of ten long steps may take ten times as long. It counts from the "
        "start of the load, and again from each step that ends. A step that is still running then "
        "is ended; so is a question to a compiler (1 or 2 minutes at most) and the load of a new "
        "library (2 minutes at most). A wait for another process has the same limit: it counts "
        "from the start of the load that waits, and again from each step that the other process "
        "finishes. All who wait for a build that took too long get its error at once.",
        shown="1800",
    )  # fmt: skip
    trace = Setting(
        "OPKILN_TRACE", str, None,
        "Write a Chrome/Perfetto trace of each build to this file (also `--trace FILE`).",
        shown="none",
    )  # fmt: skip
    progress = Setting(
        "OPKILN_PROGRESS", _choice("auto", "bar", "lines", "verbose", "quiet", "off"),
        "auto",
        "How a build reports on standard error: `bar`, `lines`, `verbose` (lines, and every "
        "command that is run), `quiet` (only that it has waited for another process for 5 seconds) "
        "or `off`. `load(verbose=False)` is `quiet` if this is unset. `auto` is a "
        "bar on a terminal and lines elsewhere; and nothing in ranks other than the first, or "
        "where the `opkiln` logger shows the lines.",
    )  # fmt: skip
    no_color = Setting(
        "NO_COLOR", bool, False, "Any value: no colour.", shown="off", group="terminal",
    )  # fmt: skip
    rank = Setting(
        "RANK", int, None, "This process's rank in a distributed job; only the first one reports.",
        aliases=("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "LOCAL_RANK"),
        shown="none", group="job",
    )  # fmt: skip

    # Jobs of several ranks
    ensure = Setting(
        "OPKILN_ENSURE", _ops, (),
        "Ops that all ranks of a job agree on when the program calls "
        "`torch.distributed.init_process_group`, by name, separated by commas; `1`: those in the "
        "file of `OPKILN_RECORD`. For programs under `opkiln run`; see [clusters.md](clusters.md).",
        shown="none",
    )  # fmt: skip
    job_secret = Setting(
        "OPKILN_JOB_SECRET", str, None,
        "What the ranks of a job authenticate their messages with in `opkiln.ensure`, the same for "
        "all: `openssl rand -hex 32`. Without it, whoever reaches the job's store is trusted.",
        shown="none",
    )  # fmt: skip
    world_size = Setting(
        "WORLD_SIZE", _positive, None, "How many ranks the job has.",
        aliases=("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"), shown="none", group="job",
    )  # fmt: skip
    master_addr = Setting(
        "MASTER_ADDR", str, None, "The host of the job's store.",
        shown="under Slurm, the first node of the step", group="job",
    )  # fmt: skip
    master_port = Setting(
        "MASTER_PORT", _positive, None, "The port of the job's store.",
        shown="under Slurm, one that follows from the job's number", group="job",
    )  # fmt: skip
    run_id = Setting(
        "TORCHELASTIC_RUN_ID", str, None, "The name of the job, in the keys of its store.",
        aliases=("SLURM_JOB_ID",), shown="none", group="job",
    )  # fmt: skip
    restart_count = Setting(
        "TORCHELASTIC_RESTART_COUNT", str, "0",
        "How often torchrun has restarted the ranks. What ranks said before is ignored.",
        aliases=("SLURM_RESTART_COUNT",), shown="0", group="job",
    )  # fmt: skip
    agent_store = Setting(
        "TORCHELASTIC_USE_AGENT_STORE", _switch, False,
        "Whether the store is served by the agent of torchrun, not by rank 0.",
        shown="off", group="job",
    )  # fmt: skip
    slurm_step = Setting(
        "SLURM_STEP_ID", str, "0", "The step of a Slurm job.", shown="0", group="job",
    )  # fmt: skip
    slurm_nodes = Setting(
        "SLURM_STEP_NODELIST", str, None, "The nodes of a Slurm step.",
        aliases=("SLURM_JOB_NODELIST",), shown="none", group="job",
    )  # fmt: skip

    # The user's surroundings
    home = Setting("HOME", str, None, "The user's home directory.", shown="none", group="system")
    xdg_cache_home = Setting(
        "XDG_CACHE_HOME", str, None, "The user's cache directory.", shown="`~/.cache`",
        group="system",
    )  # fmt: skip
    path = Setting(
        "PATH", _paths, ("/usr/local/bin", "/usr/bin", "/bin"), "Where programs are looked for.",
        shown="`/usr/local/bin:/usr/bin:/bin`", group="system",
    )  # fmt: skip


settings = Settings()

# What bears on how, where and whether a build runs, but not on which binary is the right one.
_INDIFFERENT = frozenset((
    "progress", "trace", "no_color", "rank", "max_jobs", "memory", "build_timeout", "tmpdir",
    "runtime_dir", "cache_max_size", "record", "mode", "build_ops",
    "build_targets", "build_string", "nvcc_threads", "patch_torch", "deepspeed",
    "cuda_visible_devices", "cuda_device_order", "rocr_visible_devices", "hip_visible_devices",
    "ensure", "job_secret", "world_size", "master_addr", "master_port",
    "run_id", "restart_count", "agent_store", "slurm_step", "slurm_nodes",
    "accelerator", "device",  # which of an op's backends serves is in its spec
    "path",  # which programs it leads to is in the receipt
))  # fmt: skip
_NAMES = frozenset(
    name
    for setting in vars(Settings).values()
    if isinstance(setting, Setting)
    for name in (setting.variable, *setting.aliases)
)
_VARIABLES = frozenset(
    name
    for setting in vars(Settings).values()
    if isinstance(setting, Setting) and setting.field not in _INDIFFERENT
    for name in (setting.variable, *setting.aliases)
)

# Variables that change what a compiler does behind its argv, and that nobody sets to mean opkiln.
# They never reach a compiler; `explain` names those that were set.
DROPPED = (
    "C_INCLUDE_PATH", "OBJC_INCLUDE_PATH", "GCC_EXEC_PREFIX", "COMPILER_PATH", "GCC_COMPARE_DEBUG",
    "DEPENDENCIES_OUTPUT", "SUNPRO_DEPENDENCIES", "LD_RUN_PATH", "LDEMULATION", "GNUTARGET",
    "COLLECT_NO_DEMANGLE", "CCC_OVERRIDE_OPTIONS", "CCC_ADD_ARGS",
    "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CFLAGS", "MAKEFLAGS", "SOURCE_DATE_EPOCH",
    "HIPCC_COMPILE_FLAGS_APPEND", "HIPCC_LINK_FLAGS_APPEND", "HIP_PATH", "HIP_CLANG_PATH",
    "HIP_PLATFORM", "DEVICE_LIB_PATH", "HCC_AMDGPU_TARGET",
)  # fmt: skip

# What a child process keeps of this one's environment. None of them decides what a compiler
# produces, given the toolchain's identity (which digests the very programs PATH leads to).
PASSED = (
    "PATH", "HOME", "USER", "LOGNAME", "LD_LIBRARY_PATH", "XDG_RUNTIME_DIR",
    "CCACHE_DIR", "CCACHE_CONFIGPATH", "CCACHE_MAXSIZE", "SCCACHE_DIR", "SCCACHE_SERVER_PORT",
    "CONDA_PREFIX", "ASAN_OPTIONS",
)  # fmt: skip


def table() -> tuple[Setting, ...]:
    """Every setting, in the order of the documentation."""
    return tuple(value for value in vars(Settings).values() if isinstance(value, Setting))


def origin_of(field: str) -> tuple[Any, str]:
    """A setting's value in force, and where it comes from: a variable, ``default`` or ``call``."""
    setting: Setting = vars(Settings)[field]
    return setting.resolve()


def misspelt() -> dict[str, str]:
    """Variables that look like settings and are not, each with the one that may be meant."""
    from difflib import get_close_matches

    known = sorted(_NAMES)
    found = {}
    for name in sorted(filter(_is_strange, os.environ)):
        close = get_close_matches(name, known, 1, 0.9 if name.startswith(_SWITCH) else 0.6)
        if close or not name.startswith(_SWITCH):
            found[name] = close[0] if close else ""
    return found


def unknown() -> list[str]:
    """``misspelt()`` in words."""
    return [
        f"unknown setting {name}" + (f"; did you mean {meant}?" if meant else "")
        for name, meant in misspelt().items()
    ]


_SWITCH = "OPKILN_BUILD_"  # an op's name may follow, so only a near miss of a setting is a mistake


def _is_strange(name: str) -> bool:
    return name.startswith("OPKILN_") and name not in _NAMES


def any_strange() -> bool:
    """Whether ``unknown()`` may have something to say: cheap, for the hit path."""
    return any(map(_is_strange, os.environ))


# How launchers tell a process its rank and the number of ranks. Within a Slurm job, mpirun's
# processes have the numbers of the batch script as well, so Slurm's come last.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)


def place_in_job() -> tuple[int, int] | None:
    """This process's rank and the number of ranks, as its launcher says; None outside a job.

    Raises SettingError.
    """
    for rank, size in _LAUNCHERS:
        if (first := os.environ.get(rank)) and (second := os.environ.get(size)):
            try:
                place = int(first), int(second)
            except ValueError:
                place = -1, 0
            if not 0 <= place[0] < place[1]:
                raise SettingError(
                    f"{rank}={first!r} and {size}={second!r} do not name a rank of a job",
                    hint=f"unset {rank} {size}",
                )
            return place
    return None


def child_environment() -> dict[str, str]:
    """The allow-listed part of this process's environment, for a compiler or another child."""
    passed = {name: os.environ[name] for name in PASSED if name in os.environ}
    if not passed.get("PATH"):
        # A compiler looks for its assembler and linker there, as we looked for the compiler.
        passed["PATH"] = os.pathsep.join(settings.path)
    return passed


def whole_environment() -> dict[str, str]:
    """A copy of everything, for a program of the user's, never for a compiler."""
    return dict(os.environ)


def dropped() -> tuple[str, ...]:
    """Names of the variables that are set here and kept away from every compiler."""
    return tuple(name for name in DROPPED if os.environ.get(name))


def build_switch(op: str, variables: tuple[str, ...] = ()) -> bool | None:
    """What ``OPKILN_BUILD_<OP>`` (``DS_BUILD_<OP>``) says of one op; None when neither is set."""
    return build_switch_of(op, variables)[0]


def build_switch_of(op: str, variables: tuple[str, ...] = ()) -> tuple[bool | None, str]:
    """As ``build_switch``, and the variable that says so. Raises SettingError."""
    stem, taken = op.upper(), _NAMES
    for name in (f"OPKILN_BUILD_{stem}", *variables, f"DS_BUILD_{stem}"):
        text = os.environ.get(name)
        # An op may be called `string`; the variable of that name is a setting all the same.
        if text and name not in taken:
            try:
                return _switch(text), name
            except ValueError as error:
                raise SettingError(f"{name}={text!r}: {error}", hint=f"unset {name}") from None
    return None, ""


def build_switches() -> list[str]:
    """The variables that are set here and look like ``OPKILN_BUILD_<OP>``."""
    taken = _NAMES
    set_here = (name for name, text in os.environ.items() if text)
    return sorted(n for n in set_here if n.startswith("OPKILN_BUILD_") and n not in taken)


def fingerprint() -> tuple[object, ...] | None:
    """Every variable that could bear on which binary is right, raw.

    None where ``override`` has a say in it: what was overridden is in no variable.
    """
    if not set(_OVERRIDES.get() or ()) <= _INDIFFERENT:
        return None
    # Most are not set, and asking for each of them takes longer than going through all that are.
    found = {name: os.environ[name] for name in os.environ if name in _VARIABLES}
    return (*sorted(found.items()), os.getcwd() if _relative(found) else None)


_PROGRAMS = (
    "OPKILN_CXX", "CXX", "NVCC_CCBIN", "CUDAHOSTCXX",
    "OPKILN_SYCL_CXX", "OPKILN_CXX_AARCH64",
)  # fmt: skip
_HOMES = (
    "OPKILN_CUDA_HOME", "CUDA_HOME", "CUDA_PATH", "OPKILN_ROCM_HOME", "ROCM_HOME", "ROCM_PATH",
    "CMPLR_ROOT",
)  # fmt: skip


def _relative(variables: Mapping[str, str]) -> bool:
    """Whether a variable names a place as seen from the current directory."""
    get = variables.get
    directories = (get(name) or "" for name in ("CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH"))
    programs = (get(name) or "" for name in _PROGRAMS)
    named = [part for text in directories for part in text.split(os.pathsep) if part]
    named += [word for text in programs for word in text.split() if "/" in word]
    named += [home for name in _HOMES if (home := get(name))]
    return not all(map(os.path.isabs, named))


def on_path(name: str) -> Iterator[str]:
    """Every executable file of this name, in PATH's order; a name with a slash is itself."""
    if "/" in name:
        if executable(name):
            yield os.path.abspath(name)
        return
    for directory in settings.path:
        # Not os.path.join and isabs: a hit does this for every directory of PATH, several times.
        path = directory + name if directory.endswith("/") else f"{directory}/{name}"
        if path.startswith("/") and executable(path):
            yield path


def executable(path: str) -> bool:
    """Whether a path is a program: a directory may have the executable bit, too."""
    return os.access(path, os.X_OK) and not os.path.isdir(path)


def store_candidates() -> Iterator[tuple[str, bool]]:
    """Directories that may hold the store, best first, and whether the user expects each."""
    uid = os.getuid()
    asked = settings.cache_dir
    if asked is not None:
        asked = followed(os.path.abspath(asked))
        yield asked, True
        yield os.path.join(asked, f"opkiln-{uid}"), False
    base = settings.xdg_cache_home or (settings.home and os.path.join(settings.home, ".cache"))
    if not base:
        expanded = os.path.expanduser("~")
        base = os.path.join(expanded, ".cache") if os.path.isabs(expanded) else None
    if base and os.path.isabs(base):
        yield followed(os.path.join(base, "opkiln")), True
    yield os.path.join(settings.tmpdir or "/tmp", f"opkiln-{uid}"), False


@contextmanager
def override(**values: Any) -> Iterator[Settings]:
    """Settings for the length of a ``with`` block, by field name; nothing else sees them."""
    known: Mapping[str, Any] = vars(Settings)
    for name in values:
        if not isinstance(known.get(name), Setting):
            raise SettingError(f"there is no setting {name!r}")
    merged = {**(_OVERRIDES.get() or {}), **values}
    token = _OVERRIDES.set(merged)
    try:
        yield settings
    finally:
        _OVERRIDES.reset(token)
