"""A manifest is read before anything is verified: what it says must not make anything run."""

from __future__ import annotations

import hashlib
import subprocess
from typing import TYPE_CHECKING

import pytest
from sample import layer
from sample.levels import X86_V1

from opkiln.base.model import ABI_NONE, Op, OpSpec
from opkiln.decision import prebuilt
from opkiln.decision.terms import Request, Trace
from opkiln.machine import uname
from opkiln.store import bundle, key

if TYPE_CHECKING:
    from pathlib import Path

SPEC = OpSpec(
    name="one", distribution="somebody", sources=("op.cpp",), root="/nowhere", abi=ABI_NONE
)


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """A file that a library writes when it is opened. The library is ``evil.so``, beside it."""
    source = tmp_path / "evil.c"
    proof = tmp_path / "ran"
    source.write_text(
        "#include <stdio.h>\n"
        f'__attribute__((constructor)) static void run(void) {{ fclose(fopen("{proof}", "w")); }}\n'
    )
    words = ["gcc", "-shared", "-fPIC", str(source), "-o", str(tmp_path / "evil.so")]
    subprocess.run(words, check=True)
    return proof


def shipped(base: Path, soname: str) -> Path:
    """A layer with an op that fits this machine, and needs a library."""
    target = {
        "backend": "cpu", "system": "linux", "machine": uname.architecture(), "cpu": X86_V1,
        "cpu_features": [], "abi_tag": "none", "debug": False, "flags": [], "archs": [],
    }  # fmt: skip
    needs = {"cpu": [], "sonames": [soname], "symbols": []}
    changes = {"spec": key.spec_key(SPEC), "target": target, "needs": needs}
    layer.add(base / "layer", "one", b"\x7fELF", changes=changes)
    return base / "layer"


@pytest.mark.parametrize("kind", ["layer", "bundle"])
def test_a_library_that_a_manifest_names_by_its_path_is_not_opened(
    kind: str, ran: Path, tmp_path: Path
) -> None:
    made = shipped(tmp_path, str(tmp_path / "evil.so"))
    place = str(made / "v1")
    if kind == "bundle":
        place = str(tmp_path / "ops.bundle")
        bundle.write_bundle(str(made), place)
    trace = Trace()
    assert prebuilt.find(Request(Op(SPEC)), [place], trace, prebuilt.STORE) is None
    assert "which is a path" in str(trace)
    assert not ran.exists()


@pytest.mark.parametrize("soname", ["{0}/evil.so", "./evil.so", "../x/evil.so", "a/../evil.so"])
def test_no_path_is_taken_for_a_librarys_name(
    soname: str, ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = prebuilt.missing_needs({"sonames": [soname.format(tmp_path)], "symbols": []}, ABI_NONE)
    assert told.endswith("which is a path, not a library's name")
    assert not ran.exists()


def test_the_library_would_have_run(ran: Path, tmp_path: Path) -> None:
    code = f"import ctypes; ctypes.CDLL({str(tmp_path / 'evil.so')!r})"
    subprocess.run(["python3", "-c", code], check=True)
    assert ran.exists()


def test_a_library_of_the_system_is_still_found(tmp_path: Path) -> None:
    made = shipped(tmp_path, "libc.so.6")
    trace = Trace()
    found = prebuilt.find(Request(Op(SPEC)), [str(made / "v1")], trace, prebuilt.STORE)
    assert found is not None, trace
    assert found.sha256 == hashlib.sha256(b"\x7fELF").hexdigest()
