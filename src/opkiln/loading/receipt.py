"""A receipt: the answer of one full search, and everything that answer rests on.

Finding an op takes the target, the compiler's identity, a plan, three keys and the entry's
dependency list. The process that built an entry writes down what all of that rested on, as facts
that ``stat`` can check: these files have these signatures, these paths are absent. While every one
of them holds, the search would end as it did, so a later process checks them, verifies the
library's digest as ever, and is done in a third of the time.

A receipt never says what a full search would not: anything that does not hold, and anything odd
about the receipt itself, leads to the full search. It is only written by the builder; hits write
nothing. What is not a file is in the receipt's name: opkiln's version, the spec, every variable of
``settings``, the CPU's features, the device architectures, the Python and the torch in use.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from opkiln import __version__, machine, trust
from opkiln.digest import Signature, key, sha256_file, unchanged
from opkiln.model import ABI_NONE, CUDA, PACKAGE, PLAN_VERSION, ROCM, XPU, Artifact, OpSpec
from opkiln.settings import LAYOUT, fingerprint, store_candidates

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.model import Toolchain

SCHEMA = 1


def recall(spec: OpSpec, archs: tuple[str, ...] = ()) -> Artifact | None:
    """The artifact, if a receipt says so and all it rests on holds. Writes nothing."""
    torch = "" if spec.abi == ABI_NONE else getattr(sys.modules.get("torch"), "__file__", None)
    try:
        place = _place(spec, archs, torch)
        if place is None:
            return None
        root, path = place
        for each in (os.path.dirname(root), root, path):
            if trust.fault(each, os.lstat(each)):
                return None
        with open(path, "rb") as file:
            receipt = json.loads(file.read())
        if not _holds(receipt):
            return None
        return _verified(root, receipt)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # gone, damaged or of another kind: the full search decides


def _holds(receipt: dict[str, Any]) -> bool:
    for each in receipt["unchanged"]:
        if not unchanged(*each):
            return False
    return not any(map(os.path.lexists, receipt["absent"]))


def _verified(root: str, receipt: dict[str, Any]) -> Artifact | None:
    """The library, if its owner, mode, size and digest are right."""
    path = os.path.join(root, receipt["payload"])
    directory = os.path.dirname(path)
    if trust.fault(directory, os.lstat(directory)):
        return None
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        found = os.fstat(fd)
        if trust.fault(path, found) or found.st_size != receipt["size"]:
            return None
        if sha256_file(fd) != receipt["sha256"]:
            return None
    finally:
        os.close(fd)
    return Artifact(path, receipt["sha256"], "store")


def _place(spec: OpSpec, archs: tuple[str, ...], torch: str | None) -> tuple[str, str] | None:
    """(the store's root, the receipt's path), or None where there can be no receipt.

    ``torch`` is the file of the package in use; None where it is needed and not imported: to look
    for it takes as long as the full search.
    """
    variables = fingerprint()
    if variables is None or torch is None:
        return None
    here = (machine.system(), machine.architecture(), machine.cpu_flags())
    ours = (SCHEMA, __version__, PLAN_VERSION)
    name = key("receipt", (ours, tuple(spec), archs, variables, here, sys.version, torch))
    root = os.path.join(next(store_candidates())[0], LAYOUT)
    return root, os.path.join(root, "receipts", spec.distribution, spec.name, name + ".json")


def write(
    spec: OpSpec,
    archs: tuple[str, ...],
    toolchain: Toolchain,
    evidence: dict[str, list[Any]],
    payload: str,
    manifest: dict[str, Any],
) -> None:
    """Leave a receipt for an entry that was just published and read back.

    ``evidence`` is what choosing the toolchain rested on (``toolchain.choice.evidence``). A store
    that cannot take the receipt is fine.
    """
    from opkiln.toolchain import torch_sdk

    torch = "" if toolchain.torch is None else os.path.join(toolchain.torch.path, "__init__.py")
    place = _place(spec, archs, "" if spec.abi == ABI_NONE else torch)
    if place is None or not payload.startswith(place[0] + "/"):
        return
    root, path = place
    recorded = manifest["deps"]
    places = {"src": spec.root, "opkiln": PACKAGE, "abs": ""}
    own = [[os.path.join(places[a], p), *f] for a, p, _, *f in recorded["own"]]
    watched = [[os.path.join(places[a], p), *f] for a, p, *f in recorded["dirs"]]
    files = [*evidence["unchanged"], *own, *watched, *recorded["external_dirs"]]
    if spec.abi != ABI_NONE and toolchain.torch is not None:
        files += [[each, *Signature.of(each)] for each in torch_sdk.read_from(toolchain.torch.path)]
    files += [[each, *Signature.of(each)] for each in _deciding(spec.backend)]
    if spec.backend == ROCM and toolchain.torch is not None:
        from opkiln.toolchain import hipify

        files += [[each, *Signature.of(each)] for each in hipify.modules(toolchain.torch)]
    if spec.abi != ABI_NONE and torch_sdk.find() != toolchain.torch:
        return  # it was upgraded meanwhile: what was built is not for what is signed here
    files = list({each[0]: each for each in files}.values())
    receipt = {
        "payload": os.path.relpath(payload, root),
        "size": manifest["size"],
        "sha256": manifest["sha256"],
        "unchanged": files,
        "absent": evidence["absent"],
    }
    temporary = f"{path}.{os.getpid()}-{os.urandom(6).hex()}"
    try:
        trust.make_private(os.path.dirname(path))
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            json.dump(receipt, file, separators=(",", ":"))
        os.replace(temporary, path)
    except OSError:
        # Full or read-only: later loads take the full search.
        try:
            os.unlink(temporary)
        except OSError:
            pass


_DECIDING = (
    "plan.py", "arch/cpu.py", "loading/resolve.py", "steps/arguments.py", "steps/host.py",
    "steps/link.py",
    "steps/flags.py", "store/key.py", "store/deps.py", "store/recheck.py", "store/libraries.py",
    "toolchain/host.py", "toolchain/torch_sdk.py",
)  # fmt: skip
_DECIDING_FOR = {
    CUDA: (
        "arch/cuda.py", "arch/lists.py", "loading/archs.py", "steps/nvcc.py", "toolchain/choice.py",
        "toolchain/cuda_version.py", "toolchain/nvcc.py", "toolchain/toolkits.py",
    ),
    ROCM: (
        "arch/hip.py", "arch/lists.py", "loading/archs.py", "steps/hipcc.py",
        "toolchain/choice.py", "toolchain/hipcc.py", "toolchain/hipify.py",
        "toolchain/translate_hip.py",
    ),
    XPU: ("steps/sycl.py", "toolchain/sycl.py", "toolchain/libsycl.py"),
}  # fmt: skip


def _deciding(backend: str) -> list[str]:
    """The files of opkiln whose code decides which entry is right: an edit there ends receipts."""
    return [os.path.join(PACKAGE, name) for name in (*_DECIDING, *_DECIDING_FOR.get(backend, ()))]
