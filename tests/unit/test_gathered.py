"""What of the files that a build read counts as whose, and what is watched for new names."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sample.levels import X86_64, X86_V1

from opkiln import digest
from opkiln.build_model import DeviceCompiler, Plan, Target, Toolchain, TorchSDK
from opkiln.model import ABI_NONE, ABI_STABLE, ABI_TORCH, PACKAGE, PLAIN, PYTHON, OpSpec
from opkiln.observing.inputs import Inputs
from opkiln.store import deps
from opkiln.store.libraries import Libraries
from opkiln.store.recheck import Hasher, Names, choice, listing

if TYPE_CHECKING:
    from collections.abc import Sequence

ELF = b"\x7fELF" + bytes(12)
SHARED, OBJECT = ELF + b"\x03\0", ELF + b"\x01\0"


class Shop:
    """A package, a system and a toolkit below one directory."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.src = base / "src"
        self.write("src/a.cpp", "")
        for name in ("usr/include", "torch/include", "py", "cuda/include"):
            (base / name).mkdir(parents=True)

    def write(self, name: str, text: str | bytes = "// a file") -> str:
        path = self.base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    def plan(self, *, device: bool = False, flags: Any = (), **changes: Any) -> Plan:
        spec = OpSpec("op", "dist", str(self.src), ("a.cpp",), kind=PLAIN, abi=ABI_NONE)._replace(
            **changes
        )
        sdk = TorchSDK(str(self.base / "torch"), "2.13.0", "id", None, None, True)
        nvcc = DeviceCompiler(
            "nvcc", str(self.base / "cuda/bin/nvcc"), str(self.base / "cuda"), "13.0", "id", (),
            frozenset(), (str(self.base / "cuda/include"),), (), wheel_include_dirs=("cublas",),
        )  # fmt: skip
        gcc = Toolchain(
            "gcc", str(self.base / "bin/g++"), "12", X86_64, "id", frozenset(),
            (str(self.base / "usr/include"),), torch=sdk, python_include=str(self.base / "py"),
            device=nvcc if device else None,
        )  # fmt: skip
        target = Target("cpu", "linux", X86_64, X86_V1, (), "none", flags=flags)
        return Plan(spec, target, gcc, (), (), "op.so")

    def gather(self, plan: Plan, read: Sequence[str], seen: Inputs | None = None,
               linked: Libraries | None = None) -> deps.Dependencies:  # fmt: skip
        return deps.gather(plan, read, Hasher(), linked, seen)


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


# Depfiles


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.o:\ta.h\n", []),  # make's own separator is a colon and a blank
        ("a.o: a.h\tb.h MAX.h\n", ["a.h", "b.h", "MAX.h"]),
        ("a.o: a\\\tb.h c.h\n", ["a\tb.h", "c.h"]),
        ("a.o: a\\\\ b.h\n", ["a\\", "b.h"]),
        ("a.o: a\\\\\\\\\\ b.h\n", ["a\\\\ b.h"]),
        ("a.o: a\\\\#b.h c\\\\:d.h\n", ["a\\#b.h", "c\\:d.h"]),
        ("a.o: a\\\\b.h end\\", ["a\\\\b.h", "end\\"]),
        ("a.o: $a.h $$b.h c$$", ["$a.h", "$b.h", "c$"]),
        ("a.o: a.h\nb.o: b.h\n", ["a.h"]),
        ("a.o:  a.h  \\\n \\\n b.h\n", ["a.h", "b.h"]),
        ("a.o: b.h a.h b.h", ["b.h", "a.h"]),
        ("a.o", []),
        ("", []),
    ],
)
def test_depfile_words_end_at_blanks_that_are_not_quoted(text: str, expected: list[str]) -> None:
    assert deps.parse_depfile(text) == expected


# Whose a file is


def test_own_file_is_known_by_its_place_below_the_package_opkiln_or_the_root(shop: Shop) -> None:
    plan = shop.plan()
    assert deps.Owners(plan).own_place(f"{shop.src}/sub/a.h") == ("src", "sub/a.h")
    assert deps.Owners(plan).own_place(f"{shop.src}2/a.h") == ("abs", f"{shop.src}2/a.h")
    assert deps.Owners(plan).own_place(f"{PACKAGE}/include/op.h") == ("opkiln", "include/op.h")
    assert deps.Owners(plan).own_place(f"{shop.src}/MAX") == ("src", "MAX")
    assert deps.Owners(plan).own_place("/data/MAX") == ("abs", "/data/MAX")
    assert deps.Owners(plan).own_place(f"{shop.base}/usr/include/vector") is None
    assert deps.Owners(plan).own_place(f"{shop.base}/usr/include/../mine.h") == (
        "abs", f"{shop.base}/usr/include/../mine.h",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "torch", "python"),
    [
        ({"abi": ABI_NONE}, False, False),
        ({"abi": ABI_STABLE}, True, False),
        ({"abi": ABI_TORCH}, True, True),
        ({"abi": ABI_NONE, "kind": PYTHON}, False, True),
    ],
)
def test_headers_that_the_tag_stands_for_are_covered(
    shop: Shop, changes: dict[str, Any], torch: bool, python: bool
) -> None:
    plan = shop.plan(**changes)
    assert (deps.Owners(plan).own_place(f"{shop.base}/torch/include/x.h") is None) == torch
    assert (deps.Owners(plan).own_place(f"{shop.base}/py/Python.h") is None) == python
    read = [shop.write("torch/include/x.h"), shop.write("py/Python.h")]
    found = shop.gather(plan, read)
    assert len(found.own) == 2 - torch - python
    assert [path for path, _ in found.external_files if not path.endswith("/")] == []


def test_headers_of_the_toolkit_and_its_wheels_are_the_systems(shop: Shop) -> None:
    plan, without = shop.plan(device=True, abi=ABI_STABLE), shop.plan()
    home = shop.base / "cuda"
    for name in ("include/x.h", "nvvm/libdevice.bc", "targets/sbsa/include/y.h"):
        path = shop.write(f"cuda/{name}")
        assert deps.Owners(plan).own_place(path) is None, name
        assert deps.Owners(without).own_place(path) == ("abs", path)
    link = home / "link.h"
    link.symlink_to(home / "nvvm/libdevice.bc")
    assert deps.Owners(plan).own_place(str(link)) is None
    own = shop.write("cuda/samples/own.h")
    assert deps.Owners(plan).own_place(own) == ("abs", own)
    from opkiln.toolchain import wheel_headers

    assert plan.toolchain.torch is not None
    wheel = f"{wheel_headers.root(plan.toolchain.torch)}/cublas/cublas.h"
    assert deps.Owners(plan).own_place(wheel) is None
    assert deps.Owners(shop.plan(device=True)).own_place(wheel) == ("abs", wheel)
    other = f"{wheel_headers.root(plan.toolchain.torch)}/other/own.h"
    assert deps.Owners(plan).own_place(other) == ("abs", other)


def test_directory_counts_by_its_whole_name_with_and_without_a_slash(shop: Shop) -> None:
    plan = shop.plan(include_dirs=(f"{shop.base}/MAX", "/"))
    system = (f"{shop.base}/usr/include/", f"{shop.base}/SYSX")
    owners = deps.Owners(plan._replace(toolchain=plan.toolchain._replace(include_dirs=system)))
    read = [f"{shop.base}/{name}" for name in ("usr/include/a/b.h", "SYSX/c/d.h", "MAX/e/f.h")]
    assert [owners.own_place(path) for path in read] == [None, None, ("abs", read[2])]
    assert set(deps._included_names(plan, owners, read)) == {"a/b.h", "c/d.h", "e/f.h"}


def test_package_inside_the_toolkits_directory_stays_the_authors(shop: Shop) -> None:
    root = shop.base / "cuda" / "targets" / "mine"
    header = shop.write("cuda/targets/mine/a.h")
    assert deps.Owners(shop.plan(device=True, root=str(root))).own_place(header) == ("src", "a.h")
    named = shop.plan(device=True, include_dirs=(str(root),))
    assert deps.Owners(named).own_place(header) == ("abs", header)


# Where names are watched for


def author_directories(shop: Shop, **changes: Any) -> list[str]:
    return deps._author_directories(shop.plan(**changes))


def test_directories_that_are_searched_first_are_those_of_flags_variables_and_sources(
    shop: Shop,
) -> None:
    flags = (("cppflags", ("-I/pre",)), ("cxxflags", ("-iquote", "/post")),
             ("cudaflags", ("-isystem/dev",)), ("ldflags", ("-I/linker",)),
             ("cpath", ("/cpath",)), ("cplus_include_path", ("/cplus",)))  # fmt: skip
    found = author_directories(
        shop, flags=flags, include_dirs=("include", "/abs/../inc"), sources=("a.cpp", "sub/b.cpp"),
        cxx_args=("-I/one", "-Irelative", "-I", "/two", "-idirafter/three", "-DI/no", "-I"),
        device_args=("-I/gpu",),
    )  # fmt: skip
    assert found == [
        f"{shop.src}/include", "/inc", "/one", "/two", "/three", "/gpu", "/pre", "/post", "/dev",
        "/cpath", "/cplus", str(shop.src), f"{shop.src}/sub",
    ]  # fmt: skip


def test_source_that_is_in_no_file_has_no_directory(shop: Shop) -> None:
    assert author_directories(shop, inline=(("a.cpp", "int a;"),)) == []


def test_names_are_watched_in_every_directory_and_in_those_below_that_exist(shop: Shop) -> None:
    one = shop.write("src/include/sub/deep/one.h")
    shop.write("src/other/sub/x")
    plan = shop.plan(include_dirs=("include", "other", "none/at/all"))
    found = shop.gather(plan, [f"{shop.src}/a.cpp", one])
    assert "sub/deep/one.h" in found.names
    watched = {path: names for _, path, names in found.watches}
    assert watched["include"] == ("sub/deep/one.h",)
    assert watched["other"] == ()
    assert watched["none/at/all"] == ()
    assert watched[""] == ("a.cpp", "include/sub/deep/one.h")
    directories = [path for _, path, _ in found.directories]
    assert {"include", "include/sub", "include/sub/deep", "other", "other/sub", ""} <= set(
        directories
    )
    assert "none" not in directories
    assert {anchor for anchor, _, _ in found.directories} == {"src"}


def test_included_name_is_that_below_each_search_directory_or_else_its_last_part(
    shop: Shop,
) -> None:
    plan = shop.plan(include_dirs=("include",), abi=ABI_STABLE)
    read = [
        shop.write("src/include/sub/own.h"), shop.write("usr/include/bits/c.h"),
        shop.write("torch/include/ATen/x.h"),
        shop.write("torch/include/torch/csrc/api/include/torch/y.h"),
        shop.write("elsewhere/lonely.h"),
    ]  # fmt: skip
    names = set(deps._included_names(plan, deps.Owners(plan), read))
    assert names == {
        "sub/own.h", "include/sub/own.h", "bits/c.h", "ATen/x.h", "torch/y.h",
        "torch/csrc/api/include/torch/y.h", "lonely.h",
    }  # fmt: skip


def test_names_that_own_files_ask_for_are_watched_and_those_of_the_system_are_not(
    shop: Shop,
) -> None:
    text = (
        '#if __has_include(<maybe.h>) && __has_include_next ( "sub/next.h" )\n'
        "#if __has_include(MACRO)\n"
    )
    own, other = shop.write("src/a.h", text), shop.write("usr/include/s.h", "__has_include(<s>)")
    found = shop.gather(shop.plan(), [own, other])
    assert {"maybe.h", "sub/next.h", "a.h", "s.h"} == set(found.names)


# What was observed


def test_observed_files_of_the_system_are_external_and_the_authors_stay_own(shop: Shop) -> None:
    compiler = shop.write("opt/gcc/bin/g++", "program")
    (shop.base / "opt/gcc/lib").mkdir()
    theirs, crt = shop.write("opt/gcc/include/own.h"), shop.write("opt/gcc/lib/crt1.o", OBJECT)
    library = shop.write("opt/gcc/lib/libc.so.6", SHARED)
    mine, data = shop.write("src/a.h"), shop.write("data/table.bin")
    seen = Inputs((theirs, crt, library, mine, data), (), (compiler,))
    found = shop.gather(shop.plan(), list(seen.files), seen)
    assert [dep[:2] for dep in found.own] == [("abs", data), ("src", "a.h")]
    external = dict(found.external_files)
    assert external[theirs] == hashlib.sha256(b"// a file").hexdigest()
    assert set(external) == {theirs, crt, compiler, f"{shop.base}/usr/include/"}
    watched = [path for path, _ in found.external_directories]
    assert set(watched) == {
        str(Path(theirs).parent), str(Path(crt).parent), f"{shop.base}/usr/include", compiler,
        theirs, crt,  # no package manager looks after them
    }  # fmt: skip


def test_programs_without_an_installation_bring_no_headers(shop: Shop) -> None:
    script = shop.write("home/bin/g++", "#!/bin/sh")
    header = shop.write("home/include/own.h")
    found = shop.gather(shop.plan(), [header], Inputs((header,), (), (script,)))
    assert [dep[:2] for dep in found.own] == [("abs", header)]
    (shop.base / "home/lib64").mkdir()
    found = shop.gather(shop.plan(), [header], Inputs((header,), (), (script,)))
    assert found.own == ()


def test_home_directory_is_no_installation(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    (shop.base / "home/lib").mkdir(parents=True)
    program = str(shop.base / "home/bin/g++")
    assert deps._installations([program]) == {f"{shop.base}/home/"}
    monkeypatch.setenv("HOME", str(shop.base / "home"))
    assert deps._installations([program]) == set()
    assert deps._installations(["/usr/local/bin/g++"]) == {"/usr/local/"}
    assert deps._installations(["/bin/sh", "g++", "/opt/tool"]) == set()
    deeper = f"{shop.base}/home/x/libexec/bin/cc1"
    (shop.base / "home/x/lib").mkdir(parents=True)
    assert deps._installations([deeper]) == {f"{shop.base}/home/x/"}


def test_compiler_that_a_plan_names_is_the_systems_wherever_it_is(shop: Shop) -> None:
    compiler, other = shop.write("bin/g++", "program"), shop.write("bin/other", "program")
    nvcc = shop.write("cuda/bin/nvcc", "program")
    seen = Inputs((compiler, other, nvcc), (), ())
    found = shop.gather(shop.plan(), list(seen.files), seen)
    assert sorted(dep.path for dep in found.own) == [other, nvcc]
    found = shop.gather(shop.plan(device=True), list(seen.files), seen)
    assert [dep.path for dep in found.own] == [other]


def test_shared_library_of_the_system_is_found_again_where_the_result_runs(shop: Shop) -> None:
    big_endian = b"\x7fELF" + bytes(12) + b"\0\x03"
    for name, content, is_one in (
        ("a.so", SHARED, True), ("b.so", big_endian, True), ("c.o", OBJECT, False),
        ("d.so", b"/* GNU ld script */ INPUT(x)", False), ("e.so", b"", False),
        ("f.so", SHARED + b"more", True), ("g.so", b"\x7fELG" + SHARED[4:], False),
    ):  # fmt: skip
        assert deps._is_shared_library(shop.write(name, content)) is is_one, name


def test_names_that_were_looked_for_in_vain_are_watched_where_they_were(shop: Shop) -> None:
    seen = Inputs((), (
        (f"{shop.base}/torch/include", ("covered.h",)),
        (f"{shop.src}/gen", ("made.h", "MAX")), (f"{shop.base}/lib", ("spec",)),
        ("/usr", ("x/none.h",)), ("/", ("no-such-directory-of-opkiln/a.h",)),
        (f"{shop.base}/usr/include", ("made.h",)),
    ))  # fmt: skip
    for name in ("src/gen", "lib"):
        (shop.base / name).mkdir()
    found = shop.gather(shop.plan(abi=ABI_STABLE), [], seen)
    missing = "no-such-directory-of-opkiln/a.h"
    assert set(found.names) == {"made.h", "MAX", "spec", "x/none.h", missing}
    watched = {(anchor, path) for anchor, path, _ in found.watches}
    assert watched == {("src", ""), ("src", "gen"), ("abs", f"{shop.base}/lib")}
    assert ("/usr/", listing(Names(found.names).present("/usr"))) in found.external_files
    assert {"/usr", "/"} <= {path for path, _ in found.external_directories}


def test_directory_that_only_this_build_has_is_not_watched(shop: Shop) -> None:
    seen = Inputs((), ((str(shop.src), ("a.h",)), (f"{shop.base}/usr", ("b.h",))))
    plan = shop.plan(inline=(("a.cpp", "int a;"),))
    found = shop.gather(plan, [], seen)
    assert found.names == ("b.h",)
    assert [watch[:2] for watch in found.watches] == [("abs", f"{shop.base}/usr")]


# What is linked


def test_linked_files_and_directories_are_gathered_with_the_rest(shop: Shop) -> None:
    archive = shop.write("lib/libx.a", "!<arch>")
    linked = Libraries(files=(archive,), names=("libx.so",), directories=(f"{shop.base}/lib",))
    found = shop.gather(shop.plan(), [], linked=linked)
    assert [dep.path for dep in found.own] == [archive]
    assert "libx.so" in found.names
    assert ("abs", f"{shop.base}/lib") in [watch[:2] for watch in found.watches]


def test_library_of_the_system_that_an_op_names_is_watched_by_itself(shop: Shop) -> None:
    named, other = shop.write("usr/include/libx.a"), shop.write("usr/include/liby.a")
    linked = Libraries(files=(named, other), names=("libx.a",), directories=())
    found = shop.gather(shop.plan(), [], linked=linked)
    watched = [path for path, _ in found.external_directories]
    assert watched == [f"{shop.base}/usr/include", named]


# Programs


class Clock:
    """The time that signatures are taken at. It is ten seconds ahead, so all files are at rest."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 10.0
        now = time.time_ns
        monkeypatch.setattr(digest.time, "time_ns", lambda: now() + int(self.ahead * 1e9))


def digest_of(shop: Shop, program: str, memory: Path) -> str:
    """A program's digest, as a process finds it that has not looked at it before."""
    deps._programs.clear()
    seen = Inputs(programs=(program,))
    found = deps.gather(shop.plan(), [], Hasher(), None, seen, (str(memory),))
    return dict(found.external_files)[program]


def test_program_is_hashed_once_and_again_when_it_has_changed(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch)
    program, memory = shop.write("bin/cc", "one"), shop.base / "store" / "toolchains"
    hashed = []

    def counted(path: str) -> str:
        hashed.append(path)
        return digest.sha256_file(path)

    monkeypatch.setattr(deps, "sha256_file", counted)
    for text, times in (("one", 1), ("another", 2)):
        shop.write("bin/cc", text)
        wanted = hashlib.sha256(text.encode()).hexdigest()
        seen = Inputs(programs=(program,))
        found = deps.gather(shop.plan(), [], Hasher(), None, seen, (str(memory),))
        assert dict(found.external_files)[program] == wanted
        assert digest_of(shop, program, memory) == wanted
        assert hashed == [program] * times


def test_program_that_is_replaced_while_it_is_hashed_is_not_remembered(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    program, memory = shop.write("bin/cc", "old"), shop.base / "store" / "toolchains"

    def overtaken(path: str) -> str:
        found = digest.sha256_file(path)
        shop.write("bin/cc", "new")
        os.utime(path, (time.time() + 20,) * 2)
        clock.ahead = 40
        return found

    with monkeypatch.context() as patch:
        patch.setattr(deps, "sha256_file", overtaken)
        digest_of(shop, program, memory)
    assert digest_of(shop, program, memory) == hashlib.sha256(b"new").hexdigest()


def test_programs_that_a_script_chose_from_path_are_recorded(shop: Shop) -> None:
    chosen = (("cc", ("/a/cc", "/b/cc")),)
    found = shop.gather(shop.plan(), [], Inputs(chosen=chosen))
    assert found.chosen == chosen
    assert ("PATH:cc", choice(["/a/cc", "/b/cc"])) in found.external_files
    assert deps.to_manifest(found)["chosen"] == [["cc", ["/a/cc", "/b/cc"]]]
    assert "chosen" not in deps.to_manifest(shop.gather(shop.plan(), []))


# The record


def test_record_of_dependencies_gives_their_key_again(shop: Shop) -> None:
    header = shop.write("src/a.h")
    plan = shop.plan()
    found = shop.gather(plan, [f"{shop.src}/a.cpp", header, f"{shop.src}/a.cpp"])
    sha256 = hashlib.sha256(b"// a file").hexdigest()
    assert deps.own_digests(plan, found)[header] == sha256
    assert len(deps.own_digests(plan, found)) == 2
    record = deps.to_manifest(found)
    assert record["own"][1][:3] == ["src", "a.h", sha256]
    assert record["own"][1][3:] == list(found.own[1].signature)
    assert record["external"] == found.external
    assert record["watches"] == [["src", "", ("a.cpp", "a.h")]]
    assert record["dirs"] == [["src", "", *found.directories[0][2]]]
    assert record["external_dirs"] == [
        [f"{shop.base}/usr/include", *found.external_directories[0][1]]
    ]
    from opkiln.store.recheck import recheck

    names = {"names": list(found.names)}
    now, _ = recheck(record, {"src": str(shop.src)}, Hasher(), lambda: names, external=False)
    assert now == deps.key_of(found)


def test_files_in_usr_local_are_watched_one_by_one_unless_the_toolkit_is_there(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """People overwrite files there in place, which does not touch their directory."""
    local = "/usr/local/include/x.h"
    real = shop.write("usr/local/x.h")

    class Elsewhere(Hasher):
        def __call__(self, path: str) -> Any:
            return super().__call__(real)

    monkeypatch.setattr(deps.Signature, "of", classmethod(lambda cls, path: path))
    plan = shop.plan()
    plan = plan._replace(toolchain=plan.toolchain._replace(include_dirs=("/usr/local/include",)))
    found = deps.gather(plan, [local], Elsewhere())
    assert local in [path for path, _ in found.external_directories]
    device = shop.plan(device=True).toolchain.device
    assert device is not None
    tools = plan.toolchain._replace(device=device._replace(home="/usr/local"))
    found = deps.gather(plan._replace(toolchain=tools), [local], Elsewhere())
    assert local not in [path for path, _ in found.external_directories]


def test_name_that_was_looked_for_in_vain_and_exists_by_now_is_an_error(shop: Shop) -> None:
    """What a compiler read is not certain if a file appeared while it looked for it."""
    (shop.src / "gen").mkdir()
    plan, gen = shop.plan(), f"{shop.src}/gen"

    def gathered(name: str) -> deps.Dependencies:
        return shop.gather(plan, [], Inputs((), ((gen, (name,)),)))

    assert "made.h" in gathered("made.h").names
    made = shop.write("src/gen/made.h")
    with pytest.raises(deps.Appeared, match=made):
        gathered("made.h")
    shop.write("src/gen/MAX")
    with pytest.raises(deps.Appeared, match="MAX"):
        gathered("MAX")
    with pytest.raises(deps.Appeared):
        gathered("made.h/")  # a directory, where there is a file now
    Path(made).unlink()
    Path(made).mkdir()
    assert "made.h" in gathered("made.h/").names
    with pytest.raises(deps.Appeared):
        gathered("made.h")
    system = f"{shop.base}/usr/include"
    shop.write("usr/include/made.h")
    with pytest.raises(deps.Appeared):
        shop.gather(plan, [], Inputs((), ((system, ("made.h",)),)))
