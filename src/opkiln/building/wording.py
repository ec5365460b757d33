"""The names that an author uses for the parts of a declaration, and sources that are text.

A hint that names ``include_paths()`` does not help a caller of ``load(extra_include_paths=…)``.

The parts of one text follow generated includes. A ``#line`` before each part makes the compiler's
messages name the argument and the line in it (``cpp_sources[0]:3``). The marks contain no path, so
the text and every key made from it are the same on every machine.
"""

from __future__ import annotations

import contextlib
import os

from opkiln.base.digest import read_file
from opkiln.base.lazy import Record
from opkiln.base.model import ABI_STABLE, CALL, DECORATOR, DISPATCH_KEYS, EXTENSION, function_name
from opkiln.base.signature import canonical_signature, cpp, devices, differences

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from opkiln.base.model import OpSpec
    from opkiln.base.signature import NativeFunction


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
_DECORATOR = Names(
    "the sources of @opkiln.op",
    'needs={"include_dirs": […]}',
    'needs={"libraries": ["…"]}    # in @opkiln.op',
    'needs={"ldflags": ["-L{}"]}    # in @opkiln.op',
    "",
    "",
)
_CALL = Names(
    "sources",
    "extra_include_paths",
    "extra_ldflags=['-l…']",
    "extra_ldflags=['-L{}']",
    "abi='torch'    # in the call",
    "is_python_module=False    # in the call",
)
_EXTENSION = Names("sources", "include_dirs", "libraries=['…']", "library_dirs=['{}']", "", "")


def names_for(spec: OpSpec) -> Names:
    """The names for this spec, by how it was declared."""
    if spec.declared_by == CALL:
        return _CALL._replace(sources="cpp_sources") if spec.inline else _CALL
    return {EXTENSION: _EXTENSION, DECORATOR: _DECORATOR}.get(spec.declared_by, _BUILDER)


def undefined_symbol(spec: OpSpec) -> str:
    """The hint for a symbol that nothing defines."""
    names = names_for(spec)
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
    if _uses_op_header(spec):
        return misfit(spec, ())
    key = DISPATCH_KEYS[spec.backend][0]
    what = f"op {spec.title}: its library registers no {key} kernel for {', '.join(missing)}"
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


def _uses_op_header(spec: OpSpec) -> bool:
    texts = [text for _, text in spec.inline]
    for source in () if texts else spec.sources:
        with contextlib.suppress(OSError):  # it was there a moment ago, when it was compiled
            texts.append(read_file(os.path.join(spec.root, source)).decode(errors="replace"))
    return any("<opkiln/op.h>" in text for text in texts)


def misfit(spec: OpSpec, functions: Sequence[NativeFunction]) -> tuple[str, str, str]:
    """The message, the reason and the hint for a library of op.h that does not fit its schemas."""
    schemas = {function_name(each): each for each in spec.schemas}
    device = devices(spec)[0]
    listed = ", ".join(f"{each.name} for {each.device}" for each in functions)
    has = f"it has {listed}" if listed else "OPKILN_OP is missing"
    if not schemas:
        what = f"op {spec.title} declares no schemas for the functions of its library"
        example = f"@kit.op()    # def {functions[0].name}(x: Tensor) -> Tensor: ..."
        return what, f"{has}\nthey are registered with the schemas of their declaration", example
    for each in functions:
        schema = schemas.get(each.name, "")
        if schema and (found := differences(schema, each.signature)):
            what = f"op {spec.title}: the C++ function {each.name} does not fit its schema"
            why = "\n".join(
                [*found, f"schema: {canonical_signature(schema)}", f"C++:    {each.signature}"]
            )
            return what, why, cpp(schema) or "op.h has no C++ type for a part of the schema"
    there = {each.name for each in functions if each.device in devices(spec)}
    wanted = (each.partition("::")[2] for each in spec.kernels)
    if missing := [name for name in wanted if name not in there]:
        what = f"op {spec.title}: its library has no {device} function {', '.join(missing)}"
        return what, has, f"OPKILN_OP({missing[0]}, {device});    // after the function"
    extra = ", ".join(each.name for each in functions if each.name not in schemas)
    what = f"op {spec.title}: its library has {extra}, which no schema declares"
    return what, f"the schemas declare {', '.join(schemas)}", "add a schema, or remove OPKILN_OP"


BINDINGS = "functions"  # the argument that the generated bindings come from

# These are the only names accepted from a text, because files are written under them.
_MARK = r'^#line 1 "((?:cpp|cuda|sycl)_sources\[\d+\]|functions)"\n'


def add_mark(name: str, text: str) -> str:
    """A part of a file, with the mark that gives messages its name and line numbers."""
    return f'#line 1 "{name}"\n{text}'


def remove_marks(text: str) -> str:
    """A file's text without the marks, as torch would have written it."""
    import re

    return re.sub(_MARK, "", text, flags=re.MULTILINE)


def write_sources(spec: OpSpec, root: str) -> None:
    """Write a spec's texts as the files that a compiler reads. Raises OSError."""
    for source, text in spec.inline:
        _write(os.path.join(root, source), text)


def write_parts(spec: OpSpec, directory: str) -> None:
    """Write each part to a file of its name, where g++ looks for the line to show in a message.

    Raises OSError.
    """
    for _, text in spec.inline:
        for name, part in _parts(text):
            _write(os.path.join(directory, name), part)


def _parts(text: str) -> Iterator[tuple[str, str]]:
    import re

    pieces = iter(re.split(_MARK, text, flags=re.MULTILINE)[1:])
    yield from zip(pieces, pieces, strict=True)


def _write(path: str, text: str) -> None:
    # The key is a digest of the text, so the file must not depend on the user's locale.
    with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
