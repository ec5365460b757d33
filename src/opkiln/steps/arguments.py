"""The parts of command lines that every compiler shares: anchored paths, names of objects."""

from __future__ import annotations

import os
import posixpath

from opkiln.digest import key
from opkiln.model import ABI_NONE, PACKAGE, Anchored, Arg, DeviceCompiler, OpSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_PATH_FLAGS = ("-I", "-isystem", "-iquote", "-idirafter", "-L", "-include")

# The same bytes wherever torch, the sources and the build lie: __FILE__, debug information. The
# last one that fits is taken, and a compiler may be shown sources below the staging directory.
_OPKILN_MAP = Anchored("-ffile-prefix-map=", "opkiln", "", "=/opkiln/opkiln")
_TORCH_MAP = Anchored("-ffile-prefix-map=", "torch", "", "=/opkiln/torch")
_WHEELS_MAP = Anchored("-ffile-prefix-map=", "wheels", "", "=/opkiln/wheels")
_PREFIX_MAPS = (
    Anchored("-ffile-prefix-map=", "stage", "", "=/opkiln/build"),
    Anchored("-ffile-prefix-map=", "src", "", "=/opkiln/src"),
)


def prefix_maps(spec: OpSpec, device: DeviceCompiler | None = None) -> tuple[Anchored, ...]:
    """The flags that keep where things lie out of what is compiled."""
    maps = _PREFIX_MAPS if spec.abi == ABI_NONE else (_TORCH_MAP, *_PREFIX_MAPS)
    if device is not None and wheel_includes(spec, device, ""):
        maps = (_WHEELS_MAP, *maps)
    ours = any(anchored(spec, path).anchor == "opkiln" for path in spec.include_dirs)
    return (_OPKILN_MAP, *maps) if ours else maps


def anchored(spec: OpSpec, path: str, prefix: str = "") -> Anchored:
    """A path of the author's, below the source root or opkiln's own where it is there."""
    if not os.path.isabs(path):
        return Anchored(prefix, "src", posixpath.normpath(path))
    for anchor, place in (("src", spec.root), ("opkiln", PACKAGE)):
        root = place.rstrip("/") + "/"
        if path.startswith(root):
            return Anchored(prefix, anchor, posixpath.normpath(path[len(root) :]))
    return Anchored(prefix, "abs", path)


def in_toolkit(device: DeviceCompiler, path: str, prefix: str = "") -> Anchored:
    """A path of the device toolkit's, below its root where it is there."""
    home = device.home.rstrip("/") + "/"
    if path.startswith(home):
        return Anchored(prefix, "toolkit", path[len(home) :])
    return Anchored(prefix, "abs", path)


def wheel_includes(spec: OpSpec, device: DeviceCompiler, option: str) -> list[Anchored]:
    """The directories of headers that the toolkit lacks; after its own, which come first."""
    if spec.abi == ABI_NONE:
        return []
    return [Anchored(option, "wheels", path) for path in device.wheel_include_dirs]


def author_flags(spec: OpSpec, flags: tuple[str, ...]) -> Iterator[Arg]:
    """An author's flags, with the paths below the source root anchored."""
    for flag in flags:
        prefix = next((p for p in _PATH_FLAGS if flag.startswith(p) and flag != p), None)
        path = flag[len(prefix) :] if prefix else ""
        yield anchored(spec, path, prefix or "") if os.path.isabs(path) else flag


def object_name(source: str) -> str:
    """The object of a source, named after its path: two files of one name do not collide."""
    plain = (
        char if char.isascii() and (char.isalnum() or char in "_.") else "-" for char in source
    )
    flat = "".join(plain).lstrip("-")[-80:]
    return f"{flat}-{key('source', source)[:8]}.o"


def depfile_name(output: str) -> str:
    """The dependency file that goes with an object."""
    return output[:-2] + ".d"
