"""Modules of other packages, with opkiln's functions in the place of theirs.

Nothing on disk changes: a finder watches for the imports of a few modules, and when one of them
has been executed, the functions that opkiln has, too, are exchanged in it. What was imported
before is exchanged at once. ``remove()`` puts everything back.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader
from threading import Lock
from typing import Any

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

# Where a module's part is: its ``replacements(module)`` gives the attributes to exchange.
PARTS = {
    "torch.utils.cpp_extension": "opkiln.compat.torch_patch",
    "deepspeed.ops.op_builder.builder": "opkiln.compat.deepspeed.patch",
}

_ABSENT = object()
_lock = Lock()
_finder: _Finder | None = None
_watched: set[str] = set()
# By module, what was there before, in the order of the exchanges: (owner, name, value).
_before: dict[str, list[tuple[Any, str, Any]]] = {}


def install(modules: Iterable[str] = PARTS) -> None:
    """Exchange the functions, now or when their modules are imported. Twice is once."""
    global _finder
    modules = tuple(modules)
    with _lock:
        _watched.update(modules)
        if _finder is None:
            _finder = _Finder()
            sys.meta_path.insert(0, _finder)
    for name in modules:
        module = sys.modules.get(name)
        # One that is being imported is seen by the finder only if that was there first. Its
        # `load` may not be defined yet; `_initializing` is how importlib says so.
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            _exchange(module, name)


def remove(modules: Iterable[str] = PARTS) -> None:
    """Put back what was there in these modules, and watch for them no more."""
    global _finder
    with _lock:
        for module in modules:
            _watched.discard(module)
            for owner, name, value in reversed(_before.pop(module, [])):
                if value is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, value)
        if _finder is not None and not _watched:
            sys.meta_path.remove(_finder)
            _finder = None


def installed() -> bool:
    """Whether ``install`` is in force in this process."""
    return _finder is not None


def _exchange(module: ModuleType, name: str) -> None:
    part = import_module(PARTS[name])
    with _lock:
        if name in _before or name not in _watched:
            return
        before = _before[name] = []
        for owner, attribute, value in part.replacements(module):
            before.append((owner, attribute, vars(owner).get(attribute, _ABSENT)))
            setattr(owner, attribute, value)


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
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(Loader):
    """Another loader, and the exchange after it. The module is left with the other one alone."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None  # it is being imported by it
        spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _exchange(module, spec.name)
