"""``opkiln.library``: several functions of one library, each an op of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from sample import child, forks
from torch import Tensor

import opkiln
from opkiln.builder.registry import ALL_OPS, bundled_ops
from opkiln.errors import DifferenceError, FallbackWarning, SpecError
from opkiln.loading import loader

SOURCE = """
#include <opkiln/op.h>
using opk::Tensor;
Tensor {prefix}doubled(const Tensor& x) {{
  Tensor out = opk::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) out.data<float>()[i] = 2 * x.data<const float>()[i];
  return out;
}}
void {prefix}fill(Tensor& x, double value) {{
  for (int64_t i = 0; i < x.numel(); ++i) x.data<float>()[i] = static_cast<float>(value);
}}
OPKILN_OP({prefix}doubled, cpu);
OPKILN_OP({prefix}fill, cpu);
"""


def named(name: str, function: Any) -> Any:
    function.__name__ = function.__qualname__ = name
    return function


def doubled(x: Tensor) -> Tensor:
    return x + x


def fill(x: Tensor, value: float) -> None:
    x.fill_(value)


def kit(prefix: str, source: str = SOURCE) -> tuple[Any, Any, Any]:
    """A library with two functions."""
    made = opkiln.library(f"{prefix}kit", source=source.format(prefix=prefix), namespace="kits")

    def one(x: Tensor) -> Tensor:
        return doubled(x)

    def other(x: Tensor, value: float) -> None:
        fill(x, value)

    return (
        made,
        made.op()(named(f"{prefix}doubled", one)),
        made.op(mutates="x")(named(f"{prefix}fill", other)),
    )


def test_functions_share_one_build_and_are_ops_of_their_own() -> None:
    made, twice, filled = kit("shared_")
    assert repr(made) == "<library shared_kit: shared_doubled, shared_fill>"
    x = torch.randn(5, requires_grad=True)
    out = twice(x)
    out.sum().backward()
    assert torch.equal(out, x + x)
    assert torch.equal(x.grad, torch.full((5,), 2.0))
    y = torch.zeros(3)
    version = y._version
    filled(y, 4.0)
    assert torch.equal(y, torch.full((3,), 4.0))
    assert y._version == version + 1
    loads = {op for _, op, _ in loader.loaded_here() if op.startswith("shared_")}
    assert loads == {"shared_kit"}
    assert twice.load("cpu")
    assert twice.builder is filled.builder is made.builder
    twice.check(torch.randn(7))
    filled.check(torch.randn(7), 2.0)
    torch.library.opcheck(twice.overload, (torch.randn(3),))
    torch.library.opcheck(filled.overload, (torch.randn(3), 1.0))
    torch.compile(lambda x: filled(x, 3.0), fullgraph=True, backend="aot_eager")(y)
    assert torch.equal(y, torch.full((3,), 3.0))


def test_each_variant_is_a_library_of_all_functions() -> None:
    text = SOURCE.replace("2 * x", "FACTOR * x").replace("(value)", "(FACTOR * value)")
    made = opkiln.library(
        "varied_kit",
        source=text.format(prefix="varied_"),
        namespace="kits",
        variants={"FACTOR": (2, 3)},
    )

    @made.op()
    def varied_doubled(x: Tensor) -> Tensor:
        return x * x.dim()

    @made.op(mutates="x")
    def varied_fill(x: Tensor, value: float) -> None:
        x.fill_(value * x.dim())

    def factor(x: Tensor, *_: object) -> dict[str, int]:
        return {"FACTOR": x.dim()}

    varied_doubled.variant(factor)
    varied_fill.variant(factor)
    flat, deep = torch.ones(2, 2), torch.ones(2, 2, 2)
    assert torch.equal(varied_doubled(deep), 3 * deep)
    assert varied_doubled.load("cpu", FACTOR=3)
    varied_fill(deep, 5.0)
    varied_fill(flat, 5.0)
    assert (deep[0, 0, 0], flat[0, 0]) == (15, 10)
    assert torch.equal(varied_doubled(flat), 2 * flat)
    loads = {op for _, op, _ in loader.loaded_here() if op.startswith("varied_")}
    assert loads == {"varied_kit__FACTOR_2", "varied_kit__FACTOR_3"}
    with pytest.warns(FallbackWarning, match="no variant has FACTOR=1"):
        assert torch.equal(varied_doubled(flat[0]), flat[0])


def test_opkiln_check_compares_each_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPKILN_MODE", "check")
    _, twice, filled = kit("compared_", SOURCE.replace("(value)", "(value + 1)"))
    assert torch.equal(twice(torch.ones(3)), torch.full((3,), 2.0))
    with pytest.raises(DifferenceError, match="argument x after the call"):
        filled(torch.zeros(3), 1.0)


def test_function_that_is_declared_after_the_first_call_is_taken_in() -> None:
    made = opkiln.library("late_kit", source=SOURCE.format(prefix="late_"), namespace="kits")

    @made.op()
    def late_doubled(x: Tensor) -> Tensor:
        return x + x

    x = torch.ones(3)
    with pytest.warns(FallbackWarning, match="has late_fill, which no schema declares"):
        assert torch.equal(late_doubled(x), x + x)
    assert not late_doubled.load("cpu")

    @made.op(mutates="x")
    def late_fill(x: Tensor, value: float) -> None:
        x.fill_(value)

    late_fill(x, 2.0)
    assert late_fill.load("cpu")
    assert torch.equal(late_doubled(x), torch.full((3,), 4.0))
    assert late_doubled.load("cpu")


def test_mistakes_are_told() -> None:
    with pytest.raises(SpecError, match=r"opkiln.library names no source"):
        opkiln.library("nothing")
    with pytest.raises(SpecError, match="cannot be the name of an op"):
        opkiln.library("../kit", "kit.cpp")
    with pytest.raises(SpecError, match="decorates functions, not type"):
        opkiln.library("kit", "kit.cpp").op()(int)


APART = {
    "__init__.py": "",
    "op.py": """import sys
from opkiln.builder.library import library

kit = library(
    "both", "both.cpp", functions="kit_apart.functions", without={"cpu": ["halved"]},
)
assert "torch" not in sys.modules or "kit_apart.functions" in sys.modules
""",
    "functions.py": """from torch import Tensor
from .op import kit as library
kit = library
One = Tensor

@kit.op()
def doubled(x: Tensor) -> Tensor:
    return x + x

@kit.op(mutates="x")
def fill(x: Tensor, value: float) -> None:
    x.fill_(value)

@kit.op()
def halved(x: One) -> "One":
    return x / 2
""",
    "both.cpp": SOURCE.format(prefix=""),
}
EXPLAIN_APART = """
import opkiln, sys
print(opkiln.explain("both").verdict, "kit_apart.op" in sys.modules, "torch" in sys.modules)
"""
USE_APART = """
import opkiln
functions = opkiln.get_builder("both").load()
import torch
from kit_apart.functions import doubled, halved
x = torch.ones(3)
functions.fill(x, 1.5)
assert torch.equal(doubled(x), torch.full((3,), 3.0))
assert torch.equal(halved(doubled(x)), x) and torch.equal(functions.halved(doubled(x)), x)
print(doubled.load("cpu"))
"""


def test_commands_read_the_functions_of_a_library_without_torch(tmp_path: Path) -> None:
    home = tmp_path / "site" / "kit_apart"
    home.mkdir(parents=True)
    for name, text in APART.items():
        (home / name).write_text(text)
    info = tmp_path / "site" / "kit_apart-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kit-apart\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[opkiln.ops]\nboth = kit_apart.op:kit\n")
    path = [tmp_path / "site", Path(sysconfig.get_path("purelib"))]
    build = "import sys, opkiln.__main__ as m; sys.argv = ['opkiln', 'build', 'both']; m.main()"
    for code, words in (
        (build, "both"),
        (EXPLAIN_APART, "cached True False"),
        (USE_APART, "True\n"),
    ):
        assert words in child.run(code, path=path)


def test_a_module_that_does_not_say_its_annotations_itself_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "kit_aliases"
    home.mkdir()
    (home / "__init__.py").write_text("")
    (home / "aliases.py").write_text("from torch import Tensor as Picture")
    (home / "op.py").write_text(
        "import opkiln\nkit = opkiln.library('aliased', 'a.cpp', functions='kit_aliases.functions')"
    )
    (home / "functions.py").write_text(
        "from kit_aliases.aliases import Picture\nfrom kit_aliases.op import kit\n\n"
        "@kit.op()\ndef turned(x: Picture, times: int = 1) -> Picture:\n    return x\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    kit = import_module("kit_aliases.op").kit
    assert "kit_aliases.functions" not in sys.modules
    assert kit.builder.FUNCTIONS.schemas == ("turned(Tensor x, SymInt times=1) -> Tensor",)
    assert "kit_aliases.functions" in sys.modules


CATALOGUE = """
import json, sys
from opkiln.builder.registry import ALL_OPS, bundled_ops
libraries = (each for name in bundled_ops() for each in ALL_OPS[name].PARTS or (ALL_OPS[name],))
print(json.dumps({each.NAME: each.FUNCTIONS.schemas for each in libraries}))
assert "torch" not in sys.modules
"""


def test_the_schemas_of_the_catalogue_are_read_without_torch() -> None:
    read = json.loads(child.run(CATALOGUE))
    for name in bundled_ops():
        for library in ALL_OPS[name].PARTS or (ALL_OPS[name],):
            library.FUNCTIONS.import_module()
            schemas = library.FUNCTIONS.schemas
            assert sorted(read[library.NAME]) == sorted(schemas) != []


PACKAGE = {
    "__init__.py": """import opkiln
from torch import Tensor

kit = opkiln.library("both", "both.cpp")

@kit.op()
def doubled(x: Tensor) -> Tensor:
    return x + x

@kit.op(mutates="x")
def fill(x: Tensor, value: float) -> None:
    x.fill_(value)
""",
    "both.cpp": SOURCE.format(prefix=""),
}
USE = """
import torch, kit_package
x = torch.zeros(3)
kit_package.fill(x, 1.5)
assert torch.equal(kit_package.doubled(x), torch.full((3,), 3.0))
print(kit_package.doubled.load("cpu"), *[n for n in __import__("opkiln").ALL_OPS if n in
      ("both", "doubled", "fill", "kit")])
"""


def test_commands_know_the_library_by_its_name(tmp_path: Path) -> None:
    home = tmp_path / "site" / "kit_package"
    home.mkdir(parents=True)
    for name, text in PACKAGE.items():
        (home / name).write_text(text)
    info = tmp_path / "site" / "kit_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kit-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[opkiln.ops]\nkit_package = kit_package\n")
    for argv, words in (
        (["-m", "opkiln", "build", "both"], "both"),
        (["-c", USE], "True both\n"),
    ):
        done = child.finish(forks.Fork(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**child.environment(), "PYTHONPATH": str(tmp_path / "site")},
        ))  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert words in done.stdout
