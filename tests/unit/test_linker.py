"""Where the dynamic linker would find a library: the names that must stay absent, and its list."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from sample.levels import X86_64, X86_V1

from opkiln.base.build_model import Plan, Target, Toolchain
from opkiln.base.digest import Signature
from opkiln.base.model import ABI_NONE, PLAIN, OpSpec
from opkiln.building import gather
from opkiln.building.observing import observer
from opkiln.machine import facts
from opkiln.machine.binary import elf
from opkiln.machine.facts import LIBRARIES, Hasher
from opkiln.store import key


def below(root: Path, *directories: str, name: str = "libx.so") -> set[str]:
    found, _ = elf.search([str(root / each) for each in directories], [name])
    return {os.path.relpath(path, root) for path in found if path.endswith(".so")}


def test_library_is_missed_in_each_directory_that_does_not_have_it(tmp_path: Path) -> None:
    (tmp_path / "with").mkdir()
    (tmp_path / "with" / "libx.so").touch()
    assert below(tmp_path, "with", "without", "none") == {"without/libx.so", "none/libx.so"}


def test_directories_for_this_kind_of_cpu_are_searched_too(tmp_path: Path) -> None:
    (tmp_path / "glibc-hwcaps" / "v3").mkdir(parents=True)
    (tmp_path / "tls").mkdir()
    (tmp_path / "tls" / "tls").symlink_to(".")
    names = {
        "libx.so",
        "glibc-hwcaps/libx.so",
        "glibc-hwcaps/v3/libx.so",
        "tls/libx.so",
        "tls/tls/libx.so",
    }
    assert below(tmp_path, ".") == names
    assert str(tmp_path / "tls" / "glibc-hwcaps") in elf.search([str(tmp_path)], [])[0]


@pytest.mark.parametrize("older", [b"", b"ld.so-1.7.0\0" + bytes(36)])
def test_list_says_where_libraries_are(older: bytes, tmp_path: Path) -> None:
    strings = b"liba.so\0/lib/liba.so\0/opt/liba.so\0libb.so\0/lib/libb.so\0"
    places = [(0, 8), (0, 21), (34, 42)]
    start = 48 + 24 * len(places)
    entries = b"".join(struct.pack("<iIIIQ", 3, start + a, start + b, 0, 0) for a, b in places)
    header = b"glibc-ld.so.cache1.1" + struct.pack("<I", len(places)) + bytes(24)
    path = tmp_path / "list"
    path.write_bytes(older + header + entries + strings)
    found = elf.read_list(str(path), ["none.so", "libb.so", "liba.so"])
    assert found == ["liba.so/lib/liba.so/opt/liba.so", "libb.so/lib/libb.so", "none.so"]
    for damaged in (path.read_bytes()[:60], path.read_bytes()[:-1], b"something else"):
        path.write_bytes(damaged)
        (other,) = elf.read_list(str(path), ["libb.so"])
        assert other.startswith("libb.so/")
        assert other != found[1]


def test_list_of_this_machine_names_its_c_library() -> None:
    if not os.path.exists(elf.LIST):
        pytest.skip("there is no list")
    (found,) = elf.read_list(elf.LIST, ["libc.so.6"])
    name, *paths = re.split(r"(?<=libc\.so\.6)(?=/)", found)  # one for each kind of program
    assert name == "libc.so.6"
    assert paths
    assert all(map(os.path.isfile, paths))


def test_directories_that_this_machines_linker_prefers_are_known(tmp_path: Path) -> None:
    loaded = Path("/proc/self/maps").read_text().split()
    (linker_here,) = {each for each in loaded if os.path.basename(each).startswith("ld-")}
    asked = subprocess.run([linker_here, "--help"], capture_output=True, text=True, check=False)
    _, found, older = asked.stdout.partition("Legacy HWCAP subdirectories")
    if not found:
        pytest.skip("this linker does not list them, or has none")
    names = re.findall(r"^  (\w+) \(", older, re.MULTILINE)
    assert {str(tmp_path / name) for name in names} <= set(elf.search([str(tmp_path)], [])[0])


def gathered(library: str) -> tuple[key.Fact, ...]:
    """What a step rests on that needs this library."""
    spec = OpSpec("op", "dist", "/src", ("a.cpp",), kind=PLAIN, abi=ABI_NONE)
    gcc = Toolchain("gcc", "/usr/bin/g++", "12", X86_64, "id", frozenset(), ())
    target = Target("cpu", "linux", X86_64, X86_V1, (), "none")
    plan = Plan(spec, target, gcc, (), (), "op.so")
    found = gather.Inputs(((LIBRARIES, elf.LIST, library),))
    return gather.facts_of(gather.places_of(plan), found, Hasher())


def test_list_of_this_machine_holds_when_it_is_asked_again() -> None:
    if not os.path.exists(elf.LIST):
        pytest.skip("there is no list")
    (known,) = gathered("libc.so.6")
    assert known[:3] == (LIBRARIES, "abs", elf.LIST)
    assert "/" in known.value
    found = facts.signature_of(known.kind, elf.LIST)
    assert found[:-1] == Signature.of(elf.LIST)[:-1]
    unsigned = known._replace(signature=facts.UNSIGNED)
    assert not key.find_broken([unsigned], {}, Hasher())


def test_what_the_list_says_is_a_fact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elf, "LIST", str(tmp_path / "list"))
    known = gathered("liba.so")
    assert not key.find_broken(known, {}, Hasher())
    (tmp_path / "list").write_bytes(b"something else")
    assert key.find_broken(known, {}, Hasher()) == [f"{tmp_path}/list changed"]


def test_directories_that_a_program_names_are_beside_it(tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    program = tmp_path / "program"
    rpath = "-Wl,-rpath,$ORIGIN/../lib:${ORIGIN}:/opt/lib:relative:/x/$LIB"
    subprocess.run(
        ["gcc", "-x", "c", "-", "-o", program, rpath], input=b"int main() {}", check=True
    )
    found = observer.identify(str(program), ()).searches
    assert found == (f"{tmp_path}/../lib", str(tmp_path), "/opt/lib")
