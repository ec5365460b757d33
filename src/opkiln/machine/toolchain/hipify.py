"""CUDA sources as HIP: a translated copy of an op's sources. The author's files stay unchanged.

The translation is that of torch's own hipify, so code that works there works here. The layout
differs: torch renames the files that it translates, next to the source, and rewrites each
``#include`` to match. Here the copy keeps the names and the lines of the original. So no
``#include`` has to change, and the compiler's line 40 is the author's line 40.
"""

from __future__ import annotations

import json
import os

from opkiln.base.build_model import TorchSDK
from opkiln.base.digest import key
from opkiln.base.model import OpSpec
from opkiln.errors import ToolchainError
from opkiln.machine import facts
from opkiln.machine.toolchain.staged_copy import Copy, Staged

_TRANSLATOR = os.path.join(os.path.dirname(os.path.abspath(__file__)), "translate_hip.py")


def stage(spec: OpSpec, torch: TorchSDK, directory: str) -> Staged:
    """Copy an op's sources, and the headers that they may include, and translate the copy.

    ``directory`` exists and is empty; see ``staged_copy.Copy``. Files without CUDA are copied
    unchanged.

    Raises SpecError for a missing source, ToolchainError if torch's hipify cannot be used, OSError.
    """
    copy = Copy(spec, directory)
    staged = copy.write()
    _translate(torch, directory, copy.own_includes())
    return staged


def identity(torch: TorchSDK) -> str:
    """The identity of the translator, for a key.

    Raises ToolchainError if torch has no hipify.
    """
    files = (_TRANSLATOR, *modules(torch))
    for path in files:
        facts.file(path)
    return key("hipify", [facts.digest_of(path) for path in files])


def _translate(torch: TorchSDK, directory: str, files: dict[str, list[str]]) -> None:
    """Translate files in place, in a process that loads torch's hipify and no other part of it."""
    from opkiln.run.process import python, run

    own = modules(torch)
    listing = os.path.join(directory, "hipify.json")  # no file of the author is in `/`
    with open(listing, "w", encoding="ascii") as file:
        json.dump(files, file)
    argv = python(_TRANSLATOR, os.path.dirname(own[0]), listing, isolated=True)
    done = run(argv, cwd=directory, timeout=600)
    os.unlink(listing)
    if done.returncode != 0:
        raise ToolchainError(
            f"the hipify of torch {torch.version} cannot translate CUDA sources",
            why=done.output.strip(),
            hint="pip install --upgrade torch",
        )


def modules(torch: TorchSDK) -> list[str]:
    """torch's hipify, file by file, in the order of their names."""
    directory = os.path.join(torch.path, "utils", "hipify")
    try:
        names = sorted(name for name in os.listdir(directory) if name.endswith(".py"))
    except OSError as error:
        raise ToolchainError(
            f"torch {torch.version} has no hipify, which translates CUDA sources to HIP",
            why=f"{directory}: {error.strerror}",
            hint="pip install --force-reinstall torch",
        ) from None
    return [os.path.join(directory, name) for name in names]
