"""What an entry of a layer says of itself, held against this machine before it is taken."""

from __future__ import annotations

from pathlib import Path

from fuzz.manifest import with_digest
from fuzz.scratch import directory
from sample import layer

from opkiln.base.model import ABI_NONE, CUDA, Op, OpSpec
from opkiln.decision import prebuilt
from opkiln.decision.terms import Request, Trace
from opkiln.errors import LoadError
from opkiln.machine import uname
from opkiln.store import key

SPECS = [
    OpSpec(name="one", distribution="somebody", sources=("op.cpp",), root="/nowhere", abi=ABI_NONE),
    OpSpec(
        name="one", distribution="somebody", sources=("op.cu",), root="/nowhere", abi=ABI_NONE,
        backend=CUDA,
    ),
]  # fmt: skip
# What cannot be in a file that is the same everywhere.
HERE = {
    b"@MACHINE@": uname.architecture().encode(),
    b"@CPU@": key.spec_key(SPECS[0]).encode(),
    b"@CUDA@": key.spec_key(SPECS[1]).encode(),
}


def one(data: bytes) -> None:
    for word, meant in HERE.items():
        data = data.replace(word, meant)
    base = Path(directory(), "layer")
    leaf = base / "v1" / "ops" / "somebody" / "one" / ("a" * 40) / ("b" * 40) / layer.NAME
    if not leaf.exists():
        layer.add(base, "one", b"\x7fELF")
    (leaf / "manifest.json").write_bytes(with_digest(data))
    for spec in SPECS:
        request, trace = Request(Op(spec)), Trace()
        try:
            prebuilt.find(request, [str(base / "v1")], trace, prebuilt.STORE)
        except LoadError:  # whatever the file says: there is no GPU here, and no list
            if spec.backend != CUDA:
                raise
