"""After a change of something that a compiler or linker reads, whatever named it, the cache serves
the very bytes that an empty cache builds."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from sample.mounting import held
from sample.op_tree import Tree, install_gcc

from opkiln.machine.toolchain import nvcc

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

USES_N = '#include "n.h"\nextern "C" int answer() { return N; }\n'
DEFAULT_N = '#ifndef N\n#define N 1\n#endif\nextern "C" int answer() { return N; }\n'
EXTERN = 'int inner();\nextern "C" int answer() { return inner(); }\n'
LARGE_FRAME = """
    extern "C" int answer(int n) {
        volatile char large[100000];
        large[n] = 1;
        return large[n];
    }
"""
STAMPED = 'extern "C" const char* stamp() { return __TIMESTAMP__; }\n'

SERVED = """
    from opkiln.decision.terms import BUILD, Request
    from opkiln.loading import loader
    from pkg.op import Builder
    made, _ = loader.obtain(Request(Builder().op(), BUILD))
    print(made.sha256, made.compiled, made.unobserved or "observed")
"""


def _served(tree: Tree, cache: str, prefix: Sequence[str] = ()) -> str:
    """The digest of the library that a fresh process gets."""
    digest, _, how = tree.run(SERVED, cache, prefix).split(maxsplit=2)
    assert how.strip() == "observed"
    return digest


def _op(tree: Tree, text: str, **methods: list[str]) -> None:
    tree.write("pkg/a.cpp", text)
    tree.declare(sources=["a.cpp"], **methods)


class Case(NamedTuple):
    """``make`` writes a tree, ``change`` changes what it builds to."""

    make: Callable[[Tree], None]
    change: Callable[[Tree], object]


# Search paths, however they are spelled


def _searched(*flags: str) -> Case:
    """``first/n.h`` appears, in a directory that comes before that of the header."""

    def make(tree: Tree) -> None:
        given = [flag.replace("@", str(tree.path)) for flag in flags]
        after = ["-idirafter", str(tree.path / "last")]
        _op(tree, USES_N, cxx_args=[*given, *after])
        tree.write("first/other.h", "")
        tree.write("last/n.h", "#define N 1\n")

    return Case(make, lambda tree: tree.write("first/n.h", "#define N 2\n"))


# A compiler of one's own, to which parts can be added


def _parts(tree: Tree) -> Path:
    (found,) = (tree.path / "gcc/lib/gcc").glob("*/*")
    return found


def _specs(value: int) -> Callable[[Tree], object]:
    return lambda tree: (_parts(tree) / "specs").write_text(f"*cc1_options:\n+ -DN={value}\n\n")


def _part(name: str, flags: str) -> Callable[[Tree], None]:
    """Put a script in the place of a part of the compiler. It runs the part with more flags."""

    def make(tree: Tree) -> None:
        place = _parts(tree) / name
        real = os.path.realpath(place) if place.is_symlink() else shutil.which(name)
        place.unlink(missing_ok=True)
        place.write_text(f'#!/bin/sh\nexec {real} "$@" {flags}\n')
        place.chmod(0o755)

    return make


def _with_gcc(
    text: str, *then: Callable[[Tree], object], **methods: list[str]
) -> Callable[[Tree], None]:
    def make(tree: Tree) -> None:
        _op(tree, text, **methods)
        install_gcc(tree)
        for each in then:
            each(tree)

    return make


# What a link reads


def _inner(tree: Tree, value: int, archive: str) -> None:
    tree.write("inner.cpp", f"int inner() {{ return {value}; }}\n")
    tree.compile("inner.cpp", "inner.o", "-c", "-fPIC")
    (tree.path / archive).unlink(missing_ok=True)
    subprocess.run(["ar", "rcsD", archive, "inner.o"], cwd=tree.path, check=True)


def _in_own_directory(tree: Tree) -> None:
    """An archive in a directory that the compiler passes to the linker by itself."""
    _op(tree, EXTERN, libraries_args=["inner"])
    install_gcc(tree)
    _inner(tree, 1, str(_parts(tree) / "libinner.a"))


def _overwrite(tree: Tree) -> None:
    """In place, as a person does; a package manager replaces the file."""
    _inner(tree, 2, "new.a")
    (_parts(tree) / "libinner.a").write_bytes((tree.path / "new.a").read_bytes())


def _linker_script(flag: str) -> Case:
    script = "SECTIONS {{ .marked : {{ BYTE({}) }} }} INSERT AFTER .data;\n"

    def make(tree: Tree) -> None:
        _op(tree, DEFAULT_N, extra_ldflags=[flag.replace("@", str(tree.path))])
        tree.write("link.ld", script.format(1))

    return Case(make, lambda tree: tree.write("link.ld", script.format(2)))


# A precompiled header


def _precompiled(tree: Tree) -> None:
    """``n.h.gch`` appears beside ``n.h``. It has another text than the header."""
    code = """
        from pkg.op import Builder
        from opkiln.decision.terms import Request
        from opkiln.loading.loader import look
        from opkiln.plan import plan as plans
        plan = look(Request(Builder().op())).plan
        print(*plans.command(plan.steps[0], plans.anchors(plan, "/stage")).words, sep="\\n")
    """
    argv = tree.run(code, "planned").splitlines()
    flags = [each for each in argv[1:] if "prefix-map" not in each]
    tree.write("other/n.h", "#define N 2\n")
    header = str(tree.path / "other/n.h")
    output = str(tree.path / "inc/n.h.gch")
    subprocess.run([*argv[:1], *flags, "-x", "c++-header", header, "-o", output], check=True)


def _with_header(tree: Tree) -> None:
    _op(tree, USES_N, include_paths=[str(tree.path / "inc")])
    tree.write("inc/n.h", "#define N 1\n")


CASES = {
    "-Wp,-I": _searched("-Wp,-I@/first"),
    "-Wp,-I,": _searched("-Wp,-I,@/first"),
    "-Xpreprocessor -I": _searched("-Xpreprocessor", "-I@/first"),
    "-iwithprefixbefore": _searched("-iprefix", "@/", "-iwithprefixbefore", "first"),
    "-iwithprefix": _searched("-iprefix", "@/", "-iwithprefix", "first"),
    "-I=": _searched("-isysroot", "@", "-I=/first"),
    "--include-directory=": _searched("--include-directory=@/first"),
    "-idirafter": _searched("-idirafter", "@/first"),
    "-I with ..": _searched("-I@/last/../first"),
    "a specs file that appears": Case(_with_gcc(DEFAULT_N), _specs(2)),
    "a specs file that is edited": Case(_with_gcc(DEFAULT_N, _specs(1)), _specs(2)),
    "collect2": Case(_with_gcc(DEFAULT_N), _part("collect2", "--defsym=planted=42")),
    "lto1": Case(
        _with_gcc(LARGE_FRAME, cxx_args=["-flto"], extra_ldflags=["-flto"]),
        _part("lto1", "-fstack-check"),
    ),
    "ld.gold that appears": Case(
        _with_gcc(DEFAULT_N, extra_ldflags=["-fuse-ld=gold"]),
        _part("ld.gold", "--defsym=planted=42"),
    ),
    "ld.gold that is replaced": Case(
        _with_gcc(DEFAULT_N, _part("ld.gold", ""), extra_ldflags=["-fuse-ld=gold"]),
        _part("ld.gold", "--defsym=planted=42"),
    ),
    "an archive in a directory of the compiler": Case(_in_own_directory, _overwrite),
    "-Wl,-T": _linker_script("-Wl,-T,@/link.ld"),
    "-T": _linker_script("-T@/link.ld"),
    "-Wl,--script": _linker_script("-Wl,--script=@/link.ld"),
    "a precompiled header that appears": Case(_with_header, _precompiled),
}  # fmt: skip


# Other spellings, or other parts, of what the observer sees the same of.
FURTHER = (
    "-Wp,-I,", "-Xpreprocessor -I", "-iwithprefix", "-iwithprefixbefore", "-I=", "-idirafter",
    "--include-directory=", "-T", "-Wl,--script", "a specs file that is edited", "lto1",
    "ld.gold that is replaced",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.full] * (name in FURTHER)) for name in CASES],
)
def test_the_cache_serves_the_bytes_that_an_empty_cache_builds(name: str, tmp_path: Path) -> None:
    tree = Tree(tmp_path / "tree")
    CASES[name].make(tree)
    tree.settle()
    before = _served(tree, "warm")
    CASES[name].change(tree)
    tree.settle()
    expected = _served(tree, "empty")
    assert expected != before, "the change does not matter, so this shows nothing"
    assert _served(tree, "warm") == expected


OVERLAID = 'mount -t overlay -o "lowerdir=$0,upperdir=$1/upper,workdir=$1/work" none "$0"'


def test_an_archive_in_the_linkers_own_directory_that_is_overwritten(tmp_path: Path) -> None:
    """In place, so that the directory does not change."""
    tree = Tree(tmp_path / "tree")
    _op(tree, EXTERN, libraries_args=["inner"])
    asked = subprocess.run(["g++", "-print-file-name=libm.so"], capture_output=True, text=True,
                           check=True)  # fmt: skip
    place = os.path.dirname(os.path.realpath(asked.stdout.strip()))
    for name in ("upper", "work"):
        (tree.path / name).mkdir()
    _inner(tree, 1, "upper/libinner.a")
    script = f'{OVERLAID} && shift && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, place, str(tree.path)]
    tried = subprocess.run([*command, "true"], capture_output=True, check=False)
    if os.getuid() != 0 or tried.returncode != 0:
        pytest.skip("needs root and overlay mounts")
    tree.settle()
    with held(command) as prefix:
        before = _served(tree, "warm", prefix)
        _inner(tree, 2, "new.a")
        overwrite = f"cat {tree.path}/new.a > {place}/libinner.a"
        subprocess.run([*prefix, "sh", "-c", overwrite], check=True)
        expected = _served(tree, "empty", prefix)
        assert expected != before
        assert _served(tree, "warm", prefix) == expected


def test_a_timestamp_does_not_depend_on_when_a_source_was_touched(tmp_path: Path) -> None:
    """``__TIMESTAMP__`` is as fixed as ``__DATE__`` and ``__TIME__`` are, so that a checkout with
    other times is a hit."""
    tree = Tree(tmp_path / "tree")
    _op(tree, STAMPED)
    source = tree.path / "pkg/a.cpp"
    os.utime(source, (1_600_000_000, 1_600_000_000))
    tree.settle()
    first = _served(tree, "warm")
    os.utime(source, (1_500_000_000, 1_500_000_000))
    tree.settle()
    assert _served(tree, "empty") == first
    assert tree.run(SERVED, "warm").split()[:2] == [first, "0"]


def test_a_header_that_is_edited_during_a_compile_while_our_clock_is_ahead(tmp_path: Path) -> None:
    """By its change time, the edit was before the compile began."""
    tree = Tree(tmp_path / "tree")
    _with_header(tree)
    clock = str(tmp_path / "clock.so")
    shim = Path(__file__).parents[1] / "faults/skewed_clock.c"
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-o", clock, str(shim)], check=True)
    header, done = tree.path / "inc/n.h", tree.path / "done"
    tree.write("bin/g++", "\n".join([
        "#!/bin/sh", 'g++ "$@" || exit 1', 'case "$*" in *a.cpp*)',
        f"    test -e {done} || echo '#define N 2' > {header}; touch {done};;", "esac", "",
    ]), mode=0o755)  # fmt: skip
    tree.environment |= {
        "CXX": str(tree.path / "bin/g++"), "LD_PRELOAD": clock, "SKEW_SECONDS": "3600",
    }  # fmt: skip
    tree.settle()
    assert tree.answer("warm") == (2, "observed")
    assert done.exists()
    assert tree.answer("warm") == (2, "observed")


# (the include directory, what exchanges it for another one)
EXCHANGES = {
    "an include directory": ("inc", "mv inc away && mv next inc"),
    "the directory above": ("above/inc", "mv above away && mv other above"),
    "a deploy link": ("current/inc", "touch away && ln -s new step && mv -T step current"),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_a_directory_that_is_exchanged_during_a_compile(name: str, tmp_path: Path) -> None:
    """The entry must not have the old code under the digest of the new header."""
    tree = Tree(tmp_path / "tree")
    directory, exchange = EXCHANGES[name]
    _op(tree, USES_N, include_paths=[str(tree.path / directory)])
    for old, new in (("inc", "next"), ("above/inc", "other/inc"), ("old/inc", "new/inc")):
        tree.write(f"{old}/n.h", "#define N 1\n")
        tree.write(f"{new}/n.h", "#define N 2\n")
    (tree.path / "current").symlink_to("old")
    tree.write("bin/g++", "\n".join([
        "#!/bin/sh", 'g++ "$@" || exit 1', f"cd {tree.path}",
        f'case "$*" in *a.cpp*) test -e away || ({exchange});; esac', "",
    ]), mode=0o755)  # fmt: skip
    tree.environment["CXX"] = str(tree.path / "bin/g++")
    tree.settle()
    assert tree.answer("warm") == (2, "observed")
    assert (tree.path / "away").exists()
    assert tree.answer("warm") == (2, "observed")


INCBIN = """
    asm(".section .rodata\\n.global data\\ndata: .incbin \\"@/data.bin\\"\\n.previous");
    extern "C" const char data[] __attribute__((visibility("hidden")));
    extern "C" int answer() { return data[0] - '0'; }
    __global__ void kernel(int* x) { *x = 1; }
"""


@pytest.mark.full  # test_observed_inputs.py has .incbin, and that what nvcc runs is observed
def test_a_file_that_a_cuda_source_embeds_is_noticed(tmp_path: Path) -> None:
    if not nvcc.available():
        pytest.skip("no nvcc on this machine")
    tree = Tree(tmp_path / "tree")
    source = tree.write("a.cu", INCBIN.replace("@", str(tree.path)))
    tree.environment["OPKILN_CUDA_ARCH_LIST"] = "9.0"
    code = f"""
        import opkiln
        found = opkiln.load("small", [{str(source)!r}], abi="none", is_python_module=False)
        print(found.answer())
    """
    for value in (1, 2):
        tree.write("data.bin", str(value))
        tree.settle()
        assert int(tree.run(code, "warm")) == value
