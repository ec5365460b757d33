"""The import hook: it replaces functions in modules of other packages with opkiln's.

Nothing on disk changes. A finder watches for the imports of a few modules. When one of them has
been executed, opkiln's functions replace its own. A module that was imported before is changed at
once. ``remove()`` puts everything back.

Executing torch's module takes longer than loading a cached extension, and a program that only calls
``load`` needs nothing else from it. So it is executed when it is first asked for a name that
opkiln does not serve.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import opkiln
from opkiln.base import forks
from opkiln.settings import settings

# The module of opkiln that serves each watched one. It has
#   replacements(module): the owner, the attribute and the new value of each replacement;
#   SERVED, optional: the names that it serves itself, before the watched module is executed;
#   Module, optional: the class that the watched module gets.
PARTS = {
    "torch.utils.cpp_extension": "opkiln.compat.torch",
    "deepspeed.ops.op_builder.builder": "opkiln.compat.deepspeed.patch",
    "deepspeed.env_report": "opkiln.compat.deepspeed.patch",
    "torch.distributed.distributed_c10d": "opkiln.compat.distributed",
    "tvm_ffi.cpp.extension": "opkiln.compat.jits",
    "flashinfer.jit.core": "opkiln.compat.jits",
    "sglang.kernels.jit.utils.compile.ninja": "opkiln.compat.jits",
}
_JOBS = "torch.distributed.distributed_c10d"
BUILDERS = tuple(name for name in PARTS if name != _JOBS)

_ABSENT = object()
_lock = forks.lock()  # a signal handler may import the modules, too
_finder: _Finder | None = None
_watched: set[str] = set()
# The replaced values of each module, in order: (owner, name, value).
_before: dict[str, list[tuple[Any, str, Any]]] = {}
# Held while a deferred module is executed: other threads wait for its names.
_execution = forks.lock()
_executing: set[str] = set()
os.register_at_fork(after_in_child=_executing.clear)


def start() -> None:
    """Let ``torch.load`` read quantized tensors; with ``OPKILN_PATCH_TORCH``, install the hook.

    torch calls this when it is imported (its entry-point group ``torch.backends``), and so does
    every Python that ``opkiln run`` starts.
    """
    opkiln._allow_torch_to_load()
    if settings.patch_torch:
        install(PARTS if settings.ensure else BUILDERS)


def install(modules: Iterable[str] = BUILDERS) -> None:
    """Replace the functions, now or when their modules are imported.

    Calling it again has no effect.
    """
    global _finder
    modules = tuple(modules)
    with _lock:
        _watched.update(modules)
        if _finder is None:
            _finder = _Finder()
            sys.meta_path.insert(0, _finder)
    for name in modules:
        module = sys.modules.get(name)
        if module is None or isinstance(module, _Deferred):
            continue
        # The finder sees a module that is being imported only if it was installed before the
        # import began. Such a module may not have its `load` yet; `_initializing` is how
        # importlib says so.
        if not getattr(module.__spec__, "_initializing", False):
            _replace(module, name)


def remove(modules: Iterable[str] = PARTS) -> None:
    """Put the functions of these modules back, and stop watching for them."""
    global _finder
    modules = tuple(modules)
    for name in modules:
        module = sys.modules.get(name)
        if isinstance(module, _Deferred):
            _execute(module)
    with _lock:
        for name in modules:
            _watched.discard(name)
            for owner, attribute, value in reversed(_before.pop(name, [])):
                if value is _ABSENT:
                    delattr(owner, attribute)
                else:
                    setattr(owner, attribute, value)
            if name in sys.modules:
                sys.modules[name].__class__ = ModuleType
        if _finder is not None and not _watched:
            sys.meta_path.remove(_finder)
            _finder = None


def is_installed() -> bool:
    """Whether ``install`` is in force in this process."""
    return _finder is not None


def _replace(module: ModuleType, name: str) -> None:
    part = import_module(PARTS[name])
    with _lock:
        if name in _before or name not in _watched:
            return
        before = _before[name] = []
        for owner, attribute, value in part.replacements(module):
            before.append((owner, attribute, vars(owner).get(attribute, _ABSENT)))
            setattr(owner, attribute, value)
    module.__class__ = getattr(part, "Module", ModuleType)


class _Finder:
    """Finds the watched modules where the other finders find them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _watched:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None
            if finder is not self and find is not None:
                spec = find(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
                return spec
        return None


class _Loader:
    """Another loader, with the replacement after it. The module keeps only the other loader."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None  # the import system has set it
        spec.loader = module.__loader__ = self._loader
        _before.pop(spec.name, None)  # a reload gives the module its own functions again
        if hasattr(import_module(PARTS[spec.name]), "SERVED"):
            module.__class__ = _Deferred
        else:
            self._loader.exec_module(module)
            _replace(module, spec.name)


class _Deferred(ModuleType):
    """A module that is imported and not executed yet.

    It returns the names that opkiln serves. Any other name, an assignment or a read of ``__dict__``
    executes it. It then has another class, so these methods do not call ``super()``.
    """

    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__":
            _execute(self)
        elif not name.startswith("__"):
            part = import_module(PARTS[self.__name__])
            # Always opkiln's value, also while another thread executes the module.
            if name in part.SERVED:
                return getattr(part, name)
        return ModuleType.__getattribute__(self, name)

    def __getattr__(self, name: str) -> Any:
        # Every `from … import` asks for __path__, which only packages have.
        if not name.startswith("__") or name == "__all__":
            _execute(self)
        return ModuleType.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("__"):
            _execute(self)
        ModuleType.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        _execute(self)
        ModuleType.__delattr__(self, name)


def _execute(module: _Deferred) -> None:
    """Execute a deferred module and replace its functions, once. Raises what its code raises."""
    name = module.__name__
    with _execution:
        if type(module) is not _Deferred or name in _executing:
            return  # another thread has done it, or this one is doing it
        _executing.add(name)
        own = vars(module)
        before = dict(own)
        try:
            spec = module.__spec__
            assert spec is not None
            assert spec.loader is not None
            spec.loader.exec_module(module)
            _replace(module, name)
        except BaseException:
            own.clear()
            own.update(before)
            raise
        finally:
            _executing.discard(name)
