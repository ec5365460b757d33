"""An op and what could serve it, without a compiler: entries are made by hand and hold no code."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from opkiln.base.build_model import Toolchain
from opkiln.base.model import ABI_NONE, PLAIN, Artifact, Op, OpSpec, Registration
from opkiln.decision import receipt
from opkiln.decision.terms import BUILD, LOAD, Request
from opkiln.errors import ToolchainError
from opkiln.machine import facts, uname
from opkiln.machine.devices import nvidia
from opkiln.machine.toolchain import choice
from opkiln.plan import plan as plans
from opkiln.settings import LAYOUT
from opkiln.store import key
from sample import layer
from sample.levels import X86_64

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


GCC = Toolchain("gcc", "/usr/bin/g++", "12", X86_64, "gcc's", frozenset(), ("/usr/include",))


class Compilers:
    """What ``toolchain.choice`` says: which compilers are remembered, found, and answer."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.remembered: Toolchain | None = None
        self.found = False
        self.answer: Toolchain | ToolchainError = ToolchainError("none", why="one\ntwo")
        self.recalled: list[tuple[object, ...]] = []
        self.asked: list[tuple[object, ...]] = []
        patch.setattr(choice, "recall", self._recall)
        patch.setattr(choice, "available", self._available)
        patch.setattr(choice, "choose", self._choose)

    def _available(self, backend: str, machine: str, spec: OpSpec) -> bool:
        assert isinstance(spec, OpSpec)
        return self.found

    def _recall(self, memory: object, backend: str, machine: str, spec: OpSpec) -> Toolchain | None:
        assert isinstance(spec, OpSpec)
        self.recalled.append((memory, backend, machine))
        return self.remembered

    def _choose(self, memory: object, backend: str, machine: str, spec: OpSpec) -> Toolchain:
        assert isinstance(spec, OpSpec)
        self.asked.append((memory, backend, machine))
        if isinstance(self.answer, ToolchainError):
            raise self.answer
        return self.answer


class World:
    """One op of a package, a store that has nothing yet, and no compiler on PATH."""

    def __init__(self, base: Path, cache: Path, patch: pytest.MonkeyPatch) -> None:
        self.base, self.cache, self.patch = base, cache, patch
        self.package = base / "package"
        self.package.mkdir()
        (self.package / "a.cpp").write_text("int a;")
        (base / "bin").mkdir()
        patch.setenv("PATH", str(base / "bin"))
        cache.mkdir(parents=True)
        cache.chmod(0o700)
        self.spec = OpSpec(
            "op", "dist", str(self.package), ("a.cpp",), kind=PLAIN, abi=ABI_NONE, vectorize=False
        )

    def op(self, *, reference: bool = False, rule: Any = None, asked: str = "") -> Op:
        made = Registration("dist", ("op() -> int",), None, ("",), False) if reference else None
        return Op(self.spec, made, rule, asked)

    def request(self, use: str = LOAD, *, native: bool = False, **op: Any) -> Request:
        return Request(self.op(**op), use, must_be_native=native)

    def manifest(self, **changes: Any) -> dict[str, Any]:
        """What an entry for this machine says of itself; ``target`` and ``needs`` are merged."""
        target = {
            "backend": self.spec.backend, "system": uname.system(),
            "machine": uname.architecture(), "cpu": Request(Op(OpSpec(
                "op", "dist", "/", (), kind=PLAIN, abi=ABI_NONE, vectorize=False))).target.cpu,
            "cpu_features": [], "abi_tag": "none", "debug": False, "flags": [], "archs": [],
        }  # fmt: skip
        needs: dict[str, Any] = {"cpu": [], "sonames": [], "symbols": [], "images": []}
        return {
            "spec": key.spec_key(self.spec),
            "toolchain": {"gcc": "12"},
            **changes,
            "target": {**target, **changes.get("target", {})},
            "needs": {**needs, **changes.get("needs", {})},
        }

    def add(self, place: Path, payload: bytes = b"code", *, intent: str = "a" * 40,
            build: str = "b" * 40, **changes: Any) -> Path:  # fmt: skip
        """Add an entry to a layer. Returns the library's path."""
        leaf = layer.add(place, "op", payload, distribution="dist", intent=intent, build=build,
                         changes=self.manifest(**changes))  # fmt: skip
        return leaf / "op.so"

    def carry(self, payload: bytes = b"code", **changes: Any) -> Path:
        """Have the package carry the library."""
        return self.add(self.package / "prebuilt", payload, **changes)

    def store(
        self,
        payload: bytes = b"code",
        *,
        tools: Toolchain | None = None,
        archs: tuple[str, ...] | None = None,
        **changes: Any,
    ) -> Path:
        """Have the user's store contain the library, as it was built here: by some compiler, or
        by ``tools``."""
        target = self.request(BUILD).target
        if archs is not None:
            target = target._replace(archs=archs)
            changes["target"] = {**changes.get("target", {}), "archs": list(archs)}
        build = "b" * 40
        if tools is not None:
            build = key.build_key(plans.make(self.spec, target, tools))
        return self.add(self.cache, payload, intent=key.intent_key(self.spec, target), build=build,
                        **{"created": 1.0, **changes})  # fmt: skip

    def leave_receipt(self, library: Path) -> None:
        """Have a receipt say that this library serves."""
        digest = hashlib.sha256(library.read_bytes()).hexdigest()
        with facts.collect() as read:
            pass
        receipt.write(self.request(), Artifact(str(library), digest, "store"), read)
        assert list((self.cache / LAYOUT / "receipts").rglob("*.json"))

    def gpus(self, *capabilities: str, driver: str = "13.0") -> None:
        """Have the NVIDIA driver show these GPUs."""
        found = tuple(
            nvidia.NvidiaGPU(index, f"GPU-{index}", "stand-in", capability, 1 << 30)
            for index, capability in enumerate(capabilities)
        )
        why = "" if found else "the driver shows none"
        self.patch.setitem(
            nvidia._known, "/", nvidia.NvidiaDevices(found, "580", driver, "nvml", why)
        )
