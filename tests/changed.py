"""Prints the test files that a change can touch: ``python tests/changed.py [BASE]``.

The change is everything that differs from the commit BASE (default: HEAD), new files included. A
test file is chosen if it was changed, or if it uses a changed module, directly or through others:
by an import statement, by a name of the package (``opkiln.load``), or by naming it in a string,
because that is how a test tells another process what to do, and how modules are imported late.

Prints ``tests``, which is all of them, if the change is to anything else that a test may depend
on: native sources, fixtures, the project's settings.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import import_circles

ROOT = Path(__file__).parents[1]
EVERYTHING = ["tests"]
_NAMED = re.compile(r"\bopkiln(?:\.\w+)+")
_COMMAND = re.compile(r"(?:^|\n)\s*(?:\$ )?opkiln\b")


def changed(base: str) -> list[str]:
    """The paths that differ from a commit, and the new ones."""
    listings = (["diff", "--name-only", base], ["ls-files", "--others", "--exclude-standard"])
    found = [
        subprocess.run(["git", *each], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for each in listings
    ]
    return sorted({line for text in found for line in text.splitlines()})


def choose(paths: list[str], root: Path = ROOT) -> list[str]:
    """The test files for a change of these paths; everything where it is in doubt."""
    modules = _modules(root)
    by_path = {path.relative_to(root).as_posix(): name for name, path in modules.items()}
    touched, pages = set(), set()
    for path in paths:
        if path in by_path and Path(path).name != "conftest.py":
            touched.add(by_path[path])
        elif path.startswith(("docs/", "examples/")) or ("/" not in path and path.endswith(".md")):
            pages.add(path.partition("/")[0])
        else:
            return EVERYTHING
    users: dict[str, set[str]] = defaultdict(set)
    for name, path in modules.items():
        text = path.read_text()
        for used in _used(text, modules):
            users[used].add(name)
        if path.name.startswith("test_") and any(page in text for page in pages):
            touched.add(name)
    waiting = list(touched)
    while waiting:
        new = users[waiting.pop()] - touched
        touched |= new
        waiting += new
    chosen = [modules[name].relative_to(root) for name in touched if name in modules]
    if any(path.name == "conftest.py" for path in chosen):
        return EVERYTHING
    return sorted(path.as_posix() for path in chosen if path.name.startswith("test_"))


def _modules(root: Path) -> dict[str, Path]:
    """The modules of opkiln and of the tests, by the names that they are imported by."""
    found = {}
    for path in (root / "src").rglob("*.py"):
        parts = path.relative_to(root / "src").with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    for path in (root / "tests").rglob("*.py"):
        parts = path.relative_to(root / "tests").with_suffix("").parts
        # pytest puts each file's folder on the path; sample is a package.
        name = ".".join(parts) if parts[0] == "sample" else parts[-1]
        found[f"{parts[0]} {name}" if name in ("conftest", *found) else name] = path
    return found


def _used(text: str, modules: dict[str, Path]) -> set[str]:
    """The modules that a file uses."""
    names, texts = set(), set()
    for node in ast.walk(ast.parse(text)):
        names.update(import_circles._names(node, ""))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names.add(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.update(_NAMED.findall(node.value))
            if _COMMAND.search(node.value):
                names.add("opkiln.__main__")
    found = {_home(name, modules) for name in (*names, *texts)}
    # A package in a string, as in import_module(f"opkiln.cli.{name}"), is any module in it.
    for name in texts & modules.keys():
        found.update(module for module in modules if module.startswith(f"{name}."))
    return found & modules.keys()


def _home(name: str, modules: dict[str, Path]) -> str:
    """The module that a dotted name leads to. A name of the package itself leads to where it is
    defined."""
    from opkiln import _LAZY

    parts = name.split(".")
    if parts[0] == "opkiln" and len(parts) > 1 and parts[1] in _LAZY:
        return _LAZY[parts[1]]
    while parts and ".".join(parts) not in modules:
        parts.pop()
    return ".".join(parts)


if __name__ == "__main__":
    print(*choose(changed(sys.argv[1] if len(sys.argv) > 1 else "HEAD")), sep="\n")
