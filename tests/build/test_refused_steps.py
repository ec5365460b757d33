"""A step that starts a program outside the toolchain, or writes outside its directory, is refused
by what the observer saw, also if no list of flags tells."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from sample.op_tree import Tree

SOURCE = 'extern "C" int answer() { return 1; }\n'
REFUSED = """
    from opkiln import errors
    from opkiln.plan import flags
    if {unchecked}:
        flags.check = flags.check_nvcc = lambda *given: None
    from pkg.op import Builder
    try:
        print("value", Builder().load().answer())
    except errors.StepRefused as error:
        print(error)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    made = Tree(tmp_path / "tree")
    made.write("pkg/a.cpp", SOURCE)
    made.declare(sources=["a.cpp"])
    return made


def load(tree: Tree, *, unchecked: bool = False) -> str:
    """What a process says that loads the op; ``unchecked``: with flags that a plan would refuse."""
    return tree.run(REFUSED.format(unchecked=unchecked), "cache")


def published(tree: Tree) -> list[Path]:
    return list((tree.path.parent / "cache").glob("v*/ops/**/manifest*"))


def real(program: str) -> str:
    found = shutil.which(program)
    assert found is not None
    return found


def evil(tree: Tree, name: str, *, static: bool = False) -> Path:
    """A program that does the work of another, and something else."""
    work = f'exec {real(Path(name).name)} "$@"'
    if not static:
        return tree.write(name, f"#!/bin/sh\n{work}\n", mode=0o755)
    path = tree.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    code = '#include <unistd.h>\nint main(int n, char** v) { return execv("%s", v); }\n'
    tree.write("evil.c", code % real(Path(name).name))
    tree.compile("evil.c", str(path), "-x", "c", "-static")
    return path


def test_a_flag_that_starts_another_assembler_is_refused(tree: Tree) -> None:
    program = evil(tree, "evil/as")
    tree.declare(sources=["a.cpp"], cxx_args=[f"-B{program.parent}/"])
    said = load(tree, unchecked=True)
    assert f"a.cpp is refused: {Path(real('g++')).resolve().name} started {program}" in said
    assert "is not a program of the toolchain" in said
    assert "hint: opkiln plan small" in said
    assert not published(tree)


def test_a_static_program_is_an_input_like_any_other(tree: Tree) -> None:
    """Nobody knows what it did: the step is not refused, and a preprocessor tells what was read."""
    program = evil(tree, "evil/as", static=True)
    tree.declare(sources=["a.cpp"], cxx_args=[f"-B{program.parent}/"])
    for entries in (1, 1):
        assert load(tree, unchecked=True).split() == ["value", "1"]
        assert len(published(tree)) == entries
    with program.open("ab") as file:
        file.write(b"more")
    assert load(tree, unchecked=True).split() == ["value", "1"]
    assert len(published(tree)) == 2


def test_a_flag_that_wraps_the_compiler_is_refused(tree: Tree) -> None:
    program = tree.write("evil/any", '#!/bin/sh\nexec "$@"\n', mode=0o755)
    tree.declare(sources=["a.cpp"], cxx_args=["-wrapper", str(program)])
    assert f"started {program}" in load(tree, unchecked=True)


def test_a_linker_that_a_flag_names_is_refused(tree: Tree) -> None:
    program = evil(tree, "evil/ld")
    tree.declare(sources=["a.cpp"], extra_ldflags=[f"-B{program.parent}/"])
    said = load(tree, unchecked=True)
    assert f"the link is refused: collect2 started {program}" in said
    assert not published(tree)


@pytest.mark.parametrize(
    ("where", "flag"),
    [("cxx_args", "-fopt-info-all=@"), ("cxx_args", "-Wa,-a=@"), ("extra_ldflags", "-Wl,-Map=@")],
)
def test_a_flag_that_writes_elsewhere_is_refused(tree: Tree, where: str, flag: str) -> None:
    elsewhere = tree.path / "elsewhere"
    tree.declare(**{"sources": ["a.cpp"], where: [flag.replace("@", str(elsewhere))]})
    said = load(tree, unchecked=True)
    assert f"wrote {elsewhere}" in said
    assert "outside the build's directory" in said
    assert not published(tree)


def test_a_specs_file_that_starts_a_program_is_refused(tree: Tree) -> None:
    """No flag tells: a compiler in a directory of its own reads the specs that lie beside it."""
    driver = Path(real("g++")).resolve()
    asked = [[str(driver), option] for option in ("-print-file-name=crtbegin.o", "-dumpmachine")]
    answers = [subprocess.run(each, capture_output=True, text=True, check=True) for each in asked]
    own, machine = (answer.stdout.strip() for answer in answers)
    place = tree.path / "gcc/lib/gcc" / machine / Path(own).parent.name
    place.mkdir(parents=True)
    for each in Path(own).parent.iterdir():
        (place / each.name).symlink_to(each)
    (tree.path / "gcc/bin").mkdir()
    shutil.copy(driver, tree.path / "gcc/bin/g++")
    program = evil(tree, "evil/as")
    pipe = f"%{{!S:-o %|.s |\n {program} %(asm_options) %m.s %A }}"
    (place / "specs").write_text(f"*invoke_as:\n{pipe}\n\n")
    tree.environment["CXX"] = str(tree.path / "gcc/bin/g++")
    tried = subprocess.run(
        [tree.environment["CXX"], "-###", "-c", "-x", "c++", os.devnull], capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    if str(program) not in tried.stderr:
        pytest.skip("this g++ does not read specs from beside a copy of it")
    assert f"started {program}" in load(tree)
    assert not published(tree)


def test_what_the_users_own_script_starts_and_writes_is_not_refused(tree: Tree) -> None:
    record = tree.path / "record"
    script = f'#!/bin/sh\ntouch {record}\ndate >> {record}\nexec g++ "$@"\n'
    tree.environment["CXX"] = str(tree.write("bin/g++", script, mode=0o755))
    assert load(tree).split() == ["value", "1"]
    assert record.exists()


def test_what_a_compiler_behind_the_users_script_starts_is_refused(tree: Tree) -> None:
    program = evil(tree, "evil/as")
    tree.environment["CXX"] = str(tree.write("bin/g++", '#!/bin/sh\nexec g++ "$@"\n', mode=0o755))
    tree.declare(sources=["a.cpp"], cxx_args=[f"-B{program.parent}/"])
    assert f"started {program}" in load(tree, unchecked=True)


def test_an_lto_link_is_not_refused(tree: Tree) -> None:
    tree.declare(sources=["a.cpp"], cxx_args=["-flto"], extra_ldflags=["-flto"])
    assert load(tree).split() == ["value", "1"]


@pytest.mark.parametrize("linker", ["bfd", "gold", "lld"])
def test_another_linker_of_the_toolchain_is_not_refused(tree: Tree, linker: str) -> None:
    if shutil.which(f"ld.{linker}") is None:
        pytest.skip(f"there is no ld.{linker} here")
    tree.declare(sources=["a.cpp"], extra_ldflags=[f"-fuse-ld={linker}"])
    assert load(tree, unchecked=True).split() == ["value", "1"]


def test_clang_is_not_refused(tree: Tree) -> None:
    if shutil.which("clang++") is None:
        pytest.skip("there is no clang++ here")
    tree.environment["CXX"] = "clang++"
    assert load(tree).split() == ["value", "1"]


def test_an_assembler_on_path_that_is_a_script_is_not_refused(tree: Tree) -> None:
    program = evil(tree, "first/as")
    tree.environment["PATH"] = f"{program.parent}:{os.environ['PATH']}"
    assert load(tree).split() == ["value", "1"]
