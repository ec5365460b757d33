"""Row 30: a new header that comes first on the include path is a change like any other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from loaders import let_rest, returning, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fault_rows import Cases

pytestmark = [pytest.mark.row(30), pytest.mark.timed]


class Case(NamedTuple):
    """Files as they are, one that appears, and how the compiler is told where to look.

    In texts and arguments ``{d}`` is the case's directory. The value is 1 before, 2 after.
    """

    name: str
    before: dict[str, str]
    new: str
    text: str = "#define N 2\n"
    more: dict[str, list[str]] = {}  # noqa: RUF012


ONE = "#define N 1\n"
IN_B = {"op.cpp": returning("N", '#include "n.h"'), "b/n.h": ONE}
A_THEN_B = {"extra_include_paths": ["{d}/a", "{d}/b"]}
ONLY_B = {"extra_include_paths": ["{d}/b"]}
SYSTEM = "#ifdef N2\n#define N 2\n#else\n#define N 1\n#endif"
SHADOW = "#define N2\n#include_next <{name}>\n"

CASES = (
    Case("beside the source", IN_B, "n.h", more=ONLY_B),
    Case("in an earlier directory", {**IN_B, "a/x.h": ""}, "a/n.h", more=A_THEN_B),
    Case("in an earlier directory that did not exist", IN_B, "a/n.h", more=A_THEN_B),
    Case("in one deep below what exists", IN_B, "p/q/r/a/n.h",
         more={"extra_include_paths": ["{d}/p/q/r/a", "{d}/b"]}),
    Case("with a directory in its name", {"op.cpp": returning("N", '#include "sub/n.h"'),
         "b/sub/n.h": ONE, "a/x.h": ""}, "a/sub/n.h", more=A_THEN_B),
    Case("beside a header that includes it", {"op.cpp": returning("N", '#include "first.h"'),
         "a/first.h": '#include "n.h"\n', "b/n.h": ONE}, "a/n.h", more=A_THEN_B),
    Case("with dots in its name", {"src/op.cpp": returning("N", '#include "../i/n.h"'),
         "b/lib/x": "", "b/i/n.h": ONE}, "i/n.h", more={"extra_include_paths": ["{d}/b/lib"]}),
    Case("a header of C++", {"op.cpp": returning("N", f"#include <cstddef>\n{SYSTEM}"),
         "a/x.h": ""}, "a/cstddef", SHADOW.format(name="cstddef"), A_THEN_B),
    Case("a header of the C library", {"op.cpp": returning("N", f"#include <stdlib.h>\n{SYSTEM}"),
         "a/x.h": ""}, "a/stdlib.h", SHADOW.format(name="stdlib.h"), A_THEN_B),
    Case("found with -isystem", {"op.cpp": returning("N", "#include <n.h>"), "b/n.h": ONE,
         "a/x.h": ""}, "a/n.h", more={"extra_cflags": ["-isystem", "{d}/a", "-isystem", "{d}/b"]}),
    Case("found with -iquote", {**IN_B, "a/x.h": ""}, "a/n.h",
         more={"extra_cflags": ["-iquote", "{d}/a", "-I{d}/b"]}),
    Case("one that was asked for", {"op.cpp": returning(
        "N", '#if __has_include("extra.h")\n#include "extra.h"\n#else\n#define N 1\n#endif')},
        "extra.h"),
    Case("one that a header asked for", {"op.cpp": returning("N", '#include "n.h"'), "b/n.h":
         '#if __has_include("extra.h")\n#include "extra.h"\n#else\n#define N 1\n#endif\n'},
         "a/extra.h", more=A_THEN_B),
)  # fmt: skip
# With --full-counts; the fuzzer of row 34 draws such ways, too.
FURTHER = (
    Case("in a sub-directory that exists", {"op.cpp": returning("N", '#include "sub/n.h"'),
         "b/sub/n.h": ONE, "a/sub/x.h": ""}, "a/sub/n.h", more=A_THEN_B),
    Case("in angle brackets", {"op.cpp": returning("N", "#include <n.h>"), "b/n.h": ONE,
         "a/x.h": ""}, "a/n.h", more=A_THEN_B),
    Case("beside a header in a sub-directory", {"op.cpp": returning("N", '#include "sub/first.h"'),
         "a/sub/first.h": '#include "n.h"\n', "b/n.h": ONE}, "a/sub/n.h", more=A_THEN_B),
    Case("one of its inner headers", {"op.cpp": returning("N", f"#include <cstddef>\n{SYSTEM}"),
         "a/x.h": ""}, "a/bits/c++config.h", SHADOW.format(name="bits/c++config.h"), A_THEN_B),
    Case("found with -isystem in one word", {"op.cpp": returning("N", "#include <n.h>"),
         "b/n.h": ONE, "a/x.h": ""}, "a/n.h",
         more={"extra_cflags": ["-isystem{d}/a", "-isystem{d}/b"]}),
    Case("found with -I in two words", {**IN_B, "a/x.h": ""}, "a/n.h",
         more={"extra_cflags": ["-I", "{d}/a", "-I", "{d}/b"]}),
    Case("before a header found with -idirafter", {"op.cpp": returning("N", "#include <n.h>"),
         "b/n.h": ONE, "a/x.h": ""}, "a/n.h",
         more={"extra_cflags": ["-idirafter", "{d}/a", "-idirafter", "{d}/b"]}),
    Case("one that was asked for in angle brackets", {"op.cpp": returning(
        "N", "#if __has_include(<x/extra.h>)\n#define N 2\n#else\n#define N 1\n#endif")},
        "a/x/extra.h", "", A_THEN_B),
)  # fmt: skip


def laid_out(case: Case, root: Path) -> tuple[Path, dict[str, Any]]:
    for name, text in case.before.items():
        write(root / name, text)
    (source,) = root.rglob("op.cpp")
    arguments = {
        name: [each.replace("{d}", str(root)) for each in values]
        for name, values in case.more.items()
    }
    return source, arguments


def test_each_shadowing_header_is_noticed(
    tmp_path: Path, value: Callable[..., int], cases: Cases
) -> None:
    tried = [*CASES, *(FURTHER if cases.whole else ())]
    made = [(case, tmp_path / str(at), f"op{at}") for at, case in enumerate(tried)]
    given = {name: laid_out(case, root) for case, root, name in made}
    let_rest()  # signatures are believed from here on: nothing is hashed for being fresh

    def wrong(expected: int) -> list[str]:
        loaded = ((case, value(given[name][0], name, **given[name][1])) for case, _, name in made)
        return [case.name for case, number in loaded if number != expected]

    assert wrong(1) == []
    for case, root, _ in made:
        cases.tried()
        write(root / case.new, case.text)
    assert wrong(2) == []
    for case, root, _ in made:
        (root / case.new).unlink()
    assert wrong(1) == []


def test_a_new_file_that_shadows_nothing_causes_no_rebuild(
    tmp_path: Path, value: Callable[..., int], compiler: Any
) -> None:
    source, more = laid_out(CASES[1], tmp_path)
    assert value(source, **more) == 1
    before = compiler.compiles
    for name in ("unrelated.h", "a/unrelated.h", "a/sub/n.h", "README", "c/n.h"):
        write(tmp_path / name, "#define N 3\n")
        assert value(source, **more) == 1
    assert compiler.compiles == before
