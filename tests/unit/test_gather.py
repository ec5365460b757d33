"""Facts from what steps were observed to do: where each path lies, and whether steps agree."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample import binaries
from sample.levels import X86_64, X86_V1
from sample.signed_files import sha256

from opkiln.base.build_model import DeviceCompiler, Plan, Target, Toolchain, TorchSDK
from opkiln.base.model import ABI_NONE, OUTSIDE, PACKAGE, PLAIN, OpSpec
from opkiln.building import gather, kept
from opkiln.building.gather import Inputs
from opkiln.building.observing import log
from opkiln.machine import facts
from opkiln.machine.arch import cpu
from opkiln.machine.binary import elf
from opkiln.machine.facts import (
    ABSENT,
    CHOICE,
    DIRECTORY,
    FILE,
    LIBRARIES,
    LINK,
    LISTING,
    PROGRAM,
    Hasher,
)
from opkiln.plan import plan as plans
from opkiln.store import entry, key
from opkiln.store.key import Fact

if TYPE_CHECKING:
    from pathlib import Path


class Shop:
    """A package, a torch, a Python and a toolkit below one directory."""

    def __init__(self, base: Path) -> None:
        self.base, self.src = base, base / "src"
        self.source = self.write("src/a.cpp")
        self.torch = TorchSDK(str(base / "site/torch"), "2.13.0", "id", None, None, True)

    def write(self, name: str, text: str = "// a file") -> Path:
        path = self.base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def plan(self, **changes: Any) -> Plan:
        nvcc = DeviceCompiler(
            "nvcc", "/cuda/bin/nvcc", "/cuda", "13.0", "id", (), frozenset(), (), ()
        )
        gcc = Toolchain(
            "gcc", "/usr/bin/g++", "12", X86_64, "id", frozenset(), (f"{self.base}/usr/include",),
            torch=self.torch, python_include=f"{self.base}/py", device=nvcc,
        )  # fmt: skip
        spec = OpSpec("op", "dist", str(self.src), ("a.cpp",), kind=PLAIN, abi=ABI_NONE)
        target = Target("cpu", "linux", X86_64, X86_V1, (), "none")
        return Plan(spec._replace(**changes), target, gcc, (), (), "op.so")

    def gather(self, *paths: tuple[str, Path], **changes: Any) -> tuple[Fact, ...]:
        inputs = Inputs(tuple((kind, str(path), "") for kind, path in paths))
        return gather.facts_of(gather.places_of(self.plan(**changes)), inputs, Hasher())

    def place(self, path: Path | str, **changes: Any) -> tuple[str, str]:
        return gather.places_of(self.plan(**changes)).locate(str(path))


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


# Where a path lies


PLACES = {
    "the package": ("src/include/a.h", "src", "include/a.h"),
    "a directory beside the package": ("src2/a.h", "abs", "{base}/src2/a.h"),
    "torch": ("site/torch/include/ATen/x.h", "torch", "include/ATen/x.h"),
    "Python": ("py/Python.h", "python", "Python.h"),
    "a wheel": ("site/nvidia/cublas/cublas.h", "wheels", "cublas/cublas.h"),
    "a directory of the declaration": ("mine/sub/a.h", OUTSIDE, "{base}/mine/sub/a.h"),
    "the compiler": ("usr/include/vector", "abs", "{base}/usr/include/vector"),
    "an installation": ("opt/gcc/include/x.h", "abs", "{base}/opt/gcc/include/x.h"),
}


@pytest.mark.parametrize("where", PLACES)
def test_file_counts_by_itself_wherever_it_is(where: str, shop: Shop) -> None:
    name, anchor, below = PLACES[where]
    path = shop.write(name)
    mine = {"include_dirs": (f"{shop.base}/mine",)}
    (found,) = shop.gather((FILE, path), **mine)
    below = below.format(base=shop.base)
    assert found[:4] == (FILE, anchor, below, sha256(path))
    assert (found.sha256 != "") == (anchor in ("src", OUTSIDE))
    plan = shop.plan(**mine)
    places = plans.anchors_of(plan.spec, plan.toolchain)
    assert key.find_broken([found], places, Hasher()) == []
    before = path.stat()
    path.write_text("// A file")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert key.find_broken([found], places, Hasher()) == [f"{below} changed"]


def test_path_belongs_to_the_nearest_place_above_it(shop: Shop) -> None:
    """An environment may be in the project's directory, and the package in an environment."""
    shop.torch = shop.torch._replace(path=f"{shop.src}/.venv/torch")
    assert shop.place(f"{shop.src}/.venv/torch/include/x.h") == ("torch", "include/x.h")
    assert shop.place(f"{shop.src}/a.h") == ("src", "a.h")
    inner = f"{shop.base}/site/torch/mine"
    shop.torch = shop.torch._replace(path=f"{shop.base}/site/torch")
    assert shop.place(f"{inner}/a.h", root=inner) == ("src", "a.h")
    assert shop.place(f"{PACKAGE}/csrc/a.h") == ("opkiln", "csrc/a.h")


def test_place_itself_is_below_it(shop: Shop) -> None:
    assert shop.place(shop.src) == ("src", "")
    assert shop.place("/") == ("abs", "/")


DECLARED: dict[str, dict[str, Any]] = {
    "absolute": {"include_dirs": ("{base}/mine",)},
    "with a slash": {"include_dirs": ("{base}/mine/",)},
    "relative": {"include_dirs": ("../mine",)},
    "-I": {"cxx_args": ("-DX", "-I{base}/mine")},
    "-I in two": {"cxx_args": ("-I", "{base}/mine")},
    "-isystem": {"cxx_args": ("-isystem", "{base}/mine")},
    "-iquote": {"cxx_args": ("-iquote{base}/mine",)},
    "-idirafter": {"device_args": ("-idirafter{base}/mine",)},
}


@pytest.mark.parametrize("form", DECLARED)
def test_directory_that_a_declaration_names_is_the_authors(form: str, shop: Shop) -> None:
    ((field, values),) = DECLARED[form].items()
    declared = {field: tuple(each.format(base=shop.base) for each in values)}
    spelled = f"{shop.src}/../mine/a.h" if form == "relative" else f"{shop.base}/mine/a.h"
    anchor, _ = shop.place(spelled, **declared)
    assert anchor == ("src" if form == "relative" else OUTSIDE)
    assert shop.place(f"{shop.base}/mine2/a.h", **declared)[0] == "abs"


@pytest.mark.parametrize("flags", [("-I",), ("-Imine",), ("-DI{base}/mine",), ("{base}/mine",)])
def test_flags_that_name_no_directory_are_passed_over(flags: tuple[str, ...], shop: Shop) -> None:
    args = tuple(each.format(base=shop.base) for each in flags)
    assert shop.place(f"{shop.base}/mine/a.h", cxx_args=args)[0] == "abs"


# What is gathered


def test_every_kind_is_gathered_with_the_value_that_is_asked_for_again(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, link = shop.write("bin/cc", "#!/bin/sh"), shop.src / "link.h"
    program.chmod(0o755)
    link.symlink_to("gone")  # to nothing
    monkeypatch.setenv("PATH", str(program.parent))
    inputs = Inputs(
        ((FILE, str(shop.source), ""), (PROGRAM, str(program), ""), (DIRECTORY, str(shop.src), ""),
         (LISTING, str(shop.src), ""), (LINK, str(link), ""),
         (ABSENT, str(shop.src), "none.h\0sub/none.h"), (CHOICE, "cc", str(program))),
    )  # fmt: skip
    plan = shop.plan()
    found = gather.facts_of(gather.places_of(plan), inputs, Hasher())
    assert [fact[:4] for fact in found] == [
        (FILE, "src", "a.cpp", sha256(shop.source)),
        (PROGRAM, "abs", str(program), f"{sha256(program)}*"),
        (DIRECTORY, "src", "", "directory"),
        (LISTING, "src", "", facts.value(LISTING, str(shop.src), "", Hasher())),
        (LINK, "src", "link.h", "gone"),
        (ABSENT, "src", "", "none.h\0sub/none.h"),
        (CHOICE, "path", "cc", str(program)),
    ]
    assert key.find_broken(found, plans.anchors_of(plan.spec, plan.toolchain), Hasher()) == []


@pytest.mark.parametrize("kind", [FILE, PROGRAM, DIRECTORY, LISTING, LINK])
def test_path_that_is_gone_since_it_was_read_is_an_error(kind: str, shop: Shop) -> None:
    with pytest.raises(FileNotFoundError, match=f"{shop.base}/gone"):
        shop.gather((kind, shop.base / "gone"))


@pytest.mark.parametrize("made", ["none.h", "none.h/", "sub/none.h"])
def test_name_that_appeared_during_a_compile_is_not_taken_for_one_that_was_read(
    made: str, shop: Shop
) -> None:
    seen = Inputs(((ABSENT, str(shop.src), "none.h\0sub/none.h"),))
    gather.facts_of(gather.places_of(shop.plan()), seen, Hasher())
    (shop.src / made).mkdir() if made.endswith("/") else shop.write(f"src/{made}")
    with pytest.raises(gather.Appeared, match=str(shop.src)):
        gather.facts_of(gather.places_of(shop.plan()), seen, Hasher())


def test_name_that_may_appear_behind_a_link_is_asked_for_each_time(shop: Shop) -> None:
    (shop.src / "link.h").symlink_to("nowhere")
    seen = Inputs(((ABSENT, str(shop.src), "link.h"),))
    place = gather.places_of(shop.plan())
    assert [each.signature for each in gather.facts_of(place, seen, Hasher())] == [facts.UNSIGNED]


def test_links_on_a_way_and_on_those_that_they_lead_to_are_found(tmp_path: Path) -> None:
    base = tmp_path.resolve()
    (base / "real/sub").mkdir(parents=True)
    (base / "first").symlink_to("./second//sub")  # in two steps, and a path of its own
    (base / "second").symlink_to(base / "real")
    (base / "real/sub/up").symlink_to("../../beside/./a.h")
    (base / "beside").symlink_to("nothing")
    asked = f"{base}//first/./up"
    assert gather._links([asked]) == {
        asked, f"{base}/first", f"{base}/second", f"{base}/real/sub/up", f"{base}/beside"
    }  # fmt: skip
    (base / "circle").symlink_to("circle")
    assert gather._links([f"{base}/circle/a"]) == {f"{base}/circle/a", f"{base}/circle"}


def test_libraries_of_a_step_count_where_they_were_looked_for(tmp_path: Path) -> None:
    """Those that were asked for, and those that were loaded; programs are none."""
    base = tmp_path.resolve()
    for name in ("there/liba.so.1", "there/libb.so", "loaded/libb.so", "cc"):
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text("code")
    seen = log.Observation()
    seen.libraries = {"liba.so.1", "libgone.so"}
    seen.loaded = {f"{base}/loaded/libb.so", f"{base}/cc"}
    found = gather.list_inputs(seen, "/stage", searched=(f"{base}/there",))
    asked_for = "liba.so.1\0libb.so\0libgone.so"
    assert (LIBRARIES, elf.LIST, asked_for) in found.facts
    assert {f"{base}/there/liba.so.1", f"{base}/there/libb.so"} <= {*found.unseen, *found.files}
    assert not any(path.endswith("cc") for path in found.files)
    ((_, _, absent),) = (each for each in found.facts if each[:2] == (ABSENT, f"{base}/there"))
    assert "libgone.so" in facts.split_names(absent)
    assert elf.LIST in found.unseen or not os.path.exists(elf.LIST)
    preloads = (FILE, elf.PRELOADS, "")
    assert (preloads in found.facts) == os.path.exists(elf.PRELOADS)
    assert gather.list_inputs(log.Observation(), "/stage") == Inputs()


def test_text_of_an_inline_source_is_no_file(shop: Shop) -> None:
    """It is in the key, and the directory with its file is removed after the build."""
    seen = Inputs(
        ((FILE, str(shop.source), ""), (LISTING, str(shop.src), ""),
         (FILE, str(shop.write("src2/b.h")), ""), (ABSENT, str(shop.src), "a.h"),
         (ABSENT, str(shop.base), "b.h")),
    )  # fmt: skip
    place = gather.places_of(shop.plan(inline=(("a.cpp", "int a;"),)))
    found = gather.facts_of(place, seen, Hasher())
    assert [(fact.kind, fact.path) for fact in found] == [
        (FILE, f"{shop.base}/src2/b.h"), (ABSENT, str(shop.base)),
    ]  # fmt: skip


# What is written of a library


@pytest.mark.parametrize("linked", [True, False], ids=["hard links", "no hard links"])
def test_a_leaf_that_was_written_is_whole_and_its_facts_hold(
    linked: bool, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not linked:
        monkeypatch.setattr(os, "link", lambda *_: os.stat("/no hard links"))
    payload, found = shop.write("stage/op.so", "code"), shop.gather((FILE, shop.source))
    manifest = {
        "kind": "plain", "op": "op", "distribution": "dist", "spec": "aa",
        "target": {"backend": "cpu", "cpu": X86_V1, "cpu_features": [], "archs": []},
    }  # fmt: skip
    name = gather.write(
        f"{shop.base}/leaf", str(payload), manifest, found, {"flags": ["-O2"]}, "é\udcff"
    )
    leaf = shop.base / "leaf"
    leaf = leaf.rename(shop.base / name)
    assert stat.S_IMODE(leaf.stat().st_mode) == 0o700
    assert (leaf / "op.so").samefile(payload) == linked
    plan = shop.plan()
    places = plans.anchors_of(plan.spec, plan.toolchain)
    whole = entry.examine(str(leaf), places, Hasher(), listed=False, whole=True)
    assert isinstance(whole, entry.Leaf)
    assert whole.manifest["deps"] == key.manifest_facts(found)
    assert (whole.manifest["size"], whole.manifest["sha256"]) == (4, sha256(payload))
    lists = entry.read_sidecar(str(leaf))
    assert (lists["flags"], lists["facts"]) == (["-O2"], key.rows(found))
    assert (leaf / "build.log").read_bytes() == "é".encode() + b"\xff"
    shop.source.write_text("edited")
    assert isinstance(
        entry.examine(str(leaf), places, Hasher(), listed=False, whole=True), entry.Refused
    )


def test_needs_are_those_of_the_librarys_tables(shop: Shop) -> None:
    import _ctypes

    plan = shop.plan()
    found = gather.needs_of(_ctypes.__file__, plan)
    assert "libc.so.6" in found["sonames"]
    assert found["images"] == []
    assert found["cpu"] == sorted(cpu.kernel_names(cpu.requires(X86_V1, ())))
    of_libc = [row for row in found["symbols"] if row[0] == "libc.so.6"]
    assert found["symbols"] == sorted(found["symbols"])
    versions = [version for _, _, version in of_libc if version]
    assert len(versions) == len({*versions}) > 0  # one symbol of each
    assert {(soname, name, version) for soname, name, version in found["symbols"]} <= {
        *elf.read(_ctypes.__file__).symbols
    }


@pytest.mark.parametrize(
    ("backend", "library", "images"),
    [
        ("cuda", binaries.cuda(binaries.container(binaries.image(2, 90))), ["sm_90"]),
        ("rocm", binaries.hip(binaries.bundle("hipv4-amdgcn-amd-amdhsa--gfx942")), ["gfx942"]),
        ("cpu", binaries.cuda(binaries.container(binaries.image(2, 90))), []),
    ],
)
def test_images_are_those_of_the_backend(
    backend: str, library: bytes, images: list[str], shop: Shop
) -> None:
    path, plan = shop.base / "op.so", shop.plan()
    path.write_bytes(library)
    plan = plan._replace(target=plan.target._replace(backend=backend))
    assert gather.needs_of(str(path), plan)["images"] == images


# Several steps


def fact(kind: str, path: str, value: str, size: int = 0) -> Fact:
    return Fact(kind, "src", path, value, facts.UNSIGNED._replace(size=size))


NAMES = st.sampled_from(["a", "b", "c"])
LISTS = st.sets(NAMES, min_size=1).map(sorted).map(facts.join_names)
CHOICES = st.sampled_from(["/a", "/a\0/b", "/a\0/b\0/c"])
STEP = st.lists(
    st.one_of(
        st.builds(fact, st.sampled_from([FILE, LISTING, LINK]), NAMES, st.just("same")),
        st.builds(fact, st.just(ABSENT), st.just("d"), LISTS),
        st.builds(fact, st.just(CHOICE), st.just("cc"), CHOICES),
    ),
    max_size=6,
    unique_by=lambda each: each[:3],
)


@given(st.lists(STEP, max_size=4))
def test_steps_that_agree_have_all_their_facts_once_in_any_order(steps: list[list[Fact]]) -> None:
    found = gather.union_of_facts(steps)
    assert gather.union_of_facts(reversed(steps)) == found
    assert gather.union_of_facts([found, found]) == found
    assert [each[:3] for each in found] == sorted({each[:3] for step in steps for each in step})
    values = {each[:3]: facts.split_names(each.value) for each in found}
    for each in (each for step in steps for each in step):
        assert {*facts.split_names(each.value)} <= {*values[each[:3]]}


@pytest.mark.parametrize("kind", [FILE, PROGRAM, DIRECTORY, LISTING, LINK])
def test_steps_that_saw_different_values_of_a_path_disagree(kind: str) -> None:
    one, other = fact(kind, "a.h", "1"), fact(kind, "a.h", "2")
    with pytest.raises(gather.Disagree, match=r"a\.h"):
        gather.union_of_facts([[one], [other]])
    assert gather.union_of_facts([[one], [other._replace(path="b.h")]]) == (
        one, other._replace(path="b.h"),
    )  # fmt: skip


def test_names_and_programs_of_several_steps_are_joined() -> None:
    """A directory's signature is kept if all saw the same one: the object of another day may have
    looked into a directory that lay in this place then."""
    first = [fact(ABSENT, "d", "a\0c", 1), fact(ABSENT, "e", "a", 3), fact(CHOICE, "cc", "/a/cc")]
    second = [
        fact(ABSENT, "d", "b\0c", 2), fact(ABSENT, "e", "b", 3), fact(CHOICE, "cc", "/a/cc\0/b/cc"),
    ]  # fmt: skip
    looked_later = second[1].signature._replace(read_at=7)
    second[1] = second[1]._replace(signature=looked_later)
    assert gather.union_of_facts([first, second]) == (
        fact(ABSENT, "d", "a\0b\0c"), fact(ABSENT, "e", "a\0b", 3),
        fact(CHOICE, "cc", "/a/cc\0/b/cc"),
    )  # fmt: skip


def test_file_that_nobody_saw_open_was_there_before_with_the_directories_above_it(
    tmp_path: Path,
) -> None:
    library = tmp_path / "new" / "lib.so"
    library.parent.mkdir()
    library.write_text("a library")
    changed = library.stat().st_ctime_ns
    later = kept.kernel_time(str(tmp_path)) + 10**9
    assert kept.surely_read([str(library)], [str(library)], later, {})
    began = changed + 10**8  # after the file was written
    while library.parent.stat().st_ctime_ns < began:
        os.utime(library.parent)  # as if it was put in place only now
    assert kept.surely_read([str(library)], [], began, {})
    assert not kept.surely_read([], [str(library)], began, {})
    assert kept.surely_read([], [str(library)], began, kept.snapshot_of([str(library)]))
