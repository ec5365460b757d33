"""What no dependency file lists, the observer sees: after any change, the cache serves what an
empty cache would build."""

from __future__ import annotations

import os
import shutil
import subprocess
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from sample import child
from sample.op_tree import Tree

from opkiln.building.observing import log, observer

if TYPE_CHECKING:
    from collections.abc import Callable

ANSWER = 'extern "C" int answer() { return N; }\n'


class Case(NamedTuple):
    """``before`` makes a tree that answers 1; ``change`` has it answer 2."""

    before: Callable[[Tree], None]
    change: Callable[[Tree], object]


def _source(text: str, **methods: list[str]) -> Callable[[Tree], None]:
    def make(tree: Tree) -> None:
        tree.write("pkg/a.cpp", text.replace("@", str(tree.path)))
        found = {name: [each.replace("@", str(tree.path)) for each in value]
                 for name, value in methods.items()}  # fmt: skip
        tree.declare(**{"sources": ["a.cpp"], **found})

    return make


def _and(*makers: Callable[[Tree], object]) -> Callable[[Tree], None]:
    def make(tree: Tree) -> None:
        for each in makers:
            each(tree)

    return make


def _file(name: str, text: str) -> Callable[[Tree], object]:
    return lambda tree: tree.write(name, text.replace("@", str(tree.path)))


def _link(name: str, target: str) -> Callable[[Tree], object]:
    def make(tree: Tree) -> None:
        path = tree.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(tree.path / target)

    return make


INCBIN = """
    asm(".section .rodata\\n.global data\\ndata: .incbin \\"@/data.bin\\"\\n.previous");
    extern "C" const char data[] __attribute__((visibility("hidden")));
    extern "C" int answer() { return data[0] - '0'; }
"""
INCLUDED = """
    asm(".section .rodata\\n.global data\\n.include \\"@/data.s\\"\\n.previous");
    extern "C" const char data[] __attribute__((visibility("hidden")));
    extern "C" int answer() { return data[0]; }
"""
BY_MACRO = """
    #define WANTED <maybe.h>
    #if __has_include(WANTED)
    #include WANTED
    #else
    #define N 1
    #endif
    extern "C" int answer() { return N; }
"""
USES_N = '#include "n.h"\nextern "C" int answer() { return N; }\n'
USES_FAR = '#include "../b/n.h"\nextern "C" int answer() { return N; }\n'
EXTERN = 'int inner();\nextern "C" int answer() { return inner(); }\n'


def _inner(value: int, object_file: str) -> Callable[[Tree], object]:
    def make(tree: Tree) -> None:
        tree.write("inner.cpp", f"int inner() {{ return {value}; }}\n")
        tree.compile("inner.cpp", object_file, "-c", "-fPIC")

    return make


def _archive(kind: str) -> Callable[[Tree], object]:
    def make(tree: Tree) -> None:
        (tree.path / "libinner.a").unlink(missing_ok=True)
        subprocess.run(["ar", kind, "libinner.a", "inner.o"], cwd=tree.path, check=True)

    return make


def _compiler(tree: Tree) -> None:
    """A compiler that is a script, which runs the one that another file names."""
    tree.write("bin/g++", f'#!/bin/sh\nexec "$(cat {tree.path}/real)" "$@"\n', mode=0o755)
    for value in (1, 2):
        tree.write(f"bin/g++-{value}", f'#!/bin/sh\nexec g++ -DN={value} "$@"\n', mode=0o755)
    tree.environment["CXX"] = str(tree.path / "bin/g++")


def _real(value: int) -> Callable[[Tree], object]:
    return lambda tree: tree.write("real", f"{tree.path}/bin/g++-{value}")


CASES = {
    ".incbin": Case(_and(_source(INCBIN), _file("data.bin", "1")), _file("data.bin", "2")),
    ".include": Case(
        _and(_source(INCLUDED), _file("data.s", "data: .byte 1\n")),
        _file("data.s", "data: .byte 2\n"),
    ),
    "__has_include of a macro": Case(
        _source(BY_MACRO, include_paths=["@/inc"]), _file("inc/maybe.h", "#define N 2\n")
    ),
    "a search directory that is made later": Case(
        _and(_source(USES_N, include_paths=["@/later/deep", "@/inc"]),
             _file("inc/n.h", "#define N 1\n")),
        _file("later/deep/n.h", "#define N 2\n"),
    ),
    "a directory above the search directory": Case(
        _and(_source(USES_FAR, include_paths=["@/one/a", "@/two/a"]), _file("one/a/x", ""),
             _file("two/a/x", ""), _file("two/b/n.h", "#define N 1\n")),
        _file("one/b/n.h", "#define N 2\n"),
    ),
    "a link that led nowhere": Case(
        _and(_source(USES_N, include_paths=["@/one", "@/two"]), _link("one/n.h", "later/n.h"),
             _file("two/n.h", "#define N 1\n")),
        _file("later/n.h", "#define N 2\n"),
    ),
    "a directory by the name of a header": Case(
        _and(_source(BY_MACRO, include_paths=["@/inc"]), _file("inc/maybe.h/x", "")),
        _and(lambda tree: shutil.rmtree(tree.path / "inc/maybe.h"),
             _file("inc/maybe.h", "#define N 2\n")),
    ),
    # gcc opens a system header by the name that its links lead to, if that is shorter.
    "a link to a system header": Case(
        _and(_source(USES_N, cxx_args=["-idirafter", "@/far/away"]), _link("far/away/n.h", "1.h"),
             _file("1.h", "#define N 1\n"), _file("2.h", "#define N 2\n")),
        _link("far/away/n.h", "2.h"),
    ),
    "a linker script that names an object": Case(
        _and(_source(EXTERN, libraries_args=["inner"], extra_ldflags=["-L@"]),
             _file("libinner.so", "INPUT(@/inner.o)\n"), _inner(1, "inner.o")),
        _inner(2, "inner.o"),
    ),
    "a member of a thin archive": Case(
        _and(_source(EXTERN, libraries_args=["inner"], extra_ldflags=["-L@"]),
             _inner(1, "inner.o"), _archive("rcsT")),
        _inner(2, "inner.o"),
    ),
    "a compiler that a script chooses": Case(
        _and(_source(ANSWER), _compiler, _real(1)), _real(2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_cache_serves_what_an_empty_cache_would_build(name: str, tmp_path: Path) -> None:
    tree = Tree(tmp_path / "tree")
    CASES[name].before(tree)
    assert tree.answer("warm") == (1, "observed")
    CASES[name].change(tree)
    assert tree.answer("warm")[0] == 2


@pytest.mark.parametrize("name", [".incbin", "a compiler that a script chooses"])
def test_without_the_observer_each_process_compiles_for_itself(name: str, tmp_path: Path) -> None:
    tree = Tree(tmp_path / "tree")
    CASES[name].before(tree)
    assert tree.answer("warm", observed=False) == (1, "unobserved")
    CASES[name].change(tree)
    assert tree.answer("warm", observed=False)[0] == 2
    assert not list((tree.path.parent / "warm").glob("v1/ops/*/*"))


EXCHANGES = {
    "a header that is a link": ("inc/n.h", "a.h", "b.h"),
    "an include directory that is a link": ("inc", "one", "two"),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_a_link_that_is_exchanged_during_a_compile(name: str, tmp_path: Path) -> None:
    """The entry must not have the old code under the digest of the new header."""
    tree = Tree(tmp_path / "tree")
    link, old, new = EXCHANGES[name]
    _source(USES_N, include_paths=["@/inc"])(tree)
    if link == "inc":
        for value, directory in enumerate((old, new), 1):
            tree.write(f"{directory}/n.h", f"#define N {value}\n")
    else:
        (tree.path / "inc").mkdir()
        for value, file in enumerate((old, new), 1):
            tree.write(file, f"#define N {value}\n")
    (tree.path / link).symlink_to(tree.path / old)
    long_ago = 1_600_000_000
    for path in tree.path.rglob("*"):
        os.utime(path, (long_ago, long_ago), follow_symlinks=False)
    # A compiler that is not quicker than whoever deploys: the link is exchanged before it ends.
    tree.write("bin/g++", textwrap.dedent(f"""\
        #!/bin/sh
        g++ "$@"; status=$?
        case "$*" in *a.cpp*)
            cd {tree.path}; ln -sfn {tree.path}/{new} next && mv -T next {link};;
        esac
        exit $status
        """), mode=0o755)  # fmt: skip
    tree.environment["CXX"] = str(tree.path / "bin/g++")
    assert tree.answer("cache")[0] == 2
    assert tree.answer("cache")[0] == 2


HEADER = "#define N 1\n"
CODE = '#include "n.h"\nint f() { return N; }\n'
KERNEL = '#include "n.h"\n__global__ void k(int* x) { *x = N; }\n'
HIP = '#include "n.h"\n__attribute__((device)) int f() { return N; }\n'
COMPILERS = {
    "g++": (("g++",), "a.cpp", CODE, {"cc1plus"}),
    "clang++": (("clang++",), "a.cpp", CODE, set()),
    "nvcc": (("nvcc", "-arch=sm_90"), "a.cu", KERNEL, {"cicc", "ptxas", "cudafe++", "cc1plus"}),
    "hipcc": (("hipcc", "--offload-arch=gfx90a"), "a.hip", HIP, {"clang-15", "clang"}),
}


@pytest.mark.parametrize("name", COMPILERS)
def test_every_compiler_is_observed(name: str, tmp_path: Path) -> None:
    (program, *flags), source, text, parts = COMPILERS[name]
    found = shutil.which(program) or shutil.which(program, path="/usr/local/cuda/bin")
    if found is None:
        pytest.skip(f"there is no {name} here")
    (tmp_path / source).write_text(text)
    (tmp_path / "n.h").write_text(HEADER)
    library = str(tmp_path / "observer")
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-o", library, observer._SOURCE, "-ldl"],
                   check=True)  # fmt: skip
    trace = str(tmp_path / "log")
    environment = {**os.environ, **observer.environment(library, trace), "TMPDIR": str(tmp_path)}
    command = [found, *flags, "-c", source, "-o", "a.o"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    text = Path(trace).read_bytes().replace(b"\0", b"\n").decode()
    seen = log.finish(trace)
    assert seen is not None
    assert seen.complete, text
    read = set(map(os.path.normpath, seen.read))  # clang spells it ./n.h
    assert {str(tmp_path / source), str(tmp_path / "n.h")} <= read
    assert str(tmp_path / "a.o") in seen.written
    programs = {os.path.basename(each.program) for each in seen.started}
    assert not parts or parts & programs, programs


def test_a_static_program_makes_a_step_unobserved(tmp_path: Path) -> None:
    """It is not preloaded, so nobody knows what it read."""
    tree = Tree(tmp_path / "tree")
    _source('extern "C" int answer() { return 1; }\n')(tree)
    tree.write("quiet.c", "int main(void) { return 0; }\n")
    (tree.path / "bin").mkdir()
    tree.compile("quiet.c", "bin/quiet", "-static", "-x", "c")
    tree.write("bin/g++", f'#!/bin/sh\n{tree.path}/bin/quiet\nexec g++ "$@"\n', mode=0o755)
    tree.environment["CXX"] = str(tree.path / "bin/g++")
    assert tree.answer("cache") == (1, "unobserved")


def test_a_link_that_is_exchanged_just_before_its_file_is_hashed(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "tree")
    _source(USES_N, include_paths=["@/inc"])(tree)
    for value, name in enumerate(("a.h", "b.h"), 1):
        os.utime(tree.write(name, f"#define N {value}\n"), (1_600_000_000, 1_600_000_000))
    _link("inc/n.h", "a.h")(tree)
    (tmp_path / "cache").mkdir(mode=0o700)
    answer = child.run(
        """
        import os, sys
        from opkiln.building import gather as gathering
        gather = gathering.facts_of
        def exchange_and_gather(*given, **named):
            if os.readlink(sys.argv[1] + "/inc/n.h").endswith("a.h"):
                os.unlink(sys.argv[1] + "/inc/n.h")
                os.symlink(sys.argv[1] + "/b.h", sys.argv[1] + "/inc/n.h")
            return gather(*given, **named)
        gathering.facts_of = exchange_and_gather
        from pkg.op import Builder
        print(Builder().load().answer())
        """,
        str(tree.path),
        path=[tree.path],
        env={"OPKILN_CACHE_DIR": str(tmp_path / "cache"), "OPKILN_PROGRESS": "off"},
    )
    assert answer.split() == ["2"]
    assert tree.answer("cache")[0] == 2


@pytest.mark.parametrize("moved", ["front/libn.so", "front"])
def test_a_library_of_the_compiler_that_appears_during_a_compile(
    moved: str, tmp_path: Path
) -> None:
    """It was not loaded, and lies where it would have been: in front of the one that was."""
    tree = Tree(tmp_path / "tree")
    _source('extern "C" int answer() { return N; }\n')(tree)
    for number, place in enumerate(("lib", f"next/{moved}".removesuffix("/libn.so")), 1):
        (tree.path / place).mkdir(parents=True)
        tree.write("n.c", f"int n(void) {{ return {number}; }}\n")
        tree.compile("n.c", f"{place}/libn.so", "-shared", "-Wl,-soname,libn.so", "-x", "c")
    (tree.path / "bin").mkdir()
    tree.write("number.c", '#include <stdio.h>\nint n(void); int main() { printf("%d", n()); }\n')
    tree.compile("number.c", "bin/number", "-Wl,--no-as-needed", f"{tree.path}/lib/libn.so",
                 "-Wl,-rpath,$ORIGIN/../front:$ORIGIN/../lib", "-x", "c")  # fmt: skip
    script = f'#!/bin/sh\nexec g++ -DN=$({tree.path}/bin/number) "$@"\n'
    tree.write("bin/g++", script, mode=0o755)
    if moved != "front":
        (tree.path / "front").mkdir()
    (tmp_path / "cache").mkdir(mode=0o700)
    for _ in range(2):
        answer = child.run(
            """
            import os, sys
            from opkiln.building import observed
            look, (tree, moved) = observed.read_step, sys.argv[1:]
            def appear_and_look(*given, **named):
                if os.path.exists(f"{tree}/next/{moved}"):
                    os.rename(f"{tree}/next/{moved}", f"{tree}/{moved}")
                return look(*given, **named)
            observed.read_step = appear_and_look
            from pkg.op import Builder
            print(Builder().load().answer())
            """,
            str(tree.path),
            moved,
            path=[tree.path],
            env={"OPKILN_CACHE_DIR": str(tmp_path / "cache"), "OPKILN_PROGRESS": "off",
                 "CXX": str(tree.path / "bin/g++")},
        )  # fmt: skip
        assert answer == "2\n"
