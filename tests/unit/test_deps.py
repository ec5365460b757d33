"""What a build read: depfiles, the list that proves itself, and new files that shadow old ones."""

from __future__ import annotations

import json
import os
import re
import time
from typing import TYPE_CHECKING, Any

import pytest
from sample.levels import X86_64, X86_V1

from opkiln import plan as plans
from opkiln.build_model import Plan, Target, Toolchain, TorchSDK
from opkiln.model import ABI_NONE, ABI_STABLE, PLAIN, OpSpec
from opkiln.observing.inputs import Inputs
from opkiln.store import deps, recheck

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.o: a.cpp b.h\n", ["a.cpp", "b.h"]),
        ("a.o: a.cpp \\\n  b.h \\\n c.h\n", ["a.cpp", "b.h", "c.h"]),
        ("a.o: /with\\ space/a.h /do$$llar.h /ha\\#sh.h\n", ["/with space/a.h", "/do$llar.h",
                                                            "/ha#sh.h"]),
        ("a.o: /back\\slash.h /two\\\\\\ blank.h\n", ["/back\\slash.h", "/two\\ blank.h"]),
        ("a.o: /co\\:lon.h /br[ack.h\n", ["/co:lon.h", "/br[ack.h"]),
        ("a.o: a.h a.h\n", ["a.h"]),
        ("a.o: a.cpp b.h\n\nb.h:\n", ["a.cpp", "b.h"]),
        ("a.o: a.cpp", ["a.cpp"]),
        ("/sta:ge/a.o: a.cpp\n", ["a.cpp"]),
    ],
)  # fmt: skip
def test_a_depfile_gives_its_prerequisites_unescaped(text: str, expected: list[str]) -> None:
    assert deps.parse_depfile(text) == expected


class Workshop:
    """A source tree, a system, a torch, and the plan over them."""

    def __init__(self, base: Path) -> None:
        self.src, self.sys, self.torch = base / "src", base / "usr", base / "torch"
        self.write("src/a.cpp", "src/first/one.h", "src/include/two.h", "src/include/sub/three.h",
                   "usr/vector", "torch/include/torch/all.h")  # fmt: skip

    def write(self, *names: str) -> None:
        for name in names:
            path = self.src.parent / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"// {name}\n")

    def plan(self, abi: str = ABI_NONE, **changes: Any) -> Plan:
        sdk = TorchSDK(str(self.torch), "2.13.0", "id", None, None, True)
        spec = OpSpec("op", "dist", str(self.src), ("a.cpp",), ("first", "include"),
                      kind=PLAIN, abi=abi)._replace(**changes)  # fmt: skip
        compiler = Toolchain("gcc", "/usr/bin/g++", "12", X86_64, "id", frozenset(),
                             (str(self.sys),), torch=sdk, python_include="/py")  # fmt: skip
        return plans.make(spec, Target("cpu", "linux", X86_64, X86_V1, (), "none"), compiler)

    def read(self) -> list[str]:
        return [str(path) for path in sorted(self.src.parent.rglob("*")) if path.is_file()]

    def gather(self, plan: Plan | None = None) -> deps.Dependencies:
        return deps.gather(plan or self.plan(), self.read(), recheck.Hasher())


class Recorded:
    """Dependencies as they come back from a store, and what checking them gives."""

    def __init__(self, found: deps.Dependencies) -> None:
        self.name = deps.key_of(found)
        self.manifest = json.loads(json.dumps(deps.to_manifest(found)))
        self.sidecar = {"names": list(found.names), "external": [list(f) for f in
                                                                 found.external_files]}  # fmt: skip
        self.sidecar_reads = 0

    def check(self, plan: Plan, *, external: bool = True) -> tuple[bool, list[str]]:
        def sidecar() -> dict[str, Any]:
            self.sidecar_reads += 1
            return self.sidecar

        places = plans.anchors_of(plan.spec, plan.toolchain)
        now, changed = recheck.recheck(
            self.manifest, places, recheck.Hasher(), sidecar, external=external
        )
        return now == self.name, changed


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


def test_files_are_own_external_or_covered(shop: Workshop) -> None:
    found = shop.gather(shop.plan(abi=ABI_STABLE))
    assert [dep.path for dep in found.own] == [
        "a.cpp", "first/one.h", "include/sub/three.h", "include/two.h",
    ]  # fmt: skip
    assert [path for path, _ in found.external_files if not path.endswith("/")] == [
        str(shop.sys / "vector")
    ]


def test_a_torch_header_in_an_op_that_declares_no_torch_is_a_file_like_any_other(
    shop: Workshop,
) -> None:
    found = shop.gather(shop.plan(abi=ABI_NONE))
    assert str(shop.torch / "include/torch/all.h") in [dep.path for dep in found.own]


def test_untouched_files_prove_the_name(shop: Workshop) -> None:
    assert Recorded(shop.gather()).check(shop.plan()) == (True, [])


def test_touched_files_prove_the_name_by_their_contents(shop: Workshop) -> None:
    recorded = Recorded(shop.gather())
    for when in (0.0, time.time() + 10_000):
        for path in shop.read():
            os.utime(path, (when, when))
        assert recorded.check(shop.plan()) == (True, [])


def test_an_edit_is_named_whatever_its_time(shop: Workshop) -> None:
    recorded = Recorded(shop.gather())
    file = shop.src / "include" / "two.h"
    before = os.stat(file)
    file.write_text(file.read_text().replace("two", "owt"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert recorded.check(shop.plan()) == (False, ["include/two.h changed"])


def test_a_file_that_is_gone_is_named(shop: Workshop) -> None:
    recorded = Recorded(shop.gather())
    (shop.src / "first" / "one.h").unlink()
    good, changed = recorded.check(shop.plan())
    assert not good
    assert "first/one.h is gone" in changed


@pytest.mark.parametrize("name", ["first/two.h", "first/sub/three.h", "two.h", "first/vector"])
def test_a_new_file_that_could_shadow_an_included_one_is_noticed(shop: Workshop, name: str) -> None:
    recorded = Recorded(shop.gather())
    shop.write(f"src/{name}")
    good, changed = recorded.check(shop.plan())
    assert not good
    assert any("is new on the include path" in each for each in changed)


def test_a_new_file_that_nobody_includes_changes_nothing(shop: Workshop) -> None:
    recorded = Recorded(shop.gather())
    shop.write("src/first/unrelated.h", "src/notes.txt", "src/include/sub/deeper/x.h")
    assert recorded.check(shop.plan()) == (True, [])


def test_a_system_header_is_checked_where_a_compiler_is_and_only_there(shop: Workshop) -> None:
    recorded = Recorded(shop.gather())
    (shop.sys / "vector").write_text("// upgraded")
    (shop.sys / "new").write_text("// an upgrade touches the directory")
    assert recorded.check(shop.plan(), external=False) == (True, [])
    assert recorded.check(shop.plan()) == (False, [f"{shop.sys}/vector changed"])


def test_a_moved_tree_has_the_same_name(shop: Workshop, tmp_path: Path) -> None:
    recorded = Recorded(shop.gather())
    moved = tmp_path / "elsewhere"
    os.rename(shop.src, moved)
    assert recorded.check(shop.plan(root=str(moved))) == (True, [])


def test_the_long_lists_are_read_only_when_a_directory_was_touched(shop: Workshop) -> None:
    recorded = Recorded(shop.gather())
    ahead = time.time_ns() + 10_000_000_000
    for rows, at in (("dirs", -1), ("external_dirs", -1), ("own", -1)):
        for row in recorded.manifest[rows]:
            row[at] = ahead  # as if everything had come to rest before it was read
    assert recorded.check(shop.plan()) == (True, [])
    assert recorded.sidecar_reads == 0


def test_the_text_of_an_inline_source_is_no_file(shop: Workshop) -> None:
    plan = shop.plan(inline=(("a.cpp", "int x;"),))
    found = shop.gather(plan)
    assert "a.cpp" not in [dep.path for dep in found.own]


def test_a_name_that_appeared_during_a_compile_is_not_taken_for_one_that_was_read(
    shop: Workshop,
) -> None:
    plan = shop.plan()
    directory = str(shop.src)
    for absent, made in (("new.h", "new.h"), ("new", "new/"), ("new.h/", "new.h")):
        seen = Inputs((), ((directory, (absent,)),), ())
        deps.gather(plan, shop.read(), recheck.Hasher(), seen=seen)
        path = shop.src / made
        path.mkdir() if made.endswith("/") else path.touch()
        with pytest.raises(deps.Appeared, match=re.escape(made)):
            deps.gather(plan, shop.read(), recheck.Hasher(), seen=seen)
        path.rmdir() if made.endswith("/") else path.unlink()


def test_present_names_what_a_compiler_could_open(tmp_path: Path) -> None:
    (tmp_path / "file.h").touch()
    (tmp_path / "directory.h").mkdir()
    (tmp_path / "link.h").symlink_to("file.h")
    (tmp_path / "nowhere.h").symlink_to("missing.h")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "below.h").symlink_to("../missing.h")
    names = ["file.h", "directory.h", "link.h", "nowhere.h", "missing.h", "sub/below.h", "../x.h"]
    assert recheck.Names(names).present(str(tmp_path)) == ("file.h", "directory.h/", "link.h")
    (tmp_path / "missing.h").touch()
    (tmp_path.parent / "x.h").touch()
    assert recheck.Names(names).present(str(tmp_path)) == (
        "file.h", "directory.h/", "link.h", "nowhere.h", "missing.h", "sub/below.h", "../x.h",
    )  # fmt: skip
    (tmp_path.parent / "x.h").unlink()


def test_present_finds_nothing_below_what_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert recheck.Names(["a"]).present(str(tmp_path / "file")) == ()
    assert recheck.Names(["a"]).present(str(tmp_path / "missing")) == ()
