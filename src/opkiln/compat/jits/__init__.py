"""tvm-ffi, FlashInfer and SGLang write a build file and start ninja. Here it is read, and each of
its commands is an observed command: a hit starts no process, not even ninja's.

What they do before and after stays theirs: their locks and paths, modules that were built ahead of
time, their variables. Only the function that starts ninja is replaced, in the versions that are
named here. In a directory that ninja has worked in, ninja goes on: it has a log of what it did.
Where a command fails or a file says more than is understood here, the program's own function
starts ninja, which tells what is wrong in the words that people know.
"""

from __future__ import annotations

import os
import re
import sys
from functools import wraps
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from opkiln.errors import OpkilnError
from opkiln.settings import settings, whole_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    from opkiln.compat.jits.build_file import Edge


# The releases that were read: the distribution, and how its versions begin.
VERSIONS = {
    "tvm_ffi.cpp.extension": ("apache-tvm-ffi", ("0.1.15",)),
    "flashinfer.jit.core": ("flashinfer-python", ("0.7.2",)),
    "sglang.kernels.jit.utils.compile.ninja": ("sglang", ("0.5.23",)),
}
_BUILD_FILE = "build.ninja"


def replacements(module: ModuleType) -> Iterator[tuple[Any, str, Any]]:
    """The function of a module that starts ninja, and what takes its place; nothing for a version
    that is not known: it gets what ``opkiln ninja`` serves."""
    distribution, known = VERSIONS[module.__name__]
    if not version(distribution).startswith(known):
        return
    name, replacement = {
        "tvm_ffi.cpp.extension": ("build_ninja", _of_tvm_ffi),
        "flashinfer.jit.core": ("run_ninja", _of_flashinfer),
        "sglang.kernels.jit.utils.compile.ninja": ("build", _of_sglang),
    }[module.__name__]
    yield module, name, replacement(module, getattr(module, name))


def _of_tvm_ffi(module: ModuleType, own: Callable[[str], None]) -> Callable[[str], None]:
    @wraps(own)
    def build_ninja(build_dir: str) -> None:
        told = serve("tvm-ffi", os.path.join(build_dir, _BUILD_FILE), build_dir)
        if told is None:
            own(build_dir)
        elif whole_environment().get("TVM_FFI_CPP_EXTENSION_LOG_BUILD", "0") in ("1", "stdout"):
            module.logger.info("ninja build stdout:\n%s", told)

    return build_ninja


def _of_flashinfer(module: ModuleType, own: Callable[..., None]) -> Callable[..., None]:
    workspace = str(module.jit_env.FLASHINFER_WORKSPACE_DIR)

    @wraps(own)
    def run_ninja(
        workdir: Any, ninja_file: Any, verbose: bool, max_jobs: int | None = None
    ) -> None:
        told = serve("flashinfer", str(ninja_file), str(workdir), (workspace,))
        if told is None:
            own(workdir, ninja_file, verbose, max_jobs)
        elif verbose:
            sys.stdout.write(told)

    return run_ninja


def _of_sglang(module: ModuleType, own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def build(*, spec: Any, build_dir: Any, build_file: str) -> Any:
        build_dir.mkdir(parents=True, exist_ok=True)
        for unit in spec.translation_units():
            if unit.source is not None:
                (build_dir / unit.filename).write_text(unit.source)
        (build_dir / _BUILD_FILE).write_text(build_file)
        told = serve("sglang", str(build_dir / _BUILD_FILE), str(build_dir))
        if told is None:
            return own(spec=spec, build_dir=build_dir, build_file=build_file)
        if module.envs.SGLANG_JIT_LOG_RESOURCE_USAGE.get():
            module._log_resource_usage(spec.module_name, told)
        return build_dir / f"{spec.module_name}.so"

    return build


def serve(host: str, file: str, directory: str, roots: Sequence[str] = ()) -> str | None:
    """Make all that a build file names: from the store, or by its commands, which are kept then.

    Returns what ninja would have printed; None if that is to be left to ninja.
    """
    from opkiln.compat.jits.build_file import NotKnown

    directory = os.path.realpath(directory)
    if os.path.exists(os.path.join(directory, ".ninja_log")):
        return None
    try:
        return _serve(host, os.path.realpath(file), directory, tuple(map(os.path.realpath, roots)))
    except (NotKnown, OpkilnError, OSError, UnicodeDecodeError):
        return None


def _serve(host: str, file: str, directory: str, roots: tuple[str, ...]) -> str | None:
    from opkiln.building.command import run_commands
    from opkiln.building.prepared import ObservedCommand
    from opkiln.compat.jits import build_file
    from opkiln.run import progress
    from opkiln.store.layers import Store

    def command_of(edge: build_file.Edge) -> ObservedCommand:
        outputs = tuple(build_file.full_path(directory, each) for each in edge.outputs)
        place, name = os.path.split(outputs[0])
        text = edge.command + _map_away(edge, directory, (directory, *roots), host)
        group = os.path.basename(place)
        return ObservedCommand(host, name, text, directory, outputs, group, roots)

    store, told = Store(), list[str]()
    edges = build_file.read(file)
    levels = []
    with progress.show_builds():
        for level in build_file.levels(edges):
            levels.append([command_of(edge) for edge in level])
            done = run_commands(levels[-1], store)
            if any(each.returncode for each in done):
                return None
            told += (
                f"{edge.command}\n{made.messages}" for edge, made in zip(level, done, strict=True)
            )
    if settings.record:
        from opkiln.building import recorded
        from opkiln.loading import recording

        for module in recorded.describe(levels, store):
            recording.append(settings.record, module, module.name)
    return "".join(f"[{n}/{len(told)}] {each}" for n, each in enumerate(told, 1))


def _map_away(edge: Edge, directory: str, places: tuple[str, ...], name: str) -> str:
    """Words for a compiler: of a source that lies below one of these places, the place is not in
    the object, and not in its messages, so that the object serves elsewhere, too."""
    from opkiln.compat.jits.build_file import full_path

    words = edge.command.split()
    if "-c" not in words or not all(re.fullmatch(r"[\w+,./@%-]+", each) for each in places):
        return ""
    sources = [full_path(directory, each) for each in edge.inputs]
    nvcc = any(os.path.basename(word).startswith("nvcc") for word in words[:2])
    flag = "-Xcompiler -ffile-prefix-map=" if nvcc else "-ffile-prefix-map="
    return "".join(
        f" {flag}{place}={name}"
        for place in places
        if any(source.startswith(place + "/") for source in sources)
    )
