"""Finds import circles in opkiln: among its modules, and among its folders.

    python tests/import_circles.py [DIRECTORY OF A PACKAGE]

Every import statement counts: at the top of a module, inside a function, under TYPE_CHECKING.
Prints each circle with the imports in it, and exits with status 1 if there is one.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "src" / "opkiln"


class Import(NamedTuple):
    """A statement in one module of the package that imports another module of it."""

    importer: str
    imported: str
    place: str  # file:line

    def __str__(self) -> str:
        return f"{self.importer} -> {self.imported}  ({self.place})"


class Circle(NamedTuple):
    """Modules or folders that import each other, directly or through others."""

    members: tuple[str, ...]
    imports: tuple[Import, ...]  # from one member to another

    def __str__(self) -> str:
        return "\n    ".join([f"import circle: {', '.join(self.members)}", *map(str, self.imports)])


def find(package: Path = PACKAGE) -> list[Circle]:
    """Every circle: first among all modules, then among the contents of each folder.

    There a subfolder counts as one member. So two folders that import each other are a circle, even
    if no two modules are.
    """
    every = imports(package)
    found = _circles([(each.importer, each.imported, each) for each in every])
    for folder in sorted({parent for each in every for parent in _parents(each.importer)}):
        depth = folder.count(".") + 2
        inside = [each for each in every if _holds(folder, each.importer, each.imported)]
        found += _circles([(_top(each[0], depth), _top(each[1], depth), each) for each in inside])
    return list({circle.members: circle for circle in found}.values())


def imports(package: Path) -> list[Import]:
    """Every import of one module of the package by another, each statement once.

    ``from x import y`` imports ``x.y`` if that is a module, else ``x``. The ``__init__.py`` of a
    folder has the folder's name.
    """
    paths = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    found: dict[Import, None] = {}
    for importer, path in paths.items():
        folder = importer if path.name == "__init__.py" else importer.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_bytes())):
            for name in _names(node, folder):
                imported = name if name in paths else name.rpartition(".")[0]
                if imported in paths and imported != importer:
                    place = f"{path.relative_to(package.parent)}:{node.lineno}"
                    found[Import(importer, imported, place)] = None
    return list(found)


def _names(node: ast.AST, folder: str) -> list[str]:
    """The dotted names that a statement in a folder imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    parents = folder.split(".")
    above = parents[: len(parents) + 1 - node.level] if node.level else []
    start = [*above, node.module] if node.module else above
    return [".".join([*start, alias.name]) for alias in node.names]


def _parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]


def _top(module: str, depth: int) -> str:
    return ".".join(module.split(".")[:depth])


def _holds(folder: str, *modules: str) -> bool:
    return all(f"{module}.".startswith(f"{folder}.") for module in modules)


def _circles(edges: list[tuple[str, str, Import]]) -> list[Circle]:
    """The strongly connected components of a graph that have more than one node."""
    graph: dict[str, set[str]] = defaultdict(set)
    for start, end, _ in edges:
        graph[start].add(end)
    reached = {node: _reached(graph, node) for node in list(graph)}
    components = {
        frozenset(other for other in reached[node] if node in reached.get(other, ()))
        for node in reached
    }
    circles = []
    for members in components:
        if len(members) > 1:
            among = [each for start, end, each in edges if start != end and {start, end} <= members]
            circles.append(Circle(tuple(sorted(members)), tuple(among)))
    return sorted(circles)


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def main(arguments: list[str]) -> int:
    circles = find(*map(Path, arguments))
    for circle in circles:
        print(circle)
    return 1 if circles else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
