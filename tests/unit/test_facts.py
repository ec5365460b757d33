"""Facts of a build: which changes break which of them, and what is kept of them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as limits
from hypothesis import strategies as st
from sample import at_rest
from sample.signed_files import sha256

from opkiln.base import digest
from opkiln.base.digest import Signature, UnusableFile, current_signatures
from opkiln.base.model import OUTSIDE
from opkiln.machine import facts
from opkiln.machine.facts import ABSENT, CHOICE, DIRECTORY, FILE, LINK, LISTING, PROGRAM, Hasher
from opkiln.store import key
from opkiln.store.key import Fact

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.timed

KINDS = (FILE, PROGRAM, DIRECTORY, LISTING, LINK, ABSENT, CHOICE)
ANCHORS = ("src", "opkiln", "torch", "python", "wheels", "abs", OUTSIDE)
ABSENT_NAMES = ("new.h", "sub/new.h")


class Place:
    """A directory with a subject for each kind of fact, and the facts."""

    def __init__(self, base: Path, anchor: str = "src") -> None:
        base.mkdir(parents=True)
        self.base = base
        self.real = self.write("real.h", "int a;")
        self.link = base / "link.h"
        self.link.symlink_to("real.h")
        self.program = self.write("libexec/cc1", "a program", 0o755)
        self.directory = base / "directory"
        self.one = self.write("directory/one.h")
        self.path = [base / name for name in ("none", "first", "second", "third")]
        for each in self.path:
            each.mkdir()
        self.chosen = self.write("second/cc", "#!/bin/sh", 0o755)
        below = anchor not in ("abs", OUTSIDE)
        self.anchor, self._above = anchor, f"{base}/" if below else ""
        self.places = {anchor: str(base) if below else ""}

    def write(self, name: str, text: str = "", mode: int = 0o644) -> Path:
        path = self.base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
        return path

    def gather(self) -> list[Fact]:
        return [self.fact(kind) for kind in KINDS]

    def fact(self, kind: str) -> Fact:
        if kind == CHOICE:
            return Fact(CHOICE, "path", "cc", str(self.chosen), facts.UNSIGNED)
        subject = {FILE: self.link, LINK: self.link, PROGRAM: self.program}
        path = str(subject.get(kind, self.directory))
        signature = facts.signature_of(kind, path)
        then = facts.join_names(ABSENT_NAMES) if kind == ABSENT else ""
        value = facts.value(kind, path, then, Hasher())
        return Fact(kind, self.anchor, path.removeprefix(self._above), value, signature)

    def broken(self, known: list[Fact]) -> set[str]:
        """The kinds of the facts that do not hold."""
        return {fact.kind for fact in known if key.find_broken([fact], self.places, Hasher())}


def edit(path: Path) -> None:
    """Other bytes, as many, in the same file, under the same times."""
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"X")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path: Path, by: Callable[[Path], object] = Path.touch) -> None:
    """Put another thing where a file, link or directory is."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    by(path)


def exchange(path: Path) -> None:
    """A new file under the name, with the same times: other bytes, as many."""
    before, text = path.stat(), path.read_text()
    replace(path, lambda path: path.write_text(text.upper()))
    path.chmod(before.st_mode)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def copied(path: Path) -> None:
    """The same bytes in a new file."""
    shutil.copy2(path, path.with_suffix(".copy"))
    os.replace(path.with_suffix(".copy"), path)


def lead(link: Path, text: str | Path) -> None:
    replace(link, lambda path: path.symlink_to(text))


def made_again(directory: Path) -> None:
    names = os.listdir(directory)
    replace(directory, Path.mkdir)
    for name in names:
        (directory / name).touch()


def touch_all(at: Place) -> None:
    for path in (at.base, *at.base.rglob("*")):
        os.utime(path, (1, 1))


def set_path(*directories: Path) -> None:
    os.environ["PATH"] = ":".join(map(str, directories))


# What is done -> the kinds that are broken by it.
CHANGES: dict[str, tuple[Callable[[Place], object], set[str]]] = {
    "nothing": (lambda at: None, set()),
    "everything is touched": (touch_all, set()),
    "the same bytes are saved": (lambda at: at.real.write_bytes(at.real.read_bytes()), set()),
    "a copy replaces the file": (lambda at: copied(at.real), set()),
    "the file may be run": (lambda at: at.real.chmod(0o755), set()),
    "the file is edited in place": (lambda at: edit(at.real), {FILE}),
    "the file is exchanged": (lambda at: exchange(at.real), {FILE}),
    "the file is removed": (lambda at: at.real.unlink(), {FILE}),
    "the file is a directory": (lambda at: replace(at.real, Path.mkdir), {FILE}),
    "the link leads elsewhere": (lambda at: lead(at.link, at.one), {FILE, LINK}),
    "the link leads to an equal file": (
        lambda at: lead(at.link, shutil.copy2(at.real, at.base / "equal.h")), {LINK},
    ),
    "the link leads there by another way": (lambda at: lead(at.link, at.real), {LINK}),
    "the link is made again": (lambda at: lead(at.link, "real.h"), set()),
    "the link is removed": (lambda at: at.link.unlink(), {FILE, LINK}),
    "a file replaces the link": (lambda at: copied(at.link), {LINK}),
    "a directory replaces the link": (lambda at: replace(at.link, Path.mkdir), {FILE, LINK}),
    "a copy replaces the program": (lambda at: copied(at.program), set()),
    "the program is edited in place": (lambda at: edit(at.program), {PROGRAM}),
    "the program is exchanged": (lambda at: exchange(at.program), {PROGRAM}),
    "the program may not be run": (lambda at: at.program.chmod(0o644), {PROGRAM}),
    "the program is removed": (lambda at: at.program.unlink(), {PROGRAM}),
    "its directory is removed": (lambda at: shutil.rmtree(at.program.parent), {PROGRAM}),
    "its directory is a file": (lambda at: replace(at.program.parent), {PROGRAM}),
    "a listed file is edited": (lambda at: at.one.write_text("// edited"), set()),
    "a listed directory is made again": (lambda at: made_again(at.directory), set()),
    "a name is added": (lambda at: at.write("directory/two.h"), {LISTING}),
    "a name is removed": (lambda at: at.one.unlink(), {LISTING}),
    "a name is another": (lambda at: at.one.rename(at.directory / "two.h"), {LISTING}),
    "the directory is removed": (lambda at: shutil.rmtree(at.directory), {DIRECTORY, LISTING}),
    "the directory is a file": (lambda at: replace(at.directory), {DIRECTORY, LISTING}),
    "an absent file is made": (lambda at: at.write("directory/new.h"), {ABSENT, LISTING}),
    "an absent file is a directory": (
        lambda at: (at.directory / "new.h").mkdir(), {ABSENT, LISTING},
    ),
    "an absent file is a link": (
        lambda at: (at.directory / "new.h").symlink_to(at.real), {ABSENT, LISTING},
    ),
    "an absent file is a link to nothing": (
        lambda at: (at.directory / "new.h").symlink_to("nothing"), {LISTING},
    ),
    "an absent file is made below": (lambda at: at.write("directory/sub/new.h"), {ABSENT, LISTING}),
    "only its directory is made": (lambda at: (at.directory / "sub").mkdir(), {LISTING}),
    "a program is in front": (lambda at: at.write("first/cc", "", 0o755), {CHOICE}),
    "a file is in front": (lambda at: at.write("first/cc", "", 0o644), set()),
    "a directory is in front": (lambda at: (at.path[0] / "cc").mkdir(), set()),
    "a program is behind": (lambda at: at.write("third/cc", "", 0o755), set()),
    "the chosen one may not be run": (lambda at: at.chosen.chmod(0o644), {CHOICE}),
    "the chosen one is gone": (lambda at: at.chosen.unlink(), {CHOICE}),
    "the chosen one is in another place": (
        lambda at: at.chosen.rename(at.path[1] / "cc"), {CHOICE},
    ),
    "PATH has another beginning": (lambda at: set_path(at.base, *at.path), set()),
    "PATH lacks the place": (lambda at: set_path(at.path[1], at.path[3]), {CHOICE}),
}  # fmt: skip
HARMLESS = [name for name, (_, kinds) in CHANGES.items() if not kinds]


@pytest.fixture(params=["at rest", "just saved", "known by contents"])
def time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """When files are read: long after they were saved, right after that, or where times do not
    count."""
    monkeypatch.setenv("PATH", "")  # restored afterwards
    if request.param == "at rest":
        at_rest.shorten(monkeypatch)
    elif request.param == "just saved":
        monkeypatch.setattr(digest, "_SETTLED_NS", 60_000_000_000)
    else:
        monkeypatch.setattr(digest, "change_mark", lambda path, found: None)
    return str(request.param)


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    made = Place(tmp_path / "at")
    monkeypatch.setenv("PATH", ":".join(map(str, made.path)))
    return made


def gathered(at: Place, time: str) -> list[Fact]:
    set_path(*at.path)
    if time == "at rest":
        at_rest.wait(at.base)
    known = at.gather()
    signatures = {fact.signature for fact in known} - {facts.UNSIGNED}
    assert {each.settled for each in signatures} == {time == "at rest"}
    return known


@pytest.mark.parametrize("name", CHANGES)
def test_change_breaks_the_facts_that_it_is_about_and_no_others(
    name: str, time: str, tmp_path: Path
) -> None:
    at = Place(tmp_path / "at")
    known = gathered(at, time)
    change, kinds = CHANGES[name]
    change(at)
    assert at.broken(known) == kinds


@limits(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    anchor=st.sampled_from(ANCHORS),
    before=st.lists(st.sampled_from(HARMLESS), max_size=4, unique=True),
    last=st.sampled_from(list(CHANGES)),
)
def test_change_is_noticed_wherever_it_is_and_whatever_was_done_before(
    anchor: str, before: list[str], last: str, time: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    at = Place(tmp_path_factory.mktemp("place") / anchor, anchor)
    known = gathered(at, time)
    for name in dict.fromkeys((*before, last)):
        CHANGES[name][0](at)
    assert at.broken(known) == CHANGES[last][1]


@pytest.mark.parametrize(
    "name", ["an absent file is a link to nothing", "only its directory is made"]
)
def test_what_is_missing_behind_a_link_or_in_a_new_directory_is_asked_for_each_time(
    name: str, at: Place
) -> None:
    """The directory's own ``stat`` would not show that it is there."""
    known = [each for each in at.gather() if each.kind == ABSENT]
    CHANGES[name][0](at)
    with facts.collect() as read:
        assert key.find_broken(known, at.places, Hasher()) == []
    assert {signature for *_, signature in read.entry} == {facts.UNSIGNED}


@pytest.mark.parametrize(("name", "is_signed"), [
    ("new", True), ("new/a.h", True), ("sub/a.h", False), ("sub/new/a.h", False), ("link", False),
])  # fmt: skip
def test_directory_shows_what_is_missing_unless_that_may_appear_behind_a_name_in_it(
    name: str, is_signed: bool, tmp_path: Path
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    found = facts.signature_of(ABSENT, str(tmp_path), facts.join_names(["other", name]))
    expected = Signature.of(str(tmp_path)) if is_signed else facts.UNSIGNED
    assert found[:-1] == expected[:-1]


def test_what_is_no_link_has_no_text_of_one(tmp_path: Path) -> None:
    assert facts.value(LINK, str(tmp_path), "", Hasher()) == ""
    assert facts.value(LINK, str(tmp_path / "gone"), "", Hasher()) == facts.GONE


def test_two_steps_that_knew_a_file_otherwise_are_an_error_that_names_both() -> None:
    assert (
        facts.merge_values(CHOICE, "a\0b", "a") == facts.merge_values(CHOICE, "a", "a\0b") == "a\0b"
    )
    with pytest.raises(ValueError, match=f"{FILE}: 'one' and 'other'"):
        facts.merge_values(FILE, "one", "other")


def test_changes_are_told_in_words(at: Place) -> None:
    known = at.gather()
    replace(at.link)
    at.program.unlink()
    at.write("directory/new.h")
    at.write("directory/sub/new.h")
    assert key.find_broken(known, at.places, Hasher()) == [
        "link.h changed", "libexec/cc1 is gone", "directory changed", "link.h changed",
        f"{at.directory}/new.h is new", f"{at.directory}/sub/new.h is new",
    ]  # fmt: skip


def test_link_may_have_any_text_and_be_the_package_itself(tmp_path: Path) -> None:
    for text in ("gone", "directory", "*", "new\nline", os.fsdecode(b"\xff")):
        (tmp_path / text).mkdir()
        link = tmp_path / "package"
        link.symlink_to(text)
        fact = Fact(LINK, "src", "", os.readlink(link), facts.UNSIGNED)
        places = {"src": str(link)}
        assert key.find_broken([fact], places, Hasher()) == []
        link.unlink()
        assert len(key.find_broken([fact], places, Hasher())) == 1


def test_file_that_this_process_has_read_is_read_again_when_it_may_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = tmp_path / "a.h", []

    def counted(path: str) -> str:
        read.append(path)
        return digest.sha256_file(path)

    def reads() -> int:
        """How often the file was read to tell its contents."""
        read.clear()
        assert Hasher()(str(path))[0] == digest.sha256_file(str(path))
        return len(read)

    monkeypatch.setattr(facts, "sha256_file", counted)
    path.write_text("one")
    assert [reads() for _ in range(2)] == [1, 1]  # it was written a moment ago
    at_rest.shorten(monkeypatch)
    at_rest.wait(path)
    assert [reads() for _ in range(3)] == [1, 0, 0]
    before = path.stat()
    path.write_text("two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    at_rest.wait(path)
    assert [reads() for _ in range(2)] == [1, 0]


def test_pipe_in_place_of_a_file_is_an_error_and_not_waited_for(at: Place) -> None:
    known = [at.fact(FILE)]
    replace(at.real, os.mkfifo)
    with pytest.raises(UnusableFile):
        key.find_broken(known, at.places, Hasher())


def test_file_whose_signature_holds_is_not_read(at: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> str:
        raise AssertionError(path)

    at_rest.shorten(monkeypatch)
    at_rest.wait(at.base)
    known = [at.fact(FILE), at.fact(PROGRAM), at.fact(LISTING), at.fact(ABSENT)]
    monkeypatch.setattr(os, "listdir", refuse)
    monkeypatch.setattr(os.path, "exists", refuse)
    assert key.find_broken(known, at.places, Hasher(refuse)) == []


def test_file_is_read_once_for_all_entries_of_a_look_up(at: Place) -> None:
    hasher = Hasher()
    first = hasher(str(at.real))
    assert first == (sha256(at.real), first[1])
    at.real.write_text("// edited meanwhile")
    assert hasher(str(at.real)) == first
    assert Hasher()(str(at.real)) != first


def test_package_that_was_moved_is_the_same(at: Place) -> None:
    known = at.gather()
    at.base.rename(at.base.with_name("elsewhere"))
    os.environ["PATH"] = os.environ["PATH"].replace(str(at.base), f"{at.base.parent}/elsewhere")
    moved = {"src": f"{at.base.parent}/elsewhere"}
    assert key.find_broken(known[:-1], moved, Hasher()) == []
    assert len(key.find_broken(known[-1:], moved, Hasher())) == 1, "of a program, the path counts"


# What is noted for a receipt


def test_what_holds_is_noted_with_the_signature_that_it_has_now(at: Place) -> None:
    known = at.gather()
    os.utime(at.real, (1, 1))
    at.program.unlink()
    with facts.collect() as read:
        key.find_broken(known, at.places, Hasher())
    noted = {kind: (path, value, signature) for kind, path, value, signature in read.entry}
    assert set(noted) == {*KINDS} - {PROGRAM}
    assert noted[FILE][:2] == (str(at.link), sha256(at.real))
    assert list(noted[FILE][2][:4]) == current_signatures([str(at.link)])
    assert noted[LINK] == (str(at.link), "real.h", facts.UNSIGNED)
    assert noted[CHOICE] == ("cc", str(at.chosen), facts.UNSIGNED)


def test_each_entry_is_noted_apart(at: Place) -> None:
    rows = key.rows(at.gather())
    manifest = key.manifest_facts(at.gather())
    with facts.collect() as read:
        key.find_changes(manifest, rows, at.places, Hasher())
        key.find_changes(manifest, rows[:1], at.places, Hasher())
        assert [kind for kind, *_ in read.entry] == [FILE]
        key.find_changes({**manifest, "own": [["src", "real.h", sha256(at.real)]]}, None, at.places,
                      Hasher())  # fmt: skip
        assert [each[:3] for each in read.entry] == [(FILE, str(at.real), sha256(at.real))]


# Without a compiler: the author's files


def test_without_facts_the_authors_files_count_alone(at: Place) -> None:
    manifest = key.manifest_facts(at.gather())
    assert {path for _, path, _ in manifest["own"]} == {"link.h", "libexec/cc1"}
    shutil.rmtree(at.directory)
    os.environ["PATH"] = ""
    at.program.chmod(0o644)
    assert key.find_changes(manifest, None, at.places, Hasher()) == []
    at.real.write_text("// edited")
    at.program.unlink()
    assert key.find_changes(manifest, None, at.places, Hasher()) == [
        "link.h changed", "libexec/cc1 is gone",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["gone.h", "real.h/gone.h"])
def test_header_outside_of_a_package_counts_only_where_it_is_there(at: Place, name: str) -> None:
    def changes(anchor: str, *names: str) -> list[str]:
        own = [[anchor, str(at.base / name), "0" * 64] for name in names]
        return key.find_changes({"own": own}, None, {"src": "", OUTSIDE: ""}, Hasher())

    assert changes(OUTSIDE, "real.h") == [f"{at.real} changed"]
    assert changes(OUTSIDE, name) == []
    assert changes(OUTSIDE, name, "real.h") == [f"{at.real} changed"]
    if name == "gone.h":
        assert changes("src", name) == [f"{at.base}/gone.h is gone"]
    else:
        with pytest.raises(NotADirectoryError):
            changes("src", name)


# The record


VALUES = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3).map(
    facts.join_names
)
SIGNATURES = st.builds(Signature, *[st.integers()] * 5)
FACTS = st.builds(
    Fact, st.sampled_from(KINDS), st.sampled_from(ANCHORS), st.text(max_size=8), VALUES, SIGNATURES
)


def name_of(known: list[Fact]) -> str:
    return key.deps_key(json.loads(json.dumps(key.manifest_facts(known))))


@given(st.lists(FACTS, max_size=5, unique_by=lambda fact: fact[1:3]))
def test_facts_read_back_as_they_were_written(known: list[Fact]) -> None:
    again = key.read(json.loads(json.dumps(key.rows(known))))
    assert list(again) == known
    assert name_of(list(again)) == name_of(known)


@given(st.lists(FACTS, min_size=1, max_size=4, unique_by=lambda fact: fact[1:3]), st.data())
def test_name_of_an_entry_has_every_value_and_no_signature(
    known: list[Fact], data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(known) - 1))
    other = data.draw(SIGNATURES)
    changes: list[dict[str, Any]] = [{"value": known[place].value + "x"}, {"path": "another path"}]
    for change in changes:
        changed = [*known[:place], known[place]._replace(**change), *known[place + 1 :]]
        assert name_of(changed) != name_of(known)
    changed = [fact._replace(signature=other) for fact in known]
    assert name_of(changed) == name_of(known)
    assert name_of(known[:-1]) != name_of(known)


def test_program_of_the_author_counts_by_its_mode_too(at: Place) -> None:
    known = [at.fact(PROGRAM)]
    at.program.chmod(0o644)
    other = [at.fact(PROGRAM)]
    assert key.manifest_facts(known)["own"] == key.manifest_facts(other)["own"]
    assert name_of(known) != name_of(other)


def test_names_are_those_of_the_stores_that_exist() -> None:
    """Another name for the same facts would lose every entry."""
    known = [
        Fact(FILE, "src", "a.cpp", "0" * 64, facts.UNSIGNED),
        Fact(FILE, "abs", "/usr/include/vector", "1" * 64, facts.UNSIGNED),
        Fact(ABSENT, "src", "include", facts.join_names(["a.h", "b.h"]), facts.UNSIGNED),
    ]
    assert name_of(known) == "60eb4ac590876932e8709c3fa383c986780670b6"
    assert name_of([]) == "75df7e26477cf90d5c40af9e7640757ab530441e"


def test_what_a_decision_reads_is_collected_and_must_not_change_between_two_looks(
    at: Place, tmp_path: Path
) -> None:
    at.program.chmod(0o644)
    nowhere = str(tmp_path / "nowhere")
    with facts.collect() as read:
        facts.note_file(str(at.real))
        facts.note_file(str(at.one), (1, 2, 3, 4, 5))
        assert facts.exists(str(at.directory))
        assert not facts.exists(nowhere)
        assert not facts.is_program(str(at.program))
        assert facts.is_program(str(at.chosen))
        assert facts.list_directory(str(at.directory)) == ["one.h"]
        assert facts.list_directory(f"{nowhere}/below") == []
        facts.note_program("cc", "/first/cc")
        facts.note_program("cc", "/second/cc")
        facts.note_programs("ld", ["/first/ld"])
    assert read.complete
    assert set(read.files) == {str(path) for path in (at.real, at.one, at.directory, at.chosen)}
    assert read.files[str(at.real)][:-1] == tuple(Signature.of(str(at.real)))[:-1]
    assert read.files[str(at.one)] == (1, 2, 3, 4, 5)
    assert list(read.absent) == [nowhere, str(at.program), f"{nowhere}/below"]
    assert read.programs == {"cc": ["/first/cc"], "ld": ["/first/ld", None]}
    with facts.collect(read) as again:
        assert again is read
        facts.note_file(str(at.one), (1, 2, 3, 4, 6))
        assert read.complete, "the time of the look does not count"
        facts.note_file(str(at.one))
    assert not read.complete
    for note in (facts.note_incomplete, lambda: facts.note_file(nowhere)):
        with facts.collect() as read:
            note()
        assert not read.complete
        note()  # nobody collects


def test_directory_that_changes_while_it_is_listed_is_known_as_it_was(
    at: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    listdir, directory = os.listdir, str(at.directory)
    before = Signature.of(directory)

    def list_and_change(path: str) -> list[str]:
        names = listdir(path)
        os.utime(path, ns=(0, 0))
        return names

    monkeypatch.setattr(os, "listdir", list_and_change)
    with facts.collect() as read:
        facts.list_directory(directory)
    assert read.files[directory][:-1] == tuple(before)[:-1]
    assert read.files[directory][:-1] != tuple(Signature.of(directory))[:-1]


def test_facts_of_an_entry_are_those_of_the_last_one_that_was_looked_at(at: Place) -> None:
    signature = Signature.of(str(at.real))
    with facts.collect() as read:
        facts.note_entry(FILE, str(at.one), "a digest", signature)
        facts.start_entry()
        facts.note_entry(FILE, str(at.real), "another", signature)
    assert read.entry == [(FILE, str(at.real), "another", signature)]
