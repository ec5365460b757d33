"""The text of a command: which tools it starts, what they write, and what is not read at all."""

from __future__ import annotations

import pytest

from opkiln.building import shell_text
from opkiln.building.kept import Anchors


@pytest.mark.parametrize(
    ("text", "programs", "outputs"),
    [
        ("gcc -c a.c -o a.o", ("gcc",), ("a.o",)),
        ("/usr/bin/c++ -MD -MF a.d -c a.cpp -o a.o", ("/usr/bin/c++",), ("a.d", "a.o")),
        ("cd sub && g++ -oa.o -c a.cpp", ("g++",), ("sub/a.o",)),
        (
            "LANG=C cpu-linux-gnu-gcc-12 -c a.c -o 'a b.o'",
            ("cpu-linux-gnu-gcc-12",),
            ("a b.o",),
        ),
        (": && clang++ a.o -o app && :", ("clang++",), ("app",)),
        ("rm -f lib.a && ar qc lib.a a.o && ranlib lib.a", ("ar", "ranlib"), ("lib.a",)),
        ("cmake -E rm -f lib.a && gcc-ar csrD lib.a a.o", ("gcc-ar",), ("lib.a",)),
        ("nvcc --dependency-output a.d -c a.cu -o a.o", ("nvcc",), ("a.d", "a.o")),
        (r"gcc -Wl,-rpath,'$ORIGIN' -DA=\"b\" a.o -o app", ("gcc",), ("app",)),
    ],
)
def test_tools_and_what_they_write_are_read(
    text: str, programs: tuple[str, ...], outputs: tuple[str, ...]
) -> None:
    found = shell_text.read(text)
    assert found is not None
    assert (found.programs, found.outputs) == (programs, outputs)
    assert found.text == text


@pytest.mark.parametrize(
    "text",
    [
        "touch a", "gcc -c a.c", "gcc -c a.c -o a.o; rm b", "gcc -c $FLAGS a.c -o a.o",
        "gcc -c *.c -o a.o", "gcc -E a.c > a.i", "gcc -c a.c -o a.o | tee log", "gcc -c - -o a.o",
        "gcc -c a.c -o a.o & true", "gcc -c `cat flags` -o a.o", "rm -f other && gcc -c a.c -o a.o",
        "gcc -c a.c -o a.o && touch stamp", "ar x lib.a a.o", "ar t lib.a",
        "nvcc -arch=native -c a.cu -o a.o",
        "nice gcc -c a.c -o a.o", "gcc -c ~/a.c -o a.o # note", "", "gcc 'a",
        "gcc -c a.c -o a.o\nrm b",
    ],
)  # fmt: skip
def test_every_other_text_is_not_read(text: str) -> None:
    assert shell_text.read(text) is None


def test_names_of_launchers_are_left_out() -> None:
    found = shell_text.read("ccache gcc -c a.c -o a.o && /opt/bin/sccache g++ -c b.cpp -o b.o")
    assert found is not None
    assert found.text == "gcc -c a.c -o a.o && g++ -c b.cpp -o b.o"


def test_paths_below_anchors_are_marks_and_come_back_elsewhere() -> None:
    here, there = Anchors({"dir": "/p/build", "root0": "/p"}), Anchors({"dir": "/b", "root0": "/q"})
    text = "-I/p/include '/p/build/a.c' -L/p/build -DX=\"/p\" -Wl,-rpath,/p/lib /other/p/x /p2/y"
    hidden = here.hide(text)
    assert here.show(hidden) == text
    assert there.show(hidden) == (
        "-I/q/include '/b/a.c' -L/b -DX=\"/q\" -Wl,-rpath,/q/lib /other/p/x /p2/y"
    )


def test_a_path_that_a_shell_would_quote_is_not_looked_for() -> None:
    anchors = Anchors({"dir": "/my dir"})
    assert anchors.odd == ("dir",)
    assert anchors.hide("-I/my dir/x") == "-I/my dir/x"
