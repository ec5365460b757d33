"""Names that a build looked for in vain must stay absent. Anything else may appear beside them, and
costs a look, once."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from sample import at_rest
from sample.op_tree import Tree, install_gcc

USES_N = '#include "n.h"\nextern "C" int answer() { return N; }\n'

# How the op was found, what was hashed, whether names were looked up, what was compiled.
LOAD = """
    from opkiln import digest
    from opkiln.decision import receipt
    from opkiln.decision.terms import BUILD, Request
    from opkiln.loading import loader
    from opkiln.store import recheck
    from pkg.op import Builder
    import json
    hashed, looked = [], []
    real, real_names = digest.sha256_file, receipt._same_names
    def hashing(path, *rest):
        hashed.append(path)
        return real(path, *rest)
    def names(*given):
        looked.append(1)
        return real_names(*given)
    digest.sha256_file = receipt.sha256_file = recheck.sha256_file = hashing
    receipt._same_names = names
    recalled = receipt.recall(Request(Builder().op())) is not None
    by_receipt = bool(looked)
    made, _ = loader.obtain(Request(Builder().op(), BUILD))
    files = [each for each in hashed if isinstance(each, str)]
    print(json.dumps([recalled, by_receipt, files, made.compiled, made.origin]))
"""


# For the code to be run while a directory is being changed.
CHANGING = """
    import pathlib
    from opkiln import digest
    digest._SETTLED_NS = 60_000_000_000  # what changed a minute ago counts as being changed
    pathlib.Path({path!r}).touch()
    pathlib.Path({path!r}).unlink()
"""


def _load(tree: Tree, before: str = "") -> tuple[bool, bool, list[str], int]:
    """(whether a receipt served, whether it had to look up names, the files hashed besides the
    library, the number of compiles) of a fresh process."""
    recalled, looked, hashed, compiled, origin = json.loads(tree.run(before + LOAD, "warm"))
    assert (origin == "built") == bool(compiled)
    return recalled, looked, [each for each in hashed if not each.endswith("small.so")], compiled


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
    receipt = json.loads(kept.read_text())
    listed = {*receipt["directories"], *filter(os.path.isdir, receipt["files"])}
    return [Path(each) for each in sorted(listed) if each.startswith(str(tree.path))]


def test_a_file_that_nobody_reads_costs_one_look_in_each_watched_directory(tree: Tree) -> None:
    assert _load(tree)[3] == 1
    tree.settle()
    assert _load(tree) == (True, False, [], 0)
    watched = _watched(tree)
    names = {str(each.relative_to(tree.path)) for each in watched}
    assert {".", "first", "inc", "pkg"} <= names  # "." lacks the directory "missing"
    for directory in watched:
        (directory / "notes.txt").touch()
    tree.settle()
    assert _load(tree) == (True, True, [], 0)  # the names are looked up, and nothing is hashed
    assert _load(tree) == (True, False, [], 0)  # the receipt was renewed


def test_a_package_that_is_installed_beside_an_op_costs_one_look(tree: Tree) -> None:
    assert _load(tree)[3] == 1
    tree.write("other/__init__.py", "")
    tree.write("other/include/n.h", "#define N 2\n")  # on nobody's search path
    tree.write("other-1.0.dist-info/RECORD", "other/__init__.py,,\n")
    tree.settle()
    assert _load(tree) == (True, True, [], 0)
    assert _load(tree) == (True, False, [], 0)


def test_a_name_that_was_looked_for_in_vain_is_noticed_when_it_appears(tree: Tree) -> None:
    assert tree.answer("warm")[0] == 1
    tree.write("missing/include/n.h", "#define N 2\n")
    tree.settle()
    assert tree.answer("warm")[0] == 2
    tree.write("first/n.h", "#define N 3\n")
    tree.settle()
    assert tree.answer("warm")[0] == 3


def test_a_receipt_is_not_renewed_while_a_directory_is_being_changed(tree: Tree) -> None:
    """A name could appear in the same tick of the clock."""
    assert _load(tree)[3] == 1
    changing = CHANGING.format(path=str(tree.path / "inc/notes.txt"))
    for _ in range(2):
        assert _load(tree, changing)[:2] == (True, True)


@pytest.mark.timed
def test_a_program_that_is_installed_beside_the_compiler_costs_one_look(
    tree: Tree, tmp_path: Path
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    tree.environment["PATH"] = f"{programs}:{os.environ['PATH']}"
    at_rest.wait(programs)
    assert _load(tree)[3] == 1
    (programs / "another").touch(mode=0o755)
    at_rest.wait(programs)
    (kept,) = (tree.path.parent / "warm").glob("v1/receipts/*/*/*.json")
    written = [kept.stat().st_mtime_ns]
    for _ in range(2):
        assert _load(tree) == (True, False, [], 0)
        written.append(kept.stat().st_mtime_ns)
    assert written[0] < written[1] == written[2]


def test_a_touched_source_is_hashed_once(tree: Tree) -> None:
    assert _load(tree)[3] == 1
    source = tree.path / "pkg/a.cpp"
    os.utime(source)
    tree.settle()
    assert _load(tree) == (True, False, [str(source)], 0)
    assert _load(tree) == (True, False, [], 0)


def test_a_file_beside_the_compilers_parts_costs_a_look_at_those_files(tree: Tree) -> None:
    """Not at all headers and programs."""
    parts = install_gcc(tree)
    tree.settle()
    assert _load(tree)[3] == 1
    tree.settle()
    assert _load(tree) == (True, False, [], 0)
    (parts / "notes.txt").touch()
    tree.settle()
    recalled, _, hashed, compiled = _load(tree)
    assert (recalled, compiled) == (False, 0)
    assert {os.path.realpath(os.path.dirname(each)) for each in hashed} <= {str(parts)}
    assert not {"cc1plus", "collect2"} & set(map(os.path.basename, hashed))
    assert _load(tree) == (True, False, [], 0)


def test_a_read_only_cache_serves_without_renewing(tree: Tree) -> None:
    assert _load(tree)[3] == 1
    cache = tree.path.parent / "warm"
    (tree.path / "inc/notes.txt").touch()
    tree.settle()
    script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    prefix = ["unshare", "--mount", "sh", "-c", script, str(cache)]
    tried = subprocess.run([*prefix, "true"], capture_output=True, check=False)
    if tried.returncode != 0:
        pytest.skip("nothing can be mounted here")
    for _ in range(2):
        found = json.loads(tree.run(LOAD, "warm", prefix))
        assert found[:2] == [True, True]
        assert found[3] == 0
