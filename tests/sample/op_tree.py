"""A directory with a small op in it, built and asked in fresh processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import textwrap
from typing import TYPE_CHECKING

import pytest

from sample import at_rest, child, known

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class Tree:
    """A directory with an op in it: ``answer()`` of a plain library."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.environment: dict[str, str | None] = {}

    def write(self, name: str, text: str, *, mode: int = 0o644) -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
        return path

    def declare(self, **methods: list[str]) -> None:
        """The op's ``op.py``: a builder whose methods return these lists."""
        lines = [f"    def {name}(self): return {value!r}" for name, value in methods.items()]
        self.write("pkg/__init__.py", "")
        self.write("pkg/op.py", "\n".join([
            "from opkiln.builder import OpBuilder", "class Builder(OpBuilder):",
            "    NAME, KIND, ABI = 'small', 'plain', 'none'", *lines,
        ]))  # fmt: skip

    def settle(self) -> None:
        """Wait until all files have come to rest."""
        at_rest.wait(self.path)

    def compile(self, source: str, output: str, *flags: str) -> None:
        subprocess.run(["g++", *flags, source, "-o", output], cwd=self.path, check=True)

    def answer(
        self, cache: str, *, observed: bool = True, prefix: Sequence[str] = ()
    ) -> tuple[int, str]:
        """What a fresh process gets, and whether its inputs are known: observed or unobserved.

        ``prefix`` comes before its command line.
        """
        code = f"""
            from opkiln.building.observing import observer
            if not {observed}:
                observer.library = lambda *given: ""
            from pkg.op import Builder
            from opkiln.loading.explain import explain
            builder = Builder()
            value = builder.load().answer()
            how = explain(builder.op()).keys["inputs"]
            print(value, "observed" if how == "observed" else "unobserved")
        """
        value, how = self.run(code, cache, prefix).split()
        return int(value), how

    def run(self, code: str, cache: str, prefix: Sequence[str] = ()) -> str:
        """The output of a few lines in a fresh process that can import the op."""
        directory = self.path.parent / cache
        if not directory.exists():
            known.make_store(directory)
        env = {"OPKILN_CACHE_DIR": str(directory), "OPKILN_PROGRESS": "off", **self.environment}
        code = at_rest.IN_CHILD + textwrap.dedent(code)
        return child.run(code, path=[self.path], env=env, prefix=prefix)


def install_gcc(tree: Tree) -> Path:
    """Install a g++ below the tree. Returns the directory of its parts."""

    def ask(option: str) -> str:
        found = subprocess.run(["g++", option], capture_output=True, text=True, check=True)
        return found.stdout.strip()

    compiler = shutil.which("g++")
    parts = os.path.dirname(ask("-print-libgcc-file-name"))
    if compiler is None or not os.path.exists(f"{parts}/collect2"):
        pytest.skip("this g++ keeps its parts elsewhere")
    mine = tree.path / "gcc/lib/gcc" / ask("-dumpmachine") / ask("-dumpversion")
    mine.mkdir(parents=True)
    (tree.path / "gcc/bin").mkdir()
    shutil.copy(compiler, tree.path / "gcc/bin/g++")
    (tree.path / "gcc/include").symlink_to("/usr/include")
    for name in os.listdir(parts):
        (mine / name).symlink_to(f"{parts}/{name}")
    tree.environment["CXX"] = str(tree.path / "gcc/bin/g++")
    return mine
