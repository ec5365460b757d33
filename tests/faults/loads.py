"""Loads ops in a process of its own: one request (a JSON line) in, one answer (a JSON line) out.

A request holds the arguments of ``opkiln.load``, or of ``opkiln.load_inline`` when it has ``text``.
The ops are torch-free libraries; ``value()`` of the one that was loaded is the answer. One with
``without_torch`` is opened as any library: torch, which takes seconds to import, is not asked.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
import warnings
from typing import Any

import opkiln
from opkiln.base import digest
from opkiln.errors import OpkilnError
from opkiln.loading import loader

digest._SETTLED_NS = 20_000_000  # as SETTLED_NS of loaders.py


def answer(request: dict[str, Any]) -> dict[str, Any]:
    name = request["name"]
    # verbose: within an override of the settings, no receipt (see loading/receipt.py) serves.
    keywords = {"is_python_module": False, "abi": "none", "verbose": True}
    keywords |= request.get("more", {})
    if keywords["verbose"] is None:
        del keywords["verbose"]
    if keywords.pop("without_torch", False):
        loader.open_artifact = lambda _spec, path, *_, **__: ctypes.CDLL(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if "text" in request:
                library = opkiln.load_inline(name, request["text"], **keywords)
            else:
                library = opkiln.load(name, request["sources"], **keywords)
        except OpkilnError as error:
            result: dict[str, Any] = {"error": type(error).__name__, "text": str(error)}
        else:
            loaded = loader.loaded_here()["jit", name, "cpu"][0]
            assert loaded.artifact is not None
            if isinstance(library, str):  # a library of torch's ops, which is loaded already
                library = ctypes.CDLL(loaded.artifact.path)
            result = {
                "value": library.value(),
                "path": loaded.artifact.path,
                "origin": loaded.artifact.origin,
                "compiled": loaded.artifact.compiled,
                "refused": loaded.trace.refusals(),
            }
    return {**result, "warnings": [str(each.message) for each in caught]}


def main() -> None:
    for line in sys.stdin:
        began = time.monotonic()
        try:
            result = answer(json.loads(line))
        except Exception as error:
            result = {"error": f"not an OpkilnError: {type(error).__name__}", "text": str(error)}
        result["seconds"] = time.monotonic() - began
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
