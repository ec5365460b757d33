"""``load`` and ``load_inline`` as torch.utils.cpp_extension has them, over opkiln's loader.

Unlike ``opkiln.load``, these behave as in torch: flags are split as a shell splits them, C++ is
compiled without optimization unless a flag asks for it, and assertions stay on. Errors are
subclasses of the exceptions that torch raises, because programs catch those: ``except
RuntimeError`` around a build, ``except ImportError`` around a load.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from opkiln import extension
from opkiln.base.model import ABI_TORCH, CUDA, EXECUTABLE, LIBRARY, PYTHON, XPU, OpSpec
from opkiln.building import wording
from opkiln.compat.torch.flags import shell_words, translate
from opkiln.errors import LoadError, LoadTestError, OpkilnError, UsageError, told_briefly

# A compiler's own defaults. The plan's flags come before these.
_DEFAULTS = ("-O0", "-UNDEBUG")


class ExtensionError(OpkilnError, RuntimeError):
    """An extension cannot be built. A RuntimeError, as torch raises one.

    ``why`` has the compiler's first error, and ``log`` the file with all that it printed. The exit
    code is that of the error in its place: 3 for a missing compiler, 4 for a failed build.
    """


class ExtensionNotLoaded(LoadError, ImportError):
    """An extension module was built but cannot be imported. An ImportError, as with torch.

    ``why`` says what the dynamic linker or the import missed.
    """


class LibraryNotLoaded(LoadError, OSError):
    """An extension without a module was built but cannot be loaded. An OSError, as with torch.

    ``why`` says what the dynamic linker missed.
    """


@told_briefly
def load(
    name: str,
    sources: str | list[str],
    extra_cflags: Sequence[str] | None = None,
    extra_cuda_cflags: Sequence[str] | None = None,
    extra_sycl_cflags: Sequence[str] | None = None,
    extra_ldflags: Sequence[str] | None = None,
    extra_include_paths: Sequence[str] | None = None,
    build_directory: str | None = None,
    verbose: bool = False,
    with_cuda: bool | None = None,
    with_sycl: bool | None = None,
    is_python_module: bool = True,
    is_standalone: bool = False,
    keep_intermediates: bool = True,  # noqa: ARG001 (objects are always kept, in the store)
) -> Any:
    """Compile sources, or find them compiled, and load them: torch's function of this name.

    Returns the module; with ``is_python_module=False``, the path of the library, whose ops are in
    ``torch.ops``; with ``is_standalone=True`` as well, the path of the program.
    ``build_directory`` is created if it does not exist and gets a copy of the result; the path is
    then that of the copy. A call with changed sources or flags returns the new code.

    Raises ExtensionError (a RuntimeError) if it cannot be built, ExtensionNotLoaded (an
    ImportError) or LibraryNotLoaded (an OSError) if it cannot be loaded, and FileNotFoundError,
    ValueError and AssertionError as torch does.
    """
    if is_python_module and is_standalone:
        raise ValueError("is_python_module and is_standalone cannot both be true")
    listed = [os.fspath(each) for each in ([sources] if isinstance(sources, str) else sources)]
    if not listed:
        raise AssertionError(f"extension {name!r} has no source")
    for source in listed:
        if not os.path.isfile(source):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
    kind = PYTHON if is_python_module else EXECUTABLE if is_standalone else LIBRARY
    flags = (extra_cflags, extra_cuda_cflags, extra_sycl_cflags, extra_ldflags)
    asked = (with_cuda, with_sycl)
    with _raise_torchs_errors(kind):
        declare = partial(extension.declare, name, listed, kind=kind)
        return _load(declare, flags, extra_include_paths, asked, verbose, build_directory)


@told_briefly
def load_inline(
    name: str,
    cpp_sources: str | Sequence[str],
    cuda_sources: str | Sequence[str] | None = None,
    sycl_sources: str | Sequence[str] | None = None,
    functions: str | list[str] | dict[str, str] | None = None,
    extra_cflags: Sequence[str] | None = None,
    extra_cuda_cflags: Sequence[str] | None = None,
    extra_sycl_cflags: Sequence[str] | None = None,
    extra_ldflags: Sequence[str] | None = None,
    extra_include_paths: Sequence[str] | None = None,
    build_directory: str | None = None,
    verbose: bool = False,
    with_cuda: bool | None = None,
    with_sycl: bool | None = None,
    is_python_module: bool = True,
    with_pytorch_error_handling: bool = True,
    keep_intermediates: bool = True,  # noqa: ARG001 (objects are always kept, in the store)
    use_pch: bool = False,  # noqa: ARG001 (see below)
    no_implicit_headers: bool = False,
) -> Any:
    """Like ``load``, with the sources as text: torch's function of this name.

    The text is written to ``build_directory`` if that is given, and nowhere else. ``use_pch`` has
    no effect: torch's precompiled header (790 MB inside its own package) is neither written nor
    removed. The store keeps what was compiled once.
    """
    if functions is not None and not isinstance(functions, str | list | dict):
        raise ValueError(f"'functions' must be a list or a dict, not a {type(functions)}")
    kind = PYTHON if is_python_module else LIBRARY
    with _raise_torchs_errors(kind):
        bound = None
        if functions is not None:
            bound = extension.bindings(functions, with_pytorch_error_handling)
        texts = extension.inline_texts(
            cpp_sources, cuda_sources, sycl_sources, bound, headers=not no_implicit_headers
        )
        flags = (extra_cflags, extra_cuda_cflags, extra_sycl_cflags, extra_ldflags)
        asked = (with_cuda, with_sycl)
        declare = partial(extension.declare_inline, name, texts, kind=kind)
        found = _load(declare, flags, extra_include_paths, asked, verbose, build_directory)
    if build_directory is not None:
        for source, text in texts:
            with open(os.path.join(build_directory, source), "w", encoding="utf-8") as file:
                file.write(wording.remove_marks(text))
    return found


def _load(
    declare: partial[OpSpec],
    given: Sequence[Sequence[str] | None],
    include_paths: Sequence[str] | None,
    asked: tuple[bool | None, bool | None],
    verbose: bool,
    build_directory: str | None,
) -> Any:
    """``given``: flags for the C++ compiler, CUDA's, SYCL's and the linker; ``asked``: whether it
    has CUDA, and SYCL."""
    name = declare.args[0]
    spec = declare(
        include_dirs=[os.fspath(path).strip() for path in include_paths or ()],
        abi=ABI_TORCH,
        cxx_args=_DEFAULTS,
    )
    cuda, sycl = asked
    if cuda is None and any(source.endswith(".cuh") for source in spec.sources):
        cuda = True
    try:
        spec = extension.add_device(spec, cuda, sycl, (), ())
    except UsageError:
        raise AssertionError("one extension cannot have both SYCL and CUDA sources") from None
    cxx, of_cuda, of_sycl, link = given
    words = map(shell_words, (cxx, of_sycl if spec.backend == XPU else of_cuda, link))
    flags = translate(name, *words, backend_is_cuda=spec.backend != XPU)
    # As in torch, it is built for the CPU of this machine only if a flag asks for it.
    spec = flags.add_to(spec)
    toolkit: AbstractContextManager[None] = nullcontext()
    if spec.backend == CUDA:
        from opkiln.compat.torch import paths

        toolkit = paths.assigned_toolkit()
        spec = spec._replace(device_args=("-UNDEBUG", *spec.device_args))
    if flags.remarks and verbose:
        from opkiln.run import events

        for remark in flags.remarks:
            events.emit(events.NOTE, text=f"{name}: {remark}")
    with toolkit:
        value, artifact = extension.serve(spec, flags.archs, verbose)
    path = artifact.path
    if build_directory is not None:
        path = extension.copy_out(artifact, os.fspath(build_directory))
    return value if spec.kind == PYTHON else path


@contextmanager
def _raise_torchs_errors(kind: str) -> Iterator[None]:
    """Raise torch's exception for an extension of this kind, with opkiln's text."""
    try:
        yield
    except OpkilnError as error:
        opened = isinstance(error, LoadError) and isinstance(error.__cause__, OSError | ImportError)
        found: type[OpkilnError] = ExtensionError
        if opened or isinstance(error, LoadTestError):
            found = ExtensionNotLoaded if kind == PYTHON else LibraryNotLoaded
        raised = found(error.what, why=error.why, hint=error.hint)
        raised.exit_code = error.exit_code
        raise raised from error.__cause__
