"""The names of a declaration's parts, as the caller knows them.

A hint that names ``include_paths()`` does not help a caller of ``load(extra_include_paths=…)``.
"""

from __future__ import annotations

from opkiln.model import ABI_STABLE, CALL, DISPATCH_KEYS, EXTENSION
from opkiln.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from opkiln.model import OpSpec


class Names(Record):
    """The caller's name for each part."""

    sources: str
    include_dirs: str
    libraries: str  # an example of linking a library
    library_dir: str  # how to add a directory to search for libraries; {} is the directory
    full_abi: str  # how to ask for the full ABI; empty if it is the only one
    no_module: str  # how to ask for a library without a Python module


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
    """The names for this spec, by how it was declared."""
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


def missing_kernels(
    spec: OpSpec, missing: Sequence[str], others: Sequence[str] = ()
) -> tuple[str, str, str]:
    """The message, the reason and the hint for a library without kernels for these functions.

    ``others`` are functions of the same names in other namespaces that have a kernel.
    """
    key = DISPATCH_KEYS[spec.backend][0]
    what = f"op {spec.name}: its library registers no {key} kernel for {', '.join(missing)}"
    why = "m.impl() is missing, or its namespace, name or dispatch key differs"
    if others:
        why += f"\nthere is a kernel for {', '.join(others)}"
    namespace, _, name = missing[0].partition("::")
    stable = spec.abi == ABI_STABLE
    kernel, macro = ("TORCH_BOX(&{0})", "STABLE_TORCH") if stable else ("&{0}", "TORCH")
    hint = (
        f'm.impl("{name}", {kernel.format(name)});    '
        f"// in {macro}_LIBRARY_IMPL({namespace}, {key}, m)"
    )
    if len(missing) < len(spec.kernels):
        hint += "; or leave it out of kernels()"
    return what, why, hint
