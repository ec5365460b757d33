"""What the parts of a declaration are called where the caller wrote them.

A hint that names ``include_paths()`` does not help a caller of ``load(extra_include_paths=…)``.
"""

from __future__ import annotations

from opkiln.model import CALL, EXTENSION
from opkiln.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.model import OpSpec


class Names(Record):
    """The caller's words for each part."""

    sources: str
    include_dirs: str
    libraries: str  # an example of linking one
    library_dir: str  # where a directory to look for a library in goes; {} is the directory
    full_abi: str  # how the full ABI is asked for; empty where nothing else can be
    no_module: str  # how a library without a Python module is asked for


_BUILDER = Names(
    "sources()",
    "include_paths()",
    'libraries_args() returns ["…"]',
    'extra_ldflags() returns ["-L{}"]',
    'ABI = "torch"    # in the builder',
    'KIND = "library"    # in the builder',
)
_CALL = Names(
    "sources",
    "extra_include_paths",
    "extra_ldflags=['-l…']",
    "extra_ldflags=['-L{}']",
    "abi='torch'    # in the call",
    "is_python_module=False    # in the call",
)
_EXTENSION = Names(
    "sources",
    "include_dirs",
    "libraries=['…']",
    "library_dirs=['{}']",
    "",
    "",
)


def of(spec: OpSpec) -> Names:
    """The words of whoever declared a spec."""
    if spec.declared_by == CALL:
        return _CALL._replace(sources="cpp_sources") if spec.inline else _CALL
    return _EXTENSION if spec.declared_by == EXTENSION else _BUILDER


def undefined_symbol(spec: OpSpec) -> str:
    """The hint for a symbol that nothing defines."""
    names = of(spec)
    return (
        f"is a source missing from {names.sources}? If not, link the library that defines it: "
        f"{names.libraries}"
    )
