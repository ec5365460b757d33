"""A layer to ship: finished entries of the store, as they look on every machine.

An entry of the user's own store says where and when it was made, which files it was made from here,
and which directories to watch. What is shipped says what it is: the declaration, the target, the
compilers, what it needs, and the digests of its sources. So the same inputs give the same bytes,
and nothing of the machine that built it travels, but the user's own flags and the paths of headers
that lie outside of the package.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from typing import Any

from opkiln.arch import cpu
from opkiln.errors import StoreError
from opkiln.model import EXECUTABLE, OUTSIDE
from opkiln.settings import LAYOUT
from opkiln.store import entry
from opkiln.store.recheck import deps_key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_KEPT = (
    "kind", "op", "distribution", "spec", "target", "needs", "toolchain", "schema", "payload",
    "size", "sha256",
)  # fmt: skip
_ANCHORS = ("src", "opkiln")  # what is found again wherever a package is installed
_ISA = re.compile(
    r"-m(?:arch|cpu)=.*|-m(?:avx|sse3|sse4|ssse3|fma|f16c|bmi|amx|popcnt|lzcnt|abm|aes|gfni|vaes|"
    r"v?pclmul|xsave|movbe|sha|adx|rdrnd|rdseed)[\w.-]*"
)
_NO_SIGNATURE = [0] * 5


def export(payloads: Iterable[str], out: str) -> list[str]:
    """Put finished libraries of the store below ``out``, and return their directories there.

    Each appears whole or not at all; one that is there already stays. Raises StoreError.
    """
    return [_export(payload, out) for payload in dict.fromkeys(payloads)]


def leaf_of(payload: str) -> str:
    """The entry that a library is in. Raises StoreError for one that is in a bundle."""
    if payload.startswith("/proc/"):
        raise StoreError(
            "what is in a bundle already cannot be exported again",
            why="a bundle in OPKILN_STORE_LAYERS has it, and so it was not built",
            hint="unset OPKILN_STORE_LAYERS    # or pass on that bundle",
        )
    return os.path.dirname(payload)


def _export(payload: str, out: str) -> str:
    source = leaf_of(payload)
    *_, distribution, op, intent, build, _ = source.split("/")
    try:
        with open(os.path.join(source, entry.MANIFEST), "rb") as file:
            manifest = _shipped(entry.parse_manifest(file.read()))
        inputs = entry.read_sidecar(source)["inputs"]
        _require_known_cpu(manifest, inputs["steps"])
        recorded = manifest["deps"]
        own = (tuple(each[:3]) for each in recorded["own"])
        name = deps_key(own, recorded["external"], recorded["watches"])
        final = os.path.join(out, LAYOUT, "ops", distribution, op, intent, build, name)
        if not os.path.isdir(final):
            _appear(payload, manifest, inputs, final)
    except (OSError, ValueError, KeyError) as error:
        raise StoreError(f"{payload} cannot be exported to {out}: {error}") from error
    return final


def _require_known_cpu(manifest: dict[str, Any], steps: list[list[str]]) -> None:
    """What a library needs of a CPU is its target's; a flag that asks for more would make that a
    lie, and an illegal instruction elsewhere. Raises StoreError."""
    target = manifest["target"]
    made_for = cpu.CPU(target["cpu"], tuple(target["cpu_features"]))
    known = set(cpu.flags(made_for, target["machine"], frozenset(cpu.probes(target["machine"]))))
    known |= {f"-m{feature}" for feature in cpu.requires(*made_for)}
    for argument in (part for step in steps for each in step for part in each.split(",")):
        flag = argument.removeprefix("-Xcompiler=")
        if _ISA.fullmatch(flag) and flag not in known:
            raise StoreError(
                f"op {manifest['op']} for {made_for} cannot be shipped",
                why=f"it was compiled with {flag}, so that it may need more of a CPU than it says",
                hint="unset CXXFLAGS    # or leave the flag out of cxx_args(); --target names CPUs",
            )


def _shipped(manifest: dict[str, Any]) -> dict[str, Any]:
    own = [
        # What lies outside of the package is compared where it is there.
        [anchor if anchor in _ANCHORS else OUTSIDE, path, digest, *_NO_SIGNATURE]
        for anchor, path, digest, *_ in manifest["deps"]["own"]
    ]
    # The name of an entry is made of these. The library's own digest is among them: with other
    # system headers, the same sources make another.
    external = manifest["sha256"]
    deps = {"own": own, "external": external, "watches": [], "dirs": [], "external_dirs": []}
    return {**{name: manifest[name] for name in _KEPT}, "deps": deps}


def _appear(payload: str, manifest: dict[str, Any], inputs: dict[str, Any], final: str) -> None:
    parent = os.path.dirname(final)
    os.makedirs(parent, exist_ok=True)
    staged = os.path.join(parent, f".{secrets.token_hex(8)}")
    os.mkdir(staged)
    try:
        files = {
            entry.MANIFEST: entry.write_manifest(manifest),
            entry.SIDECAR: entry.write_manifest({"inputs": inputs, "schema": entry.SCHEMA}),
        }
        for name, data in files.items():
            with open(os.path.join(staged, name), "wb") as file:
                file.write(data)
        copy = os.path.join(staged, manifest["payload"])
        shutil.copyfile(payload, copy)
        # Readable by whoever the layer is for; the store's own are for one user.
        os.chmod(copy, 0o755 if manifest["kind"] == EXECUTABLE else 0o644)
        os.rename(staged, final)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
