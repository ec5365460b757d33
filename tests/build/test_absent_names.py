"""Names that a build looked for in vain must stay absent. Anything else may appear beside them, and
costs a look, once."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sample import at_rest
from sample.op_tree import Tree, install_gcc

if TYPE_CHECKING:
    from collections.abc import Sequence

USES_N = '#include "n.h"\nextern "C" int answer() { return N; }\n'

# Whether a receipt served, what was hashed, how many files were compiled.
LOAD = """
    from opkiln.base import digest
    from opkiln.machine import facts
    from opkiln.decision import receipt
    from opkiln.decision.terms import BUILD, Request
    from opkiln.loading import loader
    from pkg.op import Builder
    import json
    hashed = []
    real = facts.Hasher.__call__
    def hashing(self, path):
        hashed.append(path)
        return real(self, path)
    facts.Hasher.__call__ = hashing
    recalled = receipt.recall(Request(Builder().op())) is not None
    made, _ = loader.obtain(Request(Builder().op(), BUILD))
    print(json.dumps([recalled, hashed, made.compiled]))
"""


def _load(tree: Tree, before: str = "", prefix: Sequence[str] = ()) -> tuple[bool, list[str], int]:
    """(whether a receipt served, the files hashed besides the library, the number of compiles) of a
    fresh process."""
    recalled, hashed, compiled = json.loads(tree.run(before + LOAD, "warm", prefix))
    return recalled, hashed, compiled


BY_RECEIPT = (True, [], 0)
BY_SEARCH = (False, [], 0)  # and nothing was hashed


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """An op in a site-packages, which looks for its header in three places that lack it."""
    found = Tree(tmp_path / "site-packages")
    found.write("pkg/a.cpp", USES_N)
    found.write("inc/n.h", "#define N 1\n")
    found.write("first/other.h", "")
    places = [found.path / name for name in ("first", "missing/include", "inc")]
    found.declare(sources=["a.cpp"], include_paths=list(map(str, places)))
    found.settle()
    return found


def _watched(tree: Tree) -> list[Path]:
    """The directories of the tree that the receipt watches."""
    (kept,) = (tree.path.parent / "warm").glob("v1/receipts/*/*/*.json")
    listed = set(filter(os.path.isdir, json.loads(kept.read_text())["files"]))
    return [Path(each) for each in sorted(listed) if each.startswith(str(tree.path))]


def test_a_file_that_nobody_reads_costs_one_search(tree: Tree) -> None:
    assert _load(tree)[2] == 1
    tree.settle()
    assert _load(tree)[2] == 0
    assert _load(tree) == BY_RECEIPT
    watched = _watched(tree)
    names = {str(each.relative_to(tree.path)) for each in watched}
    assert {".", "first", "inc"} <= names  # "." lacks the directory "missing"
    for directory in watched:
        (directory / "notes.txt").touch()
    tree.settle()
    assert _load(tree) == BY_SEARCH
    assert _load(tree) == BY_RECEIPT


def test_a_package_that_is_installed_beside_an_op_costs_one_search(tree: Tree) -> None:
    assert _load(tree)[2] == 1
    tree.write("other/__init__.py", "")
    tree.write("other/include/n.h", "#define N 2\n")  # on nobody's search path
    tree.write("other-1.0.dist-info/RECORD", "other/__init__.py,,\n")
    tree.settle()
    assert _load(tree) == BY_SEARCH
    assert _load(tree) == BY_RECEIPT


def test_a_name_that_was_looked_for_in_vain_is_noticed_when_it_appears(tree: Tree) -> None:
    assert tree.answer("warm")[0] == 1
    tree.write("missing/include/n.h", "#define N 2\n")
    tree.settle()
    assert tree.answer("warm")[0] == 2
    tree.write("first/n.h", "#define N 3\n")
    tree.settle()
    assert tree.answer("warm")[0] == 3


@pytest.mark.timed
def test_a_program_that_is_installed_beside_the_compiler_costs_one_search(
    tree: Tree, tmp_path: Path
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    tree.environment["PATH"] = f"{programs}:{os.environ['PATH']}"
    at_rest.wait(programs)
    assert _load(tree)[2] == 1
    (programs / "another").touch(mode=0o755)
    at_rest.wait(programs)
    assert _load(tree) == BY_SEARCH
    assert _load(tree) == BY_RECEIPT


def test_a_touched_source_is_hashed_once(tree: Tree) -> None:
    assert _load(tree)[2] == 1
    source = tree.path / "pkg/a.cpp"
    os.utime(source)
    tree.settle()
    assert _load(tree) == (False, [str(source)], 0)
    assert _load(tree) == BY_RECEIPT


def test_a_file_beside_the_compilers_parts_costs_one_search(tree: Tree) -> None:
    parts = install_gcc(tree)
    tree.settle()
    assert _load(tree)[2] == 1
    tree.settle()
    (parts / "notes.txt").touch()
    tree.settle()
    assert _load(tree) == BY_SEARCH
    assert _load(tree) == BY_RECEIPT


def test_a_read_only_cache_serves_without_a_new_receipt(tree: Tree) -> None:
    assert _load(tree)[2] == 1
    cache = tree.path.parent / "warm"
    (tree.path / "inc/notes.txt").touch()
    tree.settle()
    script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    prefix = ["unshare", "--mount", "sh", "-c", script, str(cache)]
    tried = subprocess.run([*prefix, "true"], capture_output=True, check=False)
    if tried.returncode != 0:
        pytest.skip("nothing can be mounted here")
    for _ in range(2):
        assert _load(tree, prefix=prefix) == BY_SEARCH
