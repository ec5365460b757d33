"""A package with one small op, and what a fresh process gets of it."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from sample import child

if TYPE_CHECKING:
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

    def compile(self, source: str, output: str, *flags: str) -> None:
        subprocess.run(["g++", *flags, source, "-o", output], cwd=self.path, check=True)

    def answer(self, cache: str, *, observed: bool = True) -> tuple[int, str]:
        """What a fresh process gets, and how its dependencies are known."""
        code = f"""
            from opkiln.observing import observer
            if not {observed}:
                observer.library = lambda *given: ""
            from pkg.op import Builder
            from opkiln.loading.explain import explain
            builder = Builder()
            value = builder.load().answer()
            print(value, explain(builder.op()).keys["inputs"])
        """
        directory = self.path.parent / cache
        directory.mkdir(mode=0o700, exist_ok=True)
        env = {"OPKILN_CACHE_DIR": str(directory), "OPKILN_PROGRESS": "off", **self.environment}
        value, how = child.run(code, path=[self.path], env=env).split()
        return int(value), how
