"""Sources that are given as text: how each part is marked, written for a compiler, and shown.

The parts of one file follow generated includes. A ``#line`` before each part makes the compiler's
messages name the argument and the line in it (``cpp_sources[0]:3``). The marks contain no path, so
the text and every key made from it are the same on every machine.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from opkiln.model import OpSpec

BINDINGS = "functions"  # the argument that the generated bindings come from

# These are the only names accepted from a text, because files are written under them.
_MARK = r'^#line 1 "((?:cpp|cuda|sycl)_sources\[\d+\]|functions)"\n'


def marked(name: str, text: str) -> str:
    """A part of a file, with the mark that gives messages its name and line numbers."""
    return f'#line 1 "{name}"\n{text}'


def unmarked(text: str) -> str:
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
