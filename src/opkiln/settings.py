"""Every environment variable that opkiln reads: typed, documented, in one table.

Only this module uses ``os.environ``, and it never writes to it. ``docs/reference/variables.md`` is
generated from the table.

A value is read when it is asked for, so a program may set variables after ``import opkiln``.
``override(...)`` sets values for a scope, in this thread and what it starts, without touching the
environment; tests and callers use it instead of writing variables.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

from opkiln.base import setting_values as values
from opkiln.base.trust import follow_link
from opkiln.errors import SettingError

__all__ = ["origin_of", "override", "settings", "table"]

# The form of manifests. Bump it when one version of opkiln cannot read the entries of the other.
# Schema 1 did not record what a library needs from the machine that loads it.
SCHEMA = 2
# The directory of this schema's entries, in stores, layers, wheels and bundles. Each schema has its
# own, so that two versions can share a store: in one directory, each would find the other's entries
# damaged, and build them again and again.
LAYOUT = f"v{SCHEMA - 1}"

_OVERRIDES: ContextVar[dict[str, Any] | None] = ContextVar("opkiln_settings", default=None)


class Setting:
    """One variable, with its other names, separated by spaces. Read as a class attribute, it gives
    the parsed value. The string below it is its documentation, which may end with the default."""

    field = ""

    def __init__(
        self,
        names: str,
        parse: Callable[[str], Any] = str,
        default: Any = None,
        *,
        group: str = "opkiln",
        empty_counts: bool = False,  # an empty variable is a value of its own
    ) -> None:
        self.names = tuple(names.split())
        self.variable = self.names[0]
        self.parse = parse
        self.default = default
        self.group = group
        self.empty_counts = empty_counts

    @property
    def doc(self) -> str:
        """Its documentation, without the default."""
        return _documentation().get(self.field, "").partition(_DEFAULT)[0]

    @property
    def shown(self) -> str:
        """The default as the docs show it."""
        if text := _documentation().get(self.field, "").partition(_DEFAULT)[2]:
            return text.removesuffix(".")
        return "off" if self.default is False else f"`{self.default}`" if self.default else "none"

    def __set_name__(self, owner: type, name: str) -> None:
        self.field = name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self.resolve()[0]

    def resolve(self) -> tuple[Any, str]:
        """The value in force and where it comes from: a variable's name, ``default``, ``call``."""
        overrides = _OVERRIDES.get()
        if overrides is not None and self.field in overrides:
            return overrides[self.field], "call"
        for name in self.names:
            text = os.environ.get(name)
            # An empty variable means "not set", as in `VAR= cmd`. For lists of GPUs it means
            # "none": jobs hide all GPUs in this way.
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


_DEFAULT = " Default: "


@cache
def _documentation() -> dict[str, str]:
    """The string below each setting. It is read from the source, because no load needs it."""
    import ast
    from inspect import getsource
    from itertools import pairwise

    module = ast.parse(getsource(sys.modules[__name__]))
    parts = (part for each in module.body if isinstance(each, ast.ClassDef) for part in each.body)
    return {
        ast.unparse(setting.targets[0]): " ".join(ast.literal_eval(below.value).split())
        for setting, below in pairwise(parts)
        if isinstance(setting, ast.Assign) and isinstance(below, ast.Expr)
    }


class Settings:
    """The table. Attribute access gives the value in force now."""

    # Where things are kept
    cache_dir = Setting("OPKILN_CACHE_DIR")
    """Root of the writable store. A directory that others can write to, or that belongs to somebody
    else, is not used: a private one is, and a warning says so. Default: `$XDG_CACHE_HOME/opkiln` or
    `~/.cache/opkiln`."""
    store_layers = Setting("OPKILN_STORE_LAYERS", values.paths, ())
    """Read-only stores below the writable one, first match wins, separated by `:`. Naming a
    directory here is what makes it trusted."""
    trusted_keys = Setting("OPKILN_TRUSTED_KEYS", values.keys, empty_counts=True)
    """Public keys (`ed25519:…`), or files with one on each line, separated by blanks. Where it is
    set, a bundle is only imported, or used as a layer, if one of them has signed it. Set and empty,
    it is an error. Default: none: bundles need no signature."""
    remotes = Setting("OPKILN_REMOTES", values.urls, ())
    """Remote tiers: where compiled ops are looked for before anything is compiled, first match
    wins, separated by blanks: `oci://registry/prefix` (with `?tokens=HOST` if that host may have
    the registry's login, to give tokens for it), `oci+http://…` without TLS, `oci:///directory`,
    `https://…`, `http://…`, `s3://…`, `gs://…`, `file:///directory`. What comes from there needs a
    signature by `OPKILN_TRUSTED_KEYS` or a digest in `OPKILN_LOCK`. Default: none: nothing connects
    to another host."""
    lock = Setting("OPKILN_LOCK")
    """A lock file, as `opkiln lock` writes it. The artifacts that it names are taken from remote
    tiers by their digests, signed or not."""
    push = Setting("OPKILN_PUSH", values.switch_or_path)
    """Publish what is compiled here to the first remote tier, as `opkiln cache push` does: `1`, or
    the file of the private key that signs it, as `opkiln cache keygen` makes it. Default: off."""
    runtime_dir = Setting("OPKILN_RUNTIME_DIR")
    """Node-local directory for the host-wide build budget. Default: `/dev/shm/opkiln-<uid>` or
    `<tmp>/opkiln-<uid>`."""
    tmpdir = Setting("OPKILN_TMPDIR TMPDIR")
    """Node-local directory in which builds are staged; each build makes a private one inside.
    Default: `/tmp`."""
    cache_max_size = Setting("OPKILN_CACHE_MAX_SIZE", values.parse_size, 20 << 30)
    """Size that `opkiln cache gc` shrinks the store to, oldest use first. Default: 20G."""

    # What happens
    mode = Setting(
        "OPKILN_MODE",
        values.choice(
            "auto", "native", "cached", "sealed", "needed", "source", "reference", "check"
        ),
        "auto",
    )
    """Whether to compile, and what to do otherwise. `auto`: use what is cached or installed, else
    compile, else run the op's reference with a warning. `native`: as `auto`, but an op that would
    fall back is an error. `cached`: never compile. `sealed`: never compile or fall back. `needed`:
    compile only ops that have no reference. `source`: as `auto`, but ignore the libraries that
    packages were installed with. `reference`: run the reference of every op that has one. `check`:
    as `auto`, but of every op declared with `@opkiln.op` run both versions, native and reference,
    and compare what they give; the first difference is an error. For tests and for the search for a
    wrong kernel: a call takes several times as long."""
    patch_torch = Setting("OPKILN_PATCH_TORCH", values.switch, False)
    """Extensions of programs that use `torch.utils.cpp_extension` are built by opkiln. `opkiln run`
    sets it."""
    deepspeed = Setting("OPKILN_DEEPSPEED", values.deepspeed, (("", ("ops", "engine")),))
    """What DeepSpeed's builders load where opkiln serves them: `ops` opkiln's own ops, `engine`
    DeepSpeed's sources built by opkiln, both in this order; `off` what DeepSpeed builds. `OP=ops`,
    `OP=engine` and `OP=off` say it of one op: `cpu_adam=engine,quantizer=off`. Default:
    `ops,engine`."""
    record = Setting("OPKILN_RECORD")
    """A file to which each process appends the ops that it loads, for `opkiln build --recorded
    FILE`."""
    build_ops = Setting("OPKILN_BUILD_OPS DS_BUILD_OPS", values.switch, False)
    """When a package is installed: precompile all its ops, skipping those that cannot be built
    here. `OPKILN_BUILD_<OP>` (`DS_BUILD_<OP>`) decides for one op: `1` builds it or fails, `0`
    leaves it out."""
    build_targets = Setting("OPKILN_BUILD_TARGETS")
    """What ops are precompiled for when a package is installed: `cuda:8.0,9.0a+PTX;cpu:x86-64-v3`,
    as `opkiln build --target` takes them, separated by `;`. Default: three levels of this machine's
    CPU family, and the GPUs of `OPKILN_CUDA_ARCH_LIST`, else those here, else all that nvcc
    knows."""
    build_string = Setting("DS_BUILD_STRING", group="compiler")
    """Marks the version of a package that is built: `cu130` gives `1.0+cu130`, `.dev7` gives
    `1.0.dev7`."""

    accelerator = Setting("OPKILN_ACCELERATOR DS_ACCELERATOR", str.lower)
    """The accelerator to use, by name: `cuda`, `rocm`, `xpu`, `hpu`, `npu`, `mlu`, `sdaa`, `supa`,
    `mps`, `cpu`, or that of another package. One that has no device here is an error. Default: the
    first one with a device."""

    # How it is built
    cxx = Setting("CXX", values.command, group="compiler")
    """The host C++ compiler, a name on PATH or a path; a launcher may come before it (`ccache
    g++`). Default: the first of `g++`, `clang++`, `c++` on PATH that works."""
    torch_dir = Setting("OPKILN_TORCH_DIR")
    """torch's package directory, for builds by a Python that has no torch of its own, such as that
    of an isolated build environment. Default: the torch that is imported."""
    cpu = Setting("OPKILN_CPU", str, "native")
    """The CPU to build for: `native`; a psABI level (`x86-64-v3`); or `common`, the level that most
    servers have (`x86-64-v3` on x86-64, `armv8.2-a` on aarch64). Each may have features
    (`x86-64-v3+avx512f`)."""
    debug = Setting("OPKILN_DEBUG", values.switch, False)
    """Build with `-O0 -g3` instead of `-O3`."""
    cppflags = Setting("CPPFLAGS", values.words, (), group="compiler")
    """Flags added to every compile, before the author's. nvcc takes macros and include directories
    itself and hands the rest to its host compiler; one with a comma or a character that a shell
    reads is refused."""
    cxxflags = Setting("OPKILN_CXXFLAGS CXXFLAGS", values.words, ())
    """Flags added to every compile of C++, SYCL's too, after the author's; nvcc and hipcc are given
    those of `OPKILN_CUDAFLAGS`."""
    ldflags = Setting("OPKILN_LDFLAGS LDFLAGS", values.words, ())
    """Flags added to every link, after the author's."""
    cpath = Setting("CPATH", values.directories, (), group="compiler")
    """Include directories; each enters the command line as `-I`."""
    cplus_include_path = Setting("CPLUS_INCLUDE_PATH", values.directories, (), group="compiler")
    """Include directories; each enters the command line as `-isystem`."""
    library_path = Setting("LIBRARY_PATH", values.directories, (), group="compiler")
    """Library directories; each enters the link line as `-L`."""

    # CUDA
    cuda = Setting("OPKILN_CUDA", values.choice("auto", "nvcc", "nvrtc", "emulated"), "auto")
    """What compiles CUDA sources. `nvcc`: a CUDA toolkit. `nvrtc`: the library of this name, which
    torch's CUDA wheels bring along, and the C++ compiler; for sources on `opkiln/op.h`. `auto`:
    `nvcc` where there is a toolkit, else `nvrtc`. `emulated`: as `auto`, and CUDA kernels of ops
    written with `op.h` also run on the CPU, on CPU tensors, where their races, bounds and barriers
    are checked. For tests on machines without a GPU; see [emulator.md](../emulator.md)."""
    cuda_home = Setting("OPKILN_CUDA_HOME")
    """The CUDA toolkit to use. It is used or refused, never replaced by another. Default: the
    toolkit that fits torch best."""
    system_cuda_home = Setting("CUDA_HOME", group="compiler")
    """A CUDA toolkit, one of those that are looked at."""
    cuda_path = Setting("CUDA_PATH", group="compiler")
    """A CUDA toolkit, one of those that are looked at."""
    cuda_arch_list = Setting("OPKILN_CUDA_ARCH_LIST TORCH_CUDA_ARCH_LIST")
    """The GPU architectures to build for: `8.0;9.0a;10.0f+PTX`, `Hopper`, `native`, `all`,
    `all-major` (`opkiln arch LIST` shows what a list comes to). Default: those of this machine's
    GPUs."""
    skip_cuda_check = Setting("DS_SKIP_CUDA_CHECK", values.switch, False, group="compiler")
    """Take a CUDA toolkit of another major version than torch's."""
    ccbin = Setting("NVCC_CCBIN CUDAHOSTCXX", group="compiler")
    """The host compiler of nvcc, a name on PATH or a path. Default: the host C++ compiler."""
    cudaflags = Setting("OPKILN_CUDAFLAGS CUDAFLAGS", values.words, ())
    """Flags added to every compile of device code, after the author's; `-lineinfo` is for
    profilers."""
    debug_cuda = Setting("DS_DEBUG_CUDA", values.switch, False, group="compiler")
    """Show each kernel's registers, shared memory and spills when it is compiled."""
    nvcc_threads = Setting("NVCC_THREADS DS_NVCC_THREADS", values.positive, group="compiler")
    """Architectures that one nvcc compiles at once; each takes a CPU of the budget. Default: as
    many as there are and fit."""
    cuda_visible_devices = Setting("CUDA_VISIBLE_DEVICES", group="job", empty_counts=True)
    """The GPUs that this process may use: indices, UUIDs, MIG UUIDs. Empty: none. Default: all."""
    cuda_device_order = Setting("CUDA_DEVICE_ORDER", str, "FASTEST_FIRST", group="job")
    """How GPUs are counted."""

    # ROCm
    rocm_home = Setting("ROCM_HOME ROCM_PATH", group="compiler")
    """The ROCm installation to use. It is used or refused, never replaced by another. Default:
    found by `hipcc` on PATH, `/opt/rocm*`."""
    rocm_arch_list = Setting("PYTORCH_ROCM_ARCH", group="compiler")
    """The GPU architectures to build for: `gfx90a;gfx942:sramecc+`, `native`. Default: those of
    this machine's GPUs."""
    gfx_override = Setting("HSA_OVERRIDE_GFX_VERSION", values.gfx_version, group="job")
    """The architecture that the ROCm runtime takes every AMD GPU for, as `10.3.0`. Default: each
    GPU's own."""
    rocr_visible_devices = Setting("ROCR_VISIBLE_DEVICES", group="job", empty_counts=True)
    """The AMD GPUs that this process may use, by index or UUID. Empty: none. Default: all."""
    hip_visible_devices = Setting("HIP_VISIBLE_DEVICES", group="job")
    """Which of the GPUs that `ROCR_VISIBLE_DEVICES` leaves, counted among them.
    `CUDA_VISIBLE_DEVICES` says it where this one does not. Default: all."""

    # SYCL
    sycl_cxx = Setting("OPKILN_SYCL_CXX")
    """The SYCL compiler, a name on PATH or a path. Default: `icpx`, `dpcpp`; else the runtime
    compiler of `intel-sycl-rt`."""
    cmplr_root = Setting("CMPLR_ROOT", group="compiler")
    """The oneAPI compiler's directory, one of the places looked at."""

    ocl_icd_filenames = Setting("OCL_ICD_FILENAMES", group="job")
    """OpenCL's drivers, by path. SYCL finds a CPU only through one: `<env>/lib/libintelocl.so` of
    `intel-opencl-rt`. Default: those in `/etc/OpenCL/vendors`."""

    # The engine
    max_jobs = Setting("MAX_JOBS", values.positive, group="compiler")
    """Most steps this process runs at once. The host-wide budget (CPUs, cgroup, memory) holds
    besides. Default: the budget."""
    memory = Setting("OPKILN_MEMORY", values.parse_size)
    """Memory that all builds of this user may take together. Default: 80% of the cgroup's or the
    machine's."""
    build_timeout = Setting("OPKILN_BUILD_TIMEOUT", values.seconds, 1800.0)
    """The longest time, in seconds, in which a load may get no further. It is for a step, not for a
    build: a build of ten long steps may take ten times as long. It counts from the start of the
    load, and again from each step that ends. A step that is still running then is ended; so is a
    question to a compiler (1 or 2 minutes at most) and the load of a new library (2 minutes at
    most). A wait for another process has the same limit: it counts from the start of the load that
    waits, and again from each step that the other process finishes. All who wait for a build that
    took too long get its error at once. The requests of a load to remote tiers have this time, too,
    all together. Default: 1800."""
    trace = Setting("OPKILN_TRACE")
    """Write a Chrome/Perfetto trace of each build to this file (also `--trace FILE`)."""
    progress = Setting(
        "OPKILN_PROGRESS", values.choice("auto", "bar", "lines", "verbose", "quiet", "off"), "auto"
    )
    """How a build reports on standard error: `bar`, `lines`, `verbose` (lines, and every command
    that is run), `quiet` (only that it has waited for another process for 5 seconds) or `off`.
    `load(verbose=False)` is `quiet` if this is unset. `auto` is a bar on a terminal and lines
    elsewhere; and nothing in ranks other than the first, or where the `opkiln` logger shows the
    lines."""
    no_color = Setting("NO_COLOR", bool, False, group="terminal")
    """Any value: no colour."""
    rank = Setting("RANK SLURM_PROCID OMPI_COMM_WORLD_RANK PMI_RANK LOCAL_RANK", int, group="job")
    """This process's rank in a distributed job; only the first one reports."""

    # Jobs of several ranks
    ensure = Setting("OPKILN_ENSURE", values.ops, ())
    """Ops that all ranks of a job agree on when the program calls
    `torch.distributed.init_process_group`, by name, separated by commas; `1`: those in the file of
    `OPKILN_RECORD`, if it is set. What the program loads later is built by one rank. For programs
    under `opkiln run`; see [clusters.md](../clusters.md)."""
    job_secret = Setting("OPKILN_JOB_SECRET")
    """What the ranks of a job authenticate their messages with in `opkiln.ensure`, the same for
    all: `openssl rand -hex 32`. Without it, whoever reaches the job's store is trusted."""
    world_size = Setting(
        "WORLD_SIZE OMPI_COMM_WORLD_SIZE PMI_SIZE SLURM_NTASKS", values.positive, group="job"
    )
    """How many ranks the job has."""
    master_addr = Setting("MASTER_ADDR", group="job")
    """The host of the job's store. Default: under Slurm, the first node of the step."""
    master_port = Setting("MASTER_PORT", values.positive, group="job")
    """The port of the job's store. Default: under Slurm, one that follows from the job's number."""
    run_id = Setting("TORCHELASTIC_RUN_ID SLURM_JOB_ID", group="job")
    """The name of the job, in the keys of its store."""
    agent_store = Setting("TORCHELASTIC_USE_AGENT_STORE", values.switch, False, group="job")
    """Whether the store is served by the agent of torchrun, not by rank 0."""
    slurm_step = Setting("SLURM_STEP_ID", str, "0", group="job")
    """The step of a Slurm job. Default: 0."""
    slurm_nodes = Setting("SLURM_STEP_NODELIST SLURM_JOB_NODELIST", group="job")
    """The nodes of a Slurm step."""

    # The user's surroundings
    home = Setting("HOME", group="system")
    """The user's home directory."""
    xdg_cache_home = Setting("XDG_CACHE_HOME", group="system")
    """The user's cache directory. Default: `~/.cache`."""
    path = Setting("PATH", values.paths, ("/usr/local/bin", "/usr/bin", "/bin"), group="system")
    """Where programs are looked for. Default: `/usr/local/bin:/usr/bin:/bin`."""

    # Logins and proxies for remote tiers. s3:// and gs:// find theirs by themselves.
    registry_auth_file = Setting("REGISTRY_AUTH_FILE", group="system")
    """A file of logins in docker's form, for `oci://`; what podman and skopeo write. Default:
    `$DOCKER_CONFIG/config.json`."""
    docker_config = Setting("DOCKER_CONFIG", group="system")
    """The directory of docker's `config.json`: logins and credential helpers, for `oci://`.
    Default: `~/.docker`."""
    netrc = Setting("NETRC", group="system")
    """A file of logins, for `https://` and `http://`. Default: `~/.netrc`."""
    https_proxy = Setting("HTTPS_PROXY https_proxy", group="system")
    """The proxy for `https://` and `oci://`."""
    http_proxy = Setting("http_proxy", group="system")
    """The proxy for `http://` and `oci+http://`."""
    no_proxy = Setting("NO_PROXY no_proxy", str, "", group="system")
    """Hosts and domains that are reached without a proxy, by commas."""


# The settings that are in force: ``settings.cache_dir``. Every access reads the environment anew.
settings = Settings()

# Settings for how, where and whether a build runs. They do not change which binary is right.
_INDIFFERENT = frozenset((
    "progress", "trace", "no_color", "rank", "max_jobs", "memory", "build_timeout", "tmpdir",
    "runtime_dir", "cache_max_size", "record", "mode", "build_ops",
    "build_targets", "build_string", "nvcc_threads", "patch_torch", "deepspeed",
    "cuda_visible_devices", "cuda_device_order", "rocr_visible_devices", "hip_visible_devices",
    "ensure", "job_secret", "world_size", "master_addr", "master_port",
    "run_id", "agent_store", "slurm_step", "slurm_nodes",
    "accelerator",  # which of an op's backends serves is in its spec
    "path",  # which programs it leads to is in the receipt
    "remotes", "lock", "push", "registry_auth_file", "docker_config", "netrc",
    "https_proxy", "http_proxy", "no_proxy",
))  # fmt: skip
_TABLE = tuple(value for value in vars(Settings).values() if isinstance(value, Setting))
_NAMES = frozenset(name for setting in _TABLE for name in setting.names)
# Variables that change a compiler's output without being in its argv, and that are not meant for
# opkiln. They never reach a compiler; `explain` names those that are set.
DROPPED = (
    "C_INCLUDE_PATH", "OBJC_INCLUDE_PATH", "GCC_EXEC_PREFIX", "COMPILER_PATH", "GCC_COMPARE_DEBUG",
    "DEPENDENCIES_OUTPUT", "SUNPRO_DEPENDENCIES", "LD_RUN_PATH", "LDEMULATION", "GNUTARGET",
    "COLLECT_NO_DEMANGLE", "CCC_OVERRIDE_OPTIONS", "CCC_ADD_ARGS",
    "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CFLAGS", "MAKEFLAGS", "SOURCE_DATE_EPOCH",
    "HIPCC_COMPILE_FLAGS_APPEND", "HIPCC_LINK_FLAGS_APPEND", "HIP_PATH", "HIP_CLANG_PATH",
    "HIP_PLATFORM", "DEVICE_LIB_PATH", "HCC_AMDGPU_TARGET",
    # Of launchers: they name another compiler than CXX does.
    "CCACHE_COMPILER", "CCACHE_COMPILERTYPE", "CCACHE_PATH", "CCACHE_PREFIX", "CCACHE_PREFIX_CPP",
)  # fmt: skip

# The variables that child processes get. All are in the key of a compiler's output, except PATH: of
# that, the programs that it leads to count.
PASSED = ("PATH", "LD_LIBRARY_PATH", "ASAN_OPTIONS")
# Further variables for a compiler that is a script, where they are also in the key, and for a
# launcher, which does not change the output. The families are prefixes of names.
PASSED_TO_SCRIPTS = ("HOME", "USER", "LOGNAME", "XDG_RUNTIME_DIR", "CONDA_PREFIX")
PASSED_FAMILIES = ("CCACHE_", "SCCACHE_")


_VARIABLES = frozenset(
    name for setting in _TABLE if setting.field not in _INDIFFERENT for name in setting.names
).union(PASSED[1:], PASSED_TO_SCRIPTS)


def table() -> tuple[Setting, ...]:
    """Every setting, in the order of the documentation."""
    return _TABLE


def origin_of(field: str) -> tuple[Any, str]:
    """A setting's value in force, and where it comes from: a variable, ``default`` or ``call``."""
    setting: Setting = vars(Settings)[field]
    return setting.resolve()


_SWITCH = "OPKILN_BUILD_"  # an op's name may follow, so only a near miss of a setting is a mistake


def misspelt() -> list[tuple[str, str, str]]:
    """For each variable that looks like a setting and is not: (its name, the name that may be
    meant, a message)."""
    strange = [name for name in os.environ if name.startswith("OPKILN_") and name not in _NAMES]
    if not strange:
        return []  # before the import: every process asks when it loads an op
    from difflib import get_close_matches

    found = []
    for name in sorted(strange):
        close = get_close_matches(name, sorted(_NAMES), 1, 0.9 if name.startswith(_SWITCH) else 0.6)
        meant = close[0] if close else ""
        if meant or not name.startswith(_SWITCH):
            guess = f"; did you mean {meant}?" if meant else ""
            found.append((name, meant, f"unknown setting {name}{guess}"))
    return found


def unknown() -> list[str]:
    """The messages of ``misspelt``."""
    return [words for _, _, words in misspelt()]


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


def compiler_variables(*, script: bool) -> tuple[tuple[str, str], ...]:
    """The variables that a compiler gets, which are in the key of its output; more if it is a
    script."""
    names = {name for name in PASSED[1:] if name in os.environ}
    if script:
        names |= {name for name in os.environ if name.startswith(PASSED_FAMILIES)} - set(DROPPED)
        names |= {name for name in PASSED_TO_SCRIPTS if name in os.environ}
    return tuple((name, os.environ[name]) for name in sorted(names))


# What changes the results or the messages of compilers that other programs start.
_OF_OTHERS = {
    *PASSED[1:], *DROPPED, "CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "LANG", "LANGUAGE",
    "LD_PRELOAD", "NVCC_CCBIN", "CLICOLOR_FORCE", "OMPI_CXX", "OMPI_CC",
} - {"MAKEFLAGS", "CFLAGS"}  # fmt: skip
_FAMILIES_OF_OTHERS = ("LC_", "GCC_", "CLANG_", "NVCC_", "CICC_", "CUDAFE_", "NVVM_", "HIP")
# What differs from one shell, terminal, rank or build to the next.
_OF_NO_SCRIPT = (
    r"(PATH|PWD|OLDPWD|SHLVL|_|TERM|COLORTERM|COLUMNS|LINES|TMPDIR|HOSTNAME|MAKEFLAGS|MAKELEVEL|"
    r"NINJA_STATUS|DISPLAY|[A-Z_]*RANK|[A-Z_]*WORLD_SIZE|CUDA_VISIBLE_DEVICES|"
    r"(_?OPKILN|CCACHE|SCCACHE|SSH|XDG|DBUS|SLURM|PMI|OMPI_COMM|MASTER|TORCHELASTIC|PYTEST)_.*)\Z"
)


def variables_of_others(
    environment: Mapping[str, str], *, script: bool
) -> tuple[tuple[str, str], ...]:
    """Those of a compiler's variables, if another program starts it, that are in the key of what it
    makes: all that differ little from run to run if it is a ``script``, which may read any."""
    if script:
        import re  # not for a hit of an op

        names = {name for name in environment if not re.match(_OF_NO_SCRIPT, name)}
    else:
        names = {n for n in environment if n in _OF_OTHERS or n.startswith(_FAMILIES_OF_OTHERS)}
        names = {name for name in names if not name.startswith("CCACHE_")}
    return tuple((name, environment[name]) for name in sorted(names) if environment[name])


def whole_environment() -> dict[str, str]:
    """A copy of the environment, for a program of the user's, never for a compiler."""
    return dict(os.environ)


def environment_with_store(directory: str, progress: str) -> dict[str, str]:
    """The same, for a program of ours that must find an empty store and build what it loads."""
    return {
        **os.environ,
        "OPKILN_CACHE_DIR": os.path.join(directory, "store"),
        "OPKILN_STORE_LAYERS": "",
        "OPKILN_MODE": "auto",
        "OPKILN_PROGRESS": progress,
    }


def dropped_variables() -> tuple[str, ...]:
    """Names of the variables that are set here and kept away from every compiler."""
    return tuple(name for name in DROPPED if os.environ.get(name))


def build_switch(op: str, variables: tuple[str, ...] = ()) -> tuple[bool | None, str]:
    """(the value of ``OPKILN_BUILD_<OP>`` or ``DS_BUILD_<OP>``, the variable's name); None if
    neither is set. Raises SettingError."""
    stem = op.upper()
    for name in (f"OPKILN_BUILD_{stem}", *variables, f"DS_BUILD_{stem}"):
        text = os.environ.get(name)
        # An op may be called `string`; the variable of that name is a setting all the same.
        if text and name not in _NAMES:
            try:
                return values.switch(text), name
            except ValueError as error:
                raise SettingError(f"{name}={text!r}: {error}", hint=f"unset {name}") from None
    return None, ""


def build_switches() -> list[str]:
    """The variables that are set here and look like ``OPKILN_BUILD_<OP>``."""
    set_here = (name for name, text in os.environ.items() if text)
    return sorted(n for n in set_here if n.startswith(_SWITCH) and n not in _NAMES)


def fingerprint() -> tuple[object, ...] | None:
    """The texts of all variables that may change which binary is right.

    None if such a setting is overridden: the override is not in a variable.
    """
    if not set(_OVERRIDES.get() or ()) <= _INDIFFERENT:
        return None
    # Most are not set. Looking up each of them takes longer than going through those that are.
    found = {
        name: os.environ[name]
        for name in os.environ
        if name in _VARIABLES or name.startswith(PASSED_FAMILIES)
    }
    return (*sorted(found.items()), os.getcwd() if _relative(found) else None)


_DIRECTORIES = ("CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH")
_PROGRAMS = ("CXX", "NVCC_CCBIN", "CUDAHOSTCXX", "OPKILN_SYCL_CXX")
_HOMES = ("OPKILN_CUDA_HOME", "CUDA_HOME", "CUDA_PATH", "ROCM_HOME", "ROCM_PATH", "CMPLR_ROOT")


def _relative(variables: Mapping[str, str]) -> bool:
    """Whether a variable contains a relative path."""
    get = variables.get
    named = [part for name in _DIRECTORIES for part in get(name, "").split(os.pathsep)]
    named += [word for name in _PROGRAMS for word in get(name, "").split() if "/" in word]
    named += [get(name, "") for name in _HOMES]
    return not all(map(os.path.isabs, filter(None, named)))


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
    """Whether a path is a program. (A directory may have the executable bit, too.)"""
    return os.access(path, os.X_OK) and not os.path.isdir(path)


def store_candidates() -> Iterator[tuple[str, bool]]:
    """Directories that may hold the store, best first, and whether the user expects each."""
    uid = os.getuid()
    asked = settings.cache_dir
    if asked is not None:
        asked = follow_link(os.path.abspath(asked))
        yield asked, True
        yield os.path.join(asked, f"opkiln-{uid}"), False
    home = settings.home or os.path.expanduser("~")
    base = settings.xdg_cache_home or os.path.join(home, ".cache")
    if os.path.isabs(base):  # a user without a home directory is "~"
        yield follow_link(os.path.join(base, "opkiln")), True
    yield os.path.join(settings.tmpdir or "/tmp", f"opkiln-{uid}"), False


@contextmanager
def override(**values: Any) -> Iterator[Settings]:
    """Set settings, by field name, for the length of a ``with`` block.

    They hold in this thread and in threads that it starts. The environment is unchanged. Raises
    SettingError for a name that is not a field.
    """
    for name in values:
        if not isinstance(vars(Settings).get(name), Setting):
            raise SettingError(f"there is no setting {name!r}")
    token = _OVERRIDES.set({**(_OVERRIDES.get() or {}), **values})
    try:
        yield settings
    finally:
        _OVERRIDES.reset(token)
