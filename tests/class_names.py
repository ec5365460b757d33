"""Fails if two classes of opkiln have one name: whoever reads it must not have to ask which.

    python tests/class_names.py

Names of torch and DeepSpeed in ``compat`` are theirs, and do not count.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "opkiln"


def defined_twice(source: Path) -> dict[str, list[str]]:
    """The places of each class name that has more than one, with or without an underscore."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(source.rglob("*.py")):
        where = path.relative_to(source)
        if where.parts[0] == "compat":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{where}:{node.lineno}")
    return {name: found for name, found in places.items() if len(found) > 1}


if __name__ == "__main__":
    for name, found in sorted((twice := defined_twice(SOURCE)).items()):
        print(f"class {name} is defined in {' and '.join(found)}")
    sys.exit(bool(twice))
