"""Opens a verified file in this process, by its kind, also beside older versions of it.

A library that is written with ``opkiln/op.h`` (``Light``) registers nothing when it is opened. It
lists its functions, each with its signature. Each is compared with the schema of the op's
declaration, and only then registered. So a wrong type is an error before the first call, where
torch would read the wrong bits or crash, and a new version of an op replaces the old one.

Several libraries may have one function, each for a dtype. torch knows the first of them; a call
with another dtype goes from library to library until one is for it. Where none is, and where a
kernel does not serve a call, the overload ``unserved`` of the function takes it, in Python.
"""

from __future__ import annotations

import ctypes
import os
from itertools import zip_longest
from typing import Any

from opkiln.base import signature
from opkiln.base.lazy import Record
from opkiln.base.model import (
    ABI_NONE,
    EXECUTABLE,
    LIBRARY,
    PLAIN,
    PYTHON,
    XPU,
    Artifact,
    OpSpec,
    function_name,
)
from opkiln.base.signature import NativeFunction
from opkiln.errors import LoadError, LoadTestError, ReloadError
from opkiln.loading.here import here

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opkiln.base.model import Registration


def open_artifact(spec: OpSpec, path: str, registration: Registration | None = None) -> Any:
    """The loaded thing: an extension module, a CDLL, a path; None for a torch library.

    ``registration`` says what the functions of a torch library are registered as. Raises LoadError
    with what the dynamic linker said.
    """
    try:
        if spec.kind == EXECUTABLE:
            return path
        if spec.abi != ABI_NONE or spec.kind == LIBRARY:
            import torch
        if spec.backend == XPU:
            _load_libsycl(path)
        if spec.kind == LIBRARY:
            # As torch.ops.load_library does. That does not give the library, and would open what
            # the link to one in memory leads to (store.archive), which is not a file.
            library = _open_library(path)
            torch.ops.loaded_libraries.add(path)
            adopt(spec, library, registration)
            return None
        if spec.kind == PLAIN:
            return _open_library(path)
        return _import_module(spec.name, path)
    except (OSError, ImportError) as error:
        if spec.kind == PYTHON and "is already registered" in str(error):
            raise ReloadError(
                f"{spec.title} cannot be loaded: another library of this process binds one of its "
                "C++ classes",
                why=f"{error}\npybind11 knows a class by its C++ type, once per process",
                hint="restart the process, or bind it for one module alone: "
                'py::class_<T>(m, "T", py::module_local())',
            ) from error
        hint = ""
        if spec.kind == PYTHON and "PyInit_" in str(error):
            from opkiln.building import wording

            how = wording.names_for(spec).no_module
            hint = f"{how}; there is no PYBIND11_MODULE in it" if how else ""
        raise LoadError(
            f"{spec.title} cannot be loaded from {path}", why=str(error), hint=hint
        ) from error


def _open_library(path: str) -> Any:
    return ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)


def _load_libsycl(path: str) -> None:
    """Load the SYCL runtime that a library needs: it names it by its soname alone."""
    from opkiln.machine.binary import elf
    from opkiln.machine.toolchain import libsycl

    for name in filter(libsycl.is_library, elf.read(path).needed):
        try:
            # First the one that is loaded, by torch say: a second copy would know other devices.
            ctypes.CDLL(name)
        except OSError:
            if located := libsycl.locate(name):
                ctypes.CDLL(located)


def _import_module(name: str, path: str) -> Any:
    """Import an extension module that shares nothing with others of its name.

    pybind11 3 keeps finished modules for the whole process, by the name in their spec, and gives
    the kept one for any other library. So the spec has a name that nobody else uses while the
    module is made; its last part is where CPython looks for ``PyInit_<name>``. Submodules and
    classes are named after ``__name__``, which is set before the module's own code runs: the plain
    name for the first library, torch's ``_v1`` and so on for those after it. Submodules are found
    in sys.modules by their names, so a second version under the first one's would add to them.
    """
    import sys
    from importlib.machinery import ExtensionFileLoader
    from importlib.util import module_from_spec, spec_from_file_location

    shown = _claim_name(name)
    private = f"opkiln.loaded.{shown}.{name}"
    loader = ExtensionFileLoader(private, path)
    spec = spec_from_file_location(private, path, loader=loader)
    try:
        if spec is None:
            raise ImportError(f"{path} is not an extension module")
        module = module_from_spec(spec)
        module.__name__, module.__package__ = shown, ""
        loader.exec_module(module)
    except BaseException:
        del here.module_names[shown]
        raise
    if sys.modules.pop(private, None) is not None:
        # CPython itself has put a module of the older kind (single-phase initialization) there.
        sys.modules[shown] = module
    loader.name = spec.name = shown
    return module


def _claim_name(name: str) -> str:
    claim, shown, version = object(), name, 0
    while here.module_names.setdefault(shown, claim) is not claim:
        version += 1
        shown = f"{name}_v{version}"
    return shown


def prepare_beside(spec: OpSpec, artifact: Artifact, earlier: list[Artifact]) -> Artifact:
    """The artifact to open after ``earlier``: itself, or a copy of one that was open before.

    The dynamic linker runs a library's initialisers once per file, so a version that comes back
    needs a file of its own. Whether this works is tried in a child: two libraries that define the
    same schema end the process. Raises ReloadError.
    """
    from opkiln.building import loadtest
    from opkiln.machine.toolchain import torch_sdk
    from opkiln.store import publish

    if spec.kind == PLAIN or is_light(artifact.path):
        return artifact  # opening it registers nothing
    if any(each.sha256 == artifact.sha256 for each in earlier):
        artifact = artifact._replace(path=publish.private_copy(artifact.path))
    sdk = None if spec.abi == ABI_NONE else torch_sdk.find()
    with publish.scratch(f"{spec.name}-reload") as tmpdir:
        try:
            before = tuple(each.path for each in earlier if _intact(each))
            loadtest.check(spec, sdk, artifact.path, after=before, tmpdir=tmpdir)
        except LoadTestError as error:
            raise ReloadError(
                f"the new build of {spec.title} cannot be loaded beside the old one",
                why=f"{error.why}\n(a library that defines its own schemas can be loaded once)",
                hint="restart the process",
            ) from error
    return artifact


def ensure_own_file(op: object, artifact: Artifact) -> Artifact:
    """The artifact to open for ``op``: itself, or a copy if another op has opened the same file.

    The dynamic linker knows a file by its device and inode. A bundle's libraries with equal bytes
    are one file in memory, and tools that save space (Nix, OSTree, ``hardlink``) make one file of
    two on disk. Two ops would then share one library and its static variables. The copy is in
    memory. Raises LoadError.
    """
    try:
        status = os.stat(artifact.path)
        # No other file gets the inode: what was opened stays open.
        if here.files.setdefault((status.st_dev, status.st_ino), op) == op:
            return artifact
        from opkiln.store import sealed

        return artifact._replace(path=sealed.copy(artifact.path, artifact.sha256))
    except OSError as error:
        raise LoadError(f"{artifact.path} cannot be opened", why=str(error)) from error
    except ValueError as error:  # sealed.Changed
        why = f"it has the SHA-256 {error}, not {artifact.sha256}"
        raise LoadError(f"{artifact.path} was changed while it was copied", why=why) from error


def _intact(artifact: Artifact) -> bool:
    """Whether the file is still what this process opened: it may be collected or damaged since."""
    from opkiln.base.digest import sha256_file

    try:
        return sha256_file(artifact.path) == artifact.sha256
    except OSError:
        return False


ABI = 3  # of the record, and of the functions that a library exports for it

_Name = tuple[str, str, str]


class _COp(ctypes.Structure):
    """``struct opkiln_op`` of ``op/record.h``, as far as it is read here."""


_COp._fields_ = [
    ("abi", ctypes.c_uint32),
    ("dtype", ctypes.c_int32),
    ("name", ctypes.c_char_p),
    ("device", ctypes.c_char_p),
    ("signature", ctypes.c_char_p),
    ("next", ctypes.POINTER(_COp)),
]


class Listed(Record):
    """One function of a library."""

    library: Any
    pointer: Any
    function: NativeFunction
    namespace: str
    overloads: tuple[str, ...]

    @property
    def place(self) -> tuple[str, str]:
        """What it implements: (device, function)."""
        return self.function.device, f"{self.namespace}::{self.function.name}"

    def register(self) -> None:
        """Tell torch. Raises LoadError."""
        self.library.opkiln_register.restype = ctypes.c_char_p
        for each in self.overloads:
            name = f"{self.function.name}.{each}" if each else self.function.name
            words = (text.encode() for text in (self.namespace, name))
            wrong = self.library.opkiln_register(self.pointer, *words)
            if wrong:
                raise LoadError(
                    f"torch cannot register {self.function.name}",
                    why=wrong.decode(errors="replace"),
                )


def is_light(path: str) -> bool:
    """Whether a file is such a library."""
    from opkiln.machine.binary import elf

    return "opkiln_ops" in elf.defined_symbols(path)


def adopt(spec: OpSpec, library: Any, registration: Registration | None) -> None:
    """Register the functions of a library that was just opened, in place of an older version's.

    Each is registered as all overloads that the registration names. If the registration
    passes on, the overload ``unserved`` of each takes the calls that a kernel does not serve.

    A library that registers itself when it is opened is left alone. Raises LoadError if a function
    is missing or does not fit its schema; the older version then stays.
    """
    listed = getattr(library, "opkiln_ops", None)
    if listed is None:
        unregister(*_name(spec))
        return
    pointers = tuple(_walk(spec, listed))
    functions = [_describe(each) for each in pointers]
    if not signature.fits(spec, functions):
        from opkiln.building.wording import misfit

        what, why, hint = misfit(spec, functions)
        raise LoadError(what, why=why, hint=hint)
    schemas = {function_name(each): each for each in spec.schemas}
    namespace = spec.kernels[0].partition("::")[0]
    with here.listing:
        unregister(*_name(spec))
        mine = here.listed[_name(spec)] = []
        for pointer, function in zip(pointers, functions, strict=True):
            overloads = registration and registration.overloads_of(function.name)
            each = Listed(library, pointer, function, namespace, overloads or ("",))
            names = ",".join(signature.argument_names(schemas[function.name]))
            passes_on = registration is not None and registration.passes_on
            reference = each.place[1].encode() if passes_on else None
            library.opkiln_describe(pointer, names.encode(), reference)
            mine.append(each)
            try:
                _enter(each)
            except LoadError as error:
                unregister(*_name(spec))
                raise LoadError(f"op {spec.title}: {error.what}", why=error.why) from error


def _enter(new: Listed) -> None:
    """Have calls reach a function: of torch, or of the libraries for other dtypes."""
    chain = here.chains.setdefault(new.place, [])
    if new.pointer.contents.dtype < 0 or not chain:
        new.register()
    if new.pointer.contents.dtype >= 0:
        chain.append(new)
        _link(chain)


def _leave(old: Listed) -> None:
    """Have no call reach a function."""
    old.library.opkiln_unregister(old.pointer)
    before = here.chains.get(old.place, [])
    chain = here.chains[old.place] = [each for each in before if each is not old]
    if chain and chain[0] is not before[0]:
        chain[0].register()
    _link(chain)


def _link(chain: list[Listed]) -> None:
    """Have each pass calls with another dtype on to the next."""
    for each, following in zip_longest(chain, chain[1:]):
        each.library.opkiln_link(each.pointer, None if following is None else following.pointer)


def has_registered(spec: OpSpec) -> bool:
    """Whether the functions of a library of this kind are registered for the op."""
    return _name(spec) in here.listed


def _walk(spec: OpSpec, listed: Any) -> Iterator[Any]:
    listed.restype = ctypes.POINTER(_COp)
    pointer = listed()
    while pointer:
        if pointer.contents.abi != ABI:
            raise LoadError(
                f"op {spec.title}: its library was built with the op.h of another opkiln",
                why=f"its list of functions has version {pointer.contents.abi}, this opkiln reads "
                f"version {ABI}",
                hint=f"opkiln build {spec.name}",
            )
        yield pointer
        pointer = pointer.contents.next


def _describe(pointer: Any) -> NativeFunction:
    each = pointer.contents
    return NativeFunction(each.name.decode(), each.device.decode(), each.signature.decode())


def unregister(distribution: str, op: str, backend: str = "") -> None:
    """Unregister the libraries of an op, for one backend or for all: its reference serves."""
    with here.listing:
        for name in list(here.listed):
            if name[:2] == (distribution, op) and backend in ("", name[2]):
                for each in here.listed.pop(name):
                    _leave(each)


def _name(spec: OpSpec) -> _Name:
    return spec.distribution, spec.name, spec.backend
