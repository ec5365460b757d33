"""Translates CUDA files to HIP in place; run as a program, with torch's hipify loaded by its path.

    python -I -S translate_hip.py DIRECTORY-OF-HIPIFY LISTING

The listing is a JSON object. It maps each file, relative to the current directory, to the names in
its ``#include`` lines that must not change, because they refer to a file of the author. torch would
mistake an author's ``cuda.h`` for CUDA's. Line numbers do not change: nothing is added, and kernel
launches stay ``<<<…>>>``, which clang understands.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import sys
from typing import Any

_INCLUDE = re.compile(r"""^([ \t]*\#[ \t]*include[ \t]*["<])([^">\n]+)([">])""", re.MULTILINE)
_NEEDED = (
    "RE_PYTORCH_PREPROCESSOR", "PYTORCH_MAP", "replace_math_functions", "get_hip_file_path",
)  # fmt: skip


def load(directory: str) -> Any:
    """torch's ``hipify_python``, loaded in a separate package so that torch is not imported."""
    spec = importlib.util.spec_from_file_location(
        "hipify", os.path.join(directory, "__init__.py"), submodule_search_locations=[directory]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["hipify"] = package
    spec.loader.exec_module(package)
    module = importlib.import_module("hipify.hipify_python")
    missing = [name for name in _NEEDED if not hasattr(module, name)]
    if missing:
        sys.exit(f"{directory} lacks {', '.join(missing)}")
    return module


def translate(hipify: Any, text: str, own: set[str], *, device: bool) -> str:
    """A file's text as HIP. ``device``: it is a .cu or .cuh file, which may have device code."""
    parts, end = [], 0
    for match in _INCLUDE.finditer(text):
        if match[2] in own:
            parts += [_words(hipify, text[end : match.start()]), match[0]]
            end = match.end()
    parts.append(_words(hipify, text[end:]))
    text = _INCLUDE.sub(lambda match: _header(hipify, match, own), "".join(parts))
    return str(hipify.replace_math_functions(text)) if device else text


def _words(hipify: Any, text: str) -> str:
    # The expression needs a character on both sides of a word.
    mapped = hipify.RE_PYTORCH_PREPROCESSOR.sub(
        lambda match: str(hipify.PYTORCH_MAP[match[0]]), f"\n{text}\n"
    )
    return str(mapped[1:-1])


def _header(hipify: Any, match: re.Match[str], own: set[str]) -> str:
    """An ``#include`` of torch's CUDA headers, which a ROCm torch has under other names."""
    name = match[2]
    if name in own or not name.startswith("ATen/") or "/cuda/" not in name:
        return match[0]
    return f"{match[1]}{hipify.get_hip_file_path(name, True)}{match[3]}"


def main(directory: str, listing: str) -> None:
    """Translate the files in the listing."""
    hipify = load(directory)
    with open(listing, encoding="ascii") as file:
        files = json.load(file)
    for path, own in files.items():
        with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
            before = file.read()
        after = translate(hipify, before, set(own), device=path.endswith((".cu", ".cuh")))
        if after != before:
            with open(path, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
                file.write(after)


if __name__ == "__main__":
    main(*sys.argv[1:])
