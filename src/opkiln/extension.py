"""``load`` and ``load_inline``: the one-call form, with torch.utils.cpp_extension's arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from opkiln.base import model
from opkiln.base.digest import sha256_file
from opkiln.base.model import ABI_TORCH
from opkiln.building import wording
from opkiln.errors import SpecError, StoreError, UsageError, told_briefly
from opkiln.loading import loader
from opkiln.loading.register import at_trace_time


@at_trace_time
@told_briefly
def load(
    name: str,
    sources: str | Sequence[str],
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
    keep_intermediates: bool = True,  # noqa: ARG001 (taken for compatibility)
    *,
    abi: str = ABI_TORCH,
) -> Any:
    """Compile C++, CUDA or SYCL sources, or find them compiled, and load them.

    Takes the arguments of ``torch.utils.cpp_extension.load``. Returns the extension module; with
    ``is_python_module=False`` the library's path (its ops are then in ``torch.ops``); with
    ``is_standalone=True`` the program's path. ``abi="torch-stable"`` builds against torch's stable
    ABI: the compile is many times faster and the binary serves every torch from 2.10.
    ``abi="none"`` is for code without torch; as a library it is loaded as a ``ctypes.CDLL``.

    If ``with_cuda`` is left out, it is true if a source is a ``.cu``; so is ``with_sycl`` for a
    ``.sycl``. The GPU architectures are those of ``TORCH_CUDA_ARCH_LIST``, else of this machine's
    GPUs. On a ROCm torch the same sources are compiled for HIP.

    Calling it again reads the sources again: an edit is compiled, and an unchanged extension is the
    module that is already loaded. ``build_directory`` gets a copy of the result.
    ``keep_intermediates`` has no effect: objects are always kept in the store.

    Raises BuildError, LoadError and the other OpkilnErrors.
    """
    spec = declare(
        name,
        sources,
        include_dirs=_check_paths(extra_include_paths),
        kind=_choose_kind(is_python_module, is_standalone, abi),
        abi=_check_abi(abi),
        cxx_args=_check_flags("extra_cflags", extra_cflags),
        ldflags=_check_flags("extra_ldflags", extra_ldflags),
    )
    spec = add_device(spec, with_cuda, with_sycl, extra_cuda_cflags, extra_sycl_cflags)
    return _load(spec, verbose, build_directory)


@at_trace_time
@told_briefly
def load_inline(
    name: str,
    cpp_sources: str | Sequence[str],
    cuda_sources: str | Sequence[str] | None = None,
    sycl_sources: str | Sequence[str] | None = None,
    functions: str | Sequence[str] | Mapping[str, str] | None = None,
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
    keep_intermediates: bool = True,  # noqa: ARG001 (taken for compatibility)
    use_pch: bool = False,  # noqa: ARG001 (taken for compatibility)
    no_implicit_headers: bool = False,
    *,
    abi: str = ABI_TORCH,
) -> Any:
    """As ``load``, with the sources as text.

    ``functions`` (names, or names to docstrings) are bound into the module, as torch does it. The
    text is part of the key, so nothing is written when the result is cached. ``use_pch`` is
    accepted and has no effect.
    """
    if functions is not None and (abi != ABI_TORCH or not is_python_module):
        raise UsageError("functions= needs a Python module on the full ABI (abi='torch')")
    texts = inline_texts(
        cpp_sources,
        cuda_sources,
        sycl_sources,
        None if functions is None else bindings(functions, with_pytorch_error_handling),
        headers=abi == ABI_TORCH and not no_implicit_headers,
    )
    spec = declare_inline(
        name,
        texts,
        include_dirs=_check_paths(extra_include_paths),
        kind=_choose_kind(is_python_module, False, abi),
        abi=_check_abi(abi),
        cxx_args=_check_flags("extra_cflags", extra_cflags),
        ldflags=_check_flags("extra_ldflags", extra_ldflags),
    )
    spec = add_device(spec, with_cuda, with_sycl, extra_cuda_cflags, extra_sycl_cflags)
    return _load(spec, verbose, build_directory)


def declare(
    name: str, sources: str | Sequence[str], *, include_dirs: Sequence[str], **fields: Any
) -> model.OpSpec:
    """The declaration of an extension in files; ``fields`` are other fields of the spec. Raises
    SpecError if a file is missing."""
    listed = [sources] if isinstance(sources, str) else list(sources)
    if not listed:
        raise SpecError(f"op {name} declares no sources")
    files = [os.path.abspath(os.fspath(source)) for source in listed]
    for file in files:
        if not os.path.isfile(file):
            fault = "is not a regular file" if os.path.exists(file) else "does not exist"
            raise SpecError(f"op {name}: the source {file} {fault}")
    if twice := next((file for file in files if files.count(file) > 1), ""):
        raise SpecError(f"op {name}: the source {twice} is listed twice")
    includes = [os.path.abspath(os.fspath(path)) for path in include_dirs]
    root = _root(files, includes)
    return model.OpSpec(
        name=name,
        distribution=model.ONE_CALL,
        root=root,
        sources=tuple(os.path.relpath(file, root) for file in files),
        include_dirs=tuple(includes),
        declared_by=model.CALL,
        **fields,
    )


def _root(files: list[str], includes: list[str]) -> str:
    """The deepest directory that contains all the sources.

    If directories for headers lie beside it, it is their parent, so that another clone of a project
    has the same key. It is never a directory above that, such as a home directory.
    """
    root = os.path.dirname(files[0]) if len(files) == 1 else os.path.commonpath(files)
    above = os.path.dirname(root)
    beside = (path for path in includes if not os.path.join(path, "").startswith(root + os.sep))
    if above.count(os.sep) > 1 and any(path.startswith(above + os.sep) for path in beside):
        return above
    return root


def inline_texts(
    cpp_sources: str | Sequence[str],
    cuda_sources: str | Sequence[str] | None,
    sycl_sources: str | Sequence[str] | None,
    bindings: str | None,
    *,
    headers: bool,
) -> tuple[tuple[str, str], ...]:
    """(name, text) of each file that torch would write for an inline extension.

    Each part is marked, so that a compiler's message names the argument and the line in it.
    """
    bound = [] if bindings is None else [wording.add_mark(wording.BINDINGS, bindings)]
    given = {
        "main.cpp": [*_mark_texts("cpp_sources", cpp_sources), *bound],
        "cuda.cu": _mark_texts("cuda_sources", cuda_sources),
        "sycl.sycl": _mark_texts("sycl_sources", sycl_sources),
    }
    made = []
    for name, parts in given.items():
        if not parts and name != "main.cpp":
            continue
        includes = [f"#include <{header}>" for header in _HEADERS[name]] if headers else []
        made.append((name, "\n".join([*includes, *parts]) + "\n"))
    return tuple(made)


_HEADERS = {
    "main.cpp": ("torch/extension.h",),
    "cuda.cu": ("torch/types.h", "cuda.h", "cuda_runtime.h"),
    "sycl.sycl": ("torch/types.h", "sycl/sycl.hpp"),
}


def declare_inline(
    name: str, texts: tuple[tuple[str, str], ...], *, include_dirs: Sequence[str], **fields: Any
) -> model.OpSpec:
    """The declaration of an extension whose sources are texts."""
    return model.OpSpec(
        name=name,
        distribution=model.ONE_CALL,
        root=model.INLINE_ROOT,
        sources=tuple(source for source, _ in texts),
        include_dirs=tuple(os.path.abspath(os.fspath(path)) for path in include_dirs),
        inline=texts,
        declared_by=model.CALL,
        **fields,
    )


def _load(spec: model.OpSpec, verbose: bool, build_directory: str | None) -> Any:
    asked = ""
    if spec.backend == model.CUDA and spec.device_args:
        from opkiln.machine.arch import cuda

        # As in torch, architectures among the flags replace those of the settings.
        flags, archs = cuda.split_flags(spec.device_args)
        spec, asked = spec._replace(device_args=flags), cuda.show(archs)
    value, artifact = serve(spec, asked, verbose)
    if build_directory is not None:
        copy_out(artifact, build_directory)
    return artifact.path if spec.kind == model.LIBRARY else value


def serve(spec: model.OpSpec, asked: str, verbose: bool) -> tuple[Any, model.Artifact]:
    """(the loaded value of a declaration, its artifact). ``asked`` is an arch list."""
    # Several specs may have one name; each call finds its own by its key.
    loaded = loader.load(model.Op(spec, asked=asked), again=True, verbose=verbose)
    assert loaded.artifact is not None  # there is no reference to fall back to
    return loaded.value, loaded.artifact


def copy_out(artifact: model.Artifact, directory: str) -> str:
    """Copy an artifact into a directory, which is made if necessary, and return its path there."""
    import shutil

    from opkiln.base.digest import open_replacement

    target = os.path.join(directory, os.path.basename(artifact.path))
    try:
        os.makedirs(directory, exist_ok=True)
        if not os.path.isfile(target) or sha256_file(target) != artifact.sha256:
            # The old file is not overwritten: another process may have it mapped.
            with open_replacement(target) as file:
                with open(artifact.path, "rb") as source:
                    shutil.copyfileobj(source, file)
                os.fchmod(file.fileno(), os.stat(artifact.path).st_mode & 0o777)
    except OSError as error:
        raise StoreError(
            f"{artifact.path} cannot be copied to build_directory={directory!r}: {error.strerror}"
        ) from error
    return target


def _check_abi(abi: str) -> str:
    if abi not in (ABI_TORCH, model.ABI_STABLE, model.ABI_NONE):
        raise UsageError(f"abi={abi!r}: expected 'torch', 'torch-stable' or 'none'")
    return abi


def _choose_kind(is_python_module: bool, is_standalone: bool, abi: str) -> str:
    if is_standalone:
        return model.EXECUTABLE
    if is_python_module:
        return model.PYTHON
    return model.PLAIN if abi == model.ABI_NONE else model.LIBRARY


def _check_flags(argument: str, flags: Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(flags, str):
        raise UsageError(f"{argument} must be a list of flags, not the string {flags!r}")
    return tuple(flags or ())


def _check_paths(paths: Sequence[str] | None) -> Sequence[str]:
    if isinstance(paths, str):
        raise UsageError(f"extra_include_paths must be a list, not the string {paths!r}")
    return paths or ()


def add_device(
    spec: model.OpSpec,
    with_cuda: bool | None,
    with_sycl: bool | None,
    cuda_flags: Sequence[str] | None,
    sycl_flags: Sequence[str] | None,
) -> model.OpSpec:
    """The spec for the backend of its sources, or for the one that the call asks for."""
    cuda = any(s.endswith(".cu") for s in spec.sources) if with_cuda is None else with_cuda
    sycl = any(s.endswith(".sycl") for s in spec.sources) if with_sycl is None else with_sycl
    if cuda and sycl:
        raise UsageError(f"op {spec.title}: one library cannot hold both CUDA and SYCL code")
    if cuda:
        from opkiln.machine.toolchain.torch_sdk import is_rocm_pytorch

        flags = _check_flags("extra_cuda_cflags", cuda_flags)
        backend = model.ROCM if is_rocm_pytorch() else model.CUDA
        return spec._replace(backend=backend, device_args=flags, vectorize=False)
    if sycl:
        flags = _check_flags("extra_sycl_cflags", sycl_flags)
        return spec._replace(backend=model.XPU, device_args=flags, vectorize=False)
    return spec


def _mark_texts(argument: str, sources: str | Sequence[str] | None) -> list[str]:
    texts = [sources] if isinstance(sources, str) else list(sources or ())
    return [wording.add_mark(f"{argument}[{place}]", text) for place, text in enumerate(texts)]


# The name of a function, perhaps in a namespace or of a template.
_FUNCTION = r"[A-Za-z_]\w*(::\w+)*(<[\w:<>, *&]*>)?"


def bindings(functions: str | Sequence[str] | Mapping[str, str], guarded: bool) -> str:
    """The pybind11 module that torch would write for these functions. Raises UsageError."""
    import re

    if isinstance(functions, str):
        functions = [functions]
    named = functions if hasattr(functions, "items") else {name: name for name in functions}
    lines = ["PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {"]
    for name, text in named.items():
        if not re.fullmatch(_FUNCTION, name):
            raise UsageError(f"functions: {name!r} is not the name of a C++ function")
        target = f"torch::wrap_pybind_function({name})" if guarded else f"&{name}"
        lines.append(f'  m.def("{name}", {target}, R"opkiln({text})opkiln");')
    return "\n".join([*lines, "}"])
