"""A wheel: the whole file, or one with a RECORD or a manifest of somebody's making."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile

from fuzz.manifest import with_digest
from fuzz.scratch import file
from sample.layer import NAME as NAME_OF_NOTHING

from opkiln.errors import LoadError
from opkiln.ship.wheel_check import verify_wheel

NAME = "demo_ops-1.0-py3-none-any.whl"
INFO = "demo_ops-1.0.dist-info"
LEAF = f"opkiln_prebuilt/demo_ops/v1/ops/somebody/one/{'a' * 40}/{'b' * 40}/{NAME_OF_NOTHING}"
WHEEL = b"Wheel-Version: 1.0\nGenerator: somebody\nTag: py3-none-any\n"


def one(data: bytes) -> None:
    _verify(data)
    _verify(_zipped({f"{INFO}/WHEEL": WHEEL, f"{INFO}/RECORD": data}))
    for manifest in (data, with_digest(data)):
        files = {
            f"{LEAF}/manifest.json": manifest,
            f"{LEAF}/inputs.json": with_digest(b'{"schema":2}'),
            f"{LEAF}/one.so": b"\x7fELF",
            f"{INFO}/WHEEL": WHEEL,
        }
        rows = [f"{name},sha256={_digest(each)},{len(each)}" for name, each in files.items()]
        record = "\n".join([*rows, f"{INFO}/RECORD,,", ""]).encode()
        _verify(_zipped({**files, f"{INFO}/RECORD": record}))


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _zipped(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return out.getvalue()


def _verify(data: bytes) -> None:
    try:
        verify_wheel(file(NAME, data))
    except LoadError:
        pass
