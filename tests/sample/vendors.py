"""Vendors' packages that tell torch of a device, as stand-ins: importing one does what the real one
does to torch, and what it drives is a ``recorder``."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent.parent

PACKAGES = {
    "hpu": "habana_frameworks", "npu": "torch_npu", "mlu": "torch_mlu", "sdaa": "torch_sdaa",
    "supa": "torch_supa",
}  # fmt: skip
NODES = {
    "hpu": "dev/accel/accel0", "npu": "dev/davinci0", "mlu": "dev/cambricon_dev0",
    "sdaa": "dev/tcaicard0", "supa": "dev/biren/card_0",
}  # fmt: skip

_PRIVATE = """\
import sys
sys.path.insert(0, {tests!r})
import torch
from sample import recorder

torch.utils.rename_privateuse1_backend({name!r})
torch._register_device_module({name!r}, recorder.module({name!r}, {devices}))
"""
# torch knows hpu by name; its module is the package's.
_GAUDI = """\
import sys
sys.path.insert(0, {tests!r})
from sample import recorder

sys.modules[__name__] = recorder.module({name!r}, {devices})
"""
_BROKEN = "raise OSError('libascend_hal.so: cannot open shared object file')\n"


def install(where: Path, name: str, *, devices: int = 2, broken: bool = False) -> Path:
    """Put a vendor's package into a directory for ``sys.path``."""
    package = where / PACKAGES[name]
    text = (_GAUDI if name == "hpu" else _PRIVATE).format(
        tests=str(HERE), name=name, devices=devices
    )
    if name == "hpu":
        for folder in (package, package / "torch"):
            folder.mkdir(parents=True)
            (folder / "__init__.py").touch()
        package = package / "torch" / "hpu"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(_BROKEN if broken else text)
    return where


def node(root: Path, name: str) -> Path:
    """The file that the vendor's driver makes for its first device, below ``root``."""
    path = root / NODES[name]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return root
