"""The check of an entry's dependencies on a hit: which files count, by what, and what is noted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sample.signed_files import at_rest, just_saved, sha256

from opkiln import evidence
from opkiln.digest import key, signed
from opkiln.model import OUTSIDE
from opkiln.store import recheck

if TYPE_CHECKING:
    from opkiln.evidence import Evidence

pytestmark = pytest.mark.timed

NAMES = ("a.h", "b.h", "sub/c.h", "sub/d.h", "../far.h")


class Tree:
    """A source, a watched directory and a system, and what an entry recorded of them."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.source = self.write("src/a.cpp")
        self.outside = self.write("opt/outside.h")
        self.include = base / "src" / "include"
        self.write("src/include/a.h")
        self.write("src/include/sub/c.h")
        self.header = self.write("usr/include/vector")
        self.usr = base / "usr" / "include"
        self.places = {"src": str(base / "src"), "abs": "", OUTSIDE: ""}
        self.sidecar_reads = 0
        self.recorded = self.record()
        self.name = self.name_of()

    def write(self, name: str) -> Path:
        path = self.base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"// {name}")
        return path

    def external(self) -> list[tuple[str, str]]:
        def digest(path: Path) -> str:
            return sha256(path) if path.exists() else "gone"

        return [
            (str(self.header), digest(self.header)),
            (f"{self.usr}/", recheck.listing(recheck.Names(NAMES).present(str(self.usr)))),
        ]

    def watches(self) -> list[tuple[str, str, tuple[str, ...]]]:
        return [("src", "include", recheck.Names(NAMES).present(str(self.include)))]

    def record(self) -> dict[str, Any]:
        self.lists = {"names": list(NAMES), "external": [list(each) for each in self.external()]}
        return {
            "own": [
                ["src", "a.cpp", sha256(self.source), *at_rest(self.source)],
                [OUTSIDE, str(self.outside), sha256(self.outside), *at_rest(self.outside)],
            ],
            "watches": [list(each) for each in self.watches()],
            "dirs": [["src", "include", *at_rest(self.include)]],
            "external": key("external", tuple(self.external())),
            "external_dirs": [[str(self.usr), *at_rest(self.usr)]],
        }

    def name_of(self) -> str:
        """The name of an entry that is built from the files as they are now."""
        own = [("src", "a.cpp", sha256(self.source)),
               (OUTSIDE, str(self.outside), self.recorded["own"][1][2])]  # fmt: skip
        return recheck.deps_key(own, key("external", tuple(self.external())), self.watches())

    def check(self, *, external: bool = True) -> tuple[str, list[str]]:
        def sidecar() -> dict[str, Any]:
            self.sidecar_reads += 1
            return self.lists

        return recheck.recheck(
            self.recorded, self.places, recheck.Hasher(), sidecar, external=external
        )

    def noted(self, *, external: bool = True) -> Evidence:
        with evidence.collecting() as read:
            self.check(external=external)
        assert read.complete
        return read


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_untouched_files_prove_the_entrys_name_without_the_long_lists(tree: Tree) -> None:
    assert tree.check() == (tree.name, [])
    assert tree.sidecar_reads == 0


def test_names_are_those_of_the_stores_that_exist() -> None:
    """Another name for the same files would lose every entry."""
    own = [("src", "a.cpp", "0" * 64)]
    assert recheck.deps_key(own, "e", [("src", "include", ("a.h",))]) == DEPS_KEY
    assert recheck.listing(recheck.Names(NAMES).present("/nowhere")) == LISTING
    assert recheck.choice(["/usr/bin/g++"]) == CHOICE


DEPS_KEY = "a707d5231104cefaae1f3aea6a9a4c20de7a075d"
LISTING = "6d9247720631deff5131817942693406ba84dbde"
CHOICE = "67d50925cbe34382592f8b0cb9ebae32a2ad8c8b"


# Which names exist


def test_present_names_are_those_that_exist_to_their_last_part(tree: Tree) -> None:
    tree.write("src/far.h")
    (tree.include / "b.h").symlink_to("/nowhere")  # which no compiler can open
    assert recheck.Names(NAMES).present(str(tree.include)) == ("a.h", "sub/c.h", "../far.h")
    (tree.base / "src" / "far.h").unlink()
    assert recheck.Names(NAMES).present(str(tree.include)) == ("a.h", "sub/c.h")


def test_directory_by_the_name_of_a_header_is_told_from_a_file(tree: Tree) -> None:
    (tree.include / "b.h").mkdir()
    (tree.include / "sub" / "d.h").mkdir()
    assert recheck.Names(NAMES).present(str(tree.include)) == ("a.h", "b.h/", "sub/c.h", "sub/d.h/")
    (tree.include / "b.h").rmdir()
    (tree.include / "b.h").symlink_to("sub")
    assert recheck.Names(NAMES).present(str(tree.include)) == ("a.h", "b.h/", "sub/c.h", "sub/d.h/")
    (tree.include / "b.h").unlink()
    (tree.include / "b.h").symlink_to("a.h")
    assert recheck.Names(NAMES).present(str(tree.include))[:2] == ("a.h", "b.h")


def test_nothing_is_present_below_what_is_not_a_directory(tree: Tree) -> None:
    assert recheck.Names(NAMES).present(str(tree.base / "nowhere")) == ()
    assert recheck.Names(NAMES).present(str(tree.source)) == ()


def test_names_in_a_directory_that_cannot_be_listed_are_looked_up_one_by_one(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(path)

    (tree.include / "b.h").mkdir()
    monkeypatch.setattr(os, "scandir", refuse)
    assert recheck.Names(NAMES).present(str(tree.include)) == ("a.h", "b.h/", "sub/c.h")


# What has changed


def test_every_change_is_told_and_the_key_is_that_of_the_files_as_they_are(tree: Tree) -> None:
    tree.source.write_text("// edited")
    tree.write("src/include/b.h")
    tree.header.write_text("// upgraded")
    tree.write("usr/include/new")
    name, changed = tree.check()
    assert changed == [
        "a.cpp changed", "include/b.h is new on the include path", f"{tree.header} changed",
    ]  # fmt: skip
    assert name == tree.name_of()
    assert name != tree.name


def test_new_name_in_a_directory_of_the_system_is_told(tree: Tree) -> None:
    tree.write("usr/include/b.h")
    name, changed = tree.check()
    assert changed == [f"{tree.usr}/ changed"]
    assert name == tree.name_of()
    assert name != tree.name


def test_header_of_the_system_that_is_gone_is_told(tree: Tree) -> None:
    tree.header.unlink()
    name, changed = tree.check()
    assert changed == [f"{tree.header} changed"]
    assert name != tree.name


def test_header_of_the_system_is_left_alone_where_there_is_no_compiler(tree: Tree) -> None:
    tree.header.unlink()
    assert tree.check(external=False) == (tree.name, [])
    assert tree.sidecar_reads == 0


def test_watched_directory_that_is_gone_changes_the_key(tree: Tree) -> None:
    (tree.include / "a.h").unlink()
    (tree.include / "sub/c.h").unlink()
    (tree.include / "sub").rmdir()
    tree.include.rmdir()
    assert tree.check()[0] != tree.name


def test_own_file_that_is_gone_is_told_and_one_that_cannot_be_read_is_an_error(
    tree: Tree,
) -> None:
    tree.recorded["own"][0][1] = "include/gone.h"
    name, changed = tree.check()
    assert changed == ["include/gone.h is gone"]
    assert name != tree.name
    tree.recorded["own"][0][1] = "a.cpp/below.h"
    with pytest.raises(NotADirectoryError):
        tree.check()


def test_header_outside_of_a_shipped_package_counts_only_where_it_is_there(tree: Tree) -> None:
    tree.outside.write_text("// another")
    assert tree.check()[1] == [f"{tree.outside} changed"]
    tree.outside.unlink()
    assert tree.check() == (tree.name, [])
    tree.recorded["own"][1][1] = f"{tree.source}/below.h"
    assert tree.check()[1] == []


def test_signature_that_does_not_hold_is_settled_by_the_contents(tree: Tree) -> None:
    os.utime(tree.source, (1, 1))
    os.utime(tree.include, (1, 1))
    os.utime(tree.usr, (1, 1))
    assert tree.check() == (tree.name, [])
    tree.recorded = tree.record()
    tree.recorded["own"][0][3:] = just_saved(tree.source)
    assert tree.check() == (tree.name, [])


def test_file_is_read_once_for_all_entries_of_a_look_up(tree: Tree) -> None:
    hasher = recheck.Hasher()
    first = hasher(str(tree.source))
    assert first[0] == sha256(tree.source)
    tree.source.write_text("// edited meanwhile")
    assert hasher(str(tree.source)) == first
    assert recheck.Hasher()(str(tree.source)) != first


# Programs that a script chose from PATH


class Choice:
    """Three directories on PATH. A build's script looked for ``cc`` and took that of the second."""

    def __init__(self, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tree = tree
        self.directories = [tree.base / name for name in ("first", "second", "third")]
        for directory in self.directories:
            directory.mkdir()
        monkeypatch.setenv("PATH", ":".join(map(str, self.directories)))
        self.chosen = self.install(1)
        tree.recorded["chosen"] = [["cc", [self.chosen]]]
        tree.lists["external"].append(["PATH:cc", recheck.choice([self.chosen])])
        tree.recorded["external"] = key("external", tuple(map(tuple, tree.lists["external"])))
        self.name = self.name_with(self.chosen)

    def install(self, place: int) -> str:
        path = self.directories[place] / "cc"
        path.touch(0o755)
        return str(path)

    def name_with(self, program: str) -> str:
        """The name of an entry that is built by this program."""
        external = (*self.tree.external(), ("PATH:cc", recheck.choice([program])))
        own = [tuple(each[:3]) for each in self.tree.recorded["own"]]
        return recheck.deps_key(own, key("external", external), self.tree.watches())


@pytest.fixture
def choice(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> Choice:
    return Choice(tree, monkeypatch)


def test_program_that_path_still_leads_to_needs_no_long_lists(choice: Choice) -> None:
    choice.install(2)  # behind it
    assert choice.tree.check() == (choice.name, [])
    assert choice.tree.sidecar_reads == 0
    assert choice.tree.noted().entry_programs == {"cc": [choice.chosen]}


def test_program_in_front_of_the_chosen_one_is_told(choice: Choice) -> None:
    front = choice.install(0)
    name, changed = choice.tree.check()
    assert changed == ["PATH:cc changed"]
    assert name == choice.name_with(front)
    assert name != choice.name


def test_program_is_compared_by_its_place_where_the_system_was_touched(choice: Choice) -> None:
    os.utime(choice.tree.usr, (1, 1))
    assert choice.tree.check() == (choice.name, [])
    assert choice.tree.sidecar_reads == 1


# What is noted for a receipt


def test_what_held_is_noted_with_the_signatures_of_the_entry(tree: Tree) -> None:
    read = tree.noted()
    own, outside = tree.recorded["own"]
    assert read.entry_files == {
        str(tree.source): [*own[3:], own[2]],
        str(tree.outside): [*outside[3:], outside[2]],
        str(tree.usr): [*tree.recorded["external_dirs"][0][1:], ""],
    }
    assert read.directories == {str(tree.include): tree.recorded["dirs"][0][2:]}
    assert read.watches == [[str(tree.include), ["a.h", "sub/c.h"]]]


def test_what_did_not_hold_is_noted_with_its_signature_of_now(tree: Tree) -> None:
    for path in (tree.source, tree.include, tree.usr):
        os.utime(path, (1, 1))
    read = tree.noted()
    assert read.entry_files[str(tree.source)][:4] == signed((str(tree.source),))
    assert read.entry_files[str(tree.source)][5] == sha256(tree.source)
    assert read.entry_files[str(tree.usr)][:4] == signed((str(tree.usr),))
    assert read.directories[str(tree.include)][:4] == signed((str(tree.include),))


def test_one_directory_that_was_touched_has_all_of_the_authors_looked_up_again(
    tree: Tree,
) -> None:
    tree.recorded["dirs"].append(["src", "", *at_rest(tree.base / "src")])
    os.utime(tree.base / "src", (1, 1))
    read = tree.noted()
    then = tree.recorded["dirs"][0][2:]
    assert read.directories[str(tree.include)][:4] == then[:4]
    assert read.directories[str(tree.include)][4] != then[4], "it was read again"


def test_directory_of_the_system_that_was_touched_is_the_only_one_that_is_looked_at_again(
    tree: Tree,
) -> None:
    more = tree.write("usr/share/more")
    tree.recorded["external_dirs"].append([str(more.parent), *at_rest(more.parent)])
    tree.lists["external"].append([str(more), sha256(more)])
    files = tuple((path, sha) for path, sha in tree.lists["external"])
    tree.recorded["external"] = key("external", files)
    name = tree.check()[0]
    os.utime(more.parent, (1, 1))
    tree.header.write_text("// in place")  # which its directory does not show
    assert tree.check() == (name, [])
    read = tree.noted()
    assert read.entry_files[str(tree.usr)][:5] == tree.recorded["external_dirs"][0][1:6]
    assert read.entry_files[str(more.parent)][:4] == signed((str(more.parent),))[:4]
    more.write_text("// replaced")
    assert tree.check()[1] == [f"{more} changed"]


def test_file_of_the_system_with_a_signature_of_its_own_is_looked_at_by_that(tree: Tree) -> None:
    tree.recorded["external_dirs"].append([str(tree.header), *at_rest(tree.header)])
    assert tree.check() == (tree.name, [])
    tree.header.write_text("// in place")
    assert tree.check()[1] == [f"{tree.header} changed"]


def test_system_is_not_noted_where_there_is_no_compiler(tree: Tree) -> None:
    assert str(tree.usr) not in tree.noted(external=False).entry_files


def test_each_entry_is_noted_apart(tree: Tree) -> None:
    with evidence.collecting() as read:
        tree.check()
        tree.recorded["own"] = tree.recorded["own"][:1]
        tree.recorded["watches"] = []
        tree.check()
    assert str(tree.outside) not in read.entry_files
    assert read.watches == []
