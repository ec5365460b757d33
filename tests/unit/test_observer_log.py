"""The observer's log: what it says, when it does not count, and the inputs that follow from it."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from opkiln.building import gather
from opkiln.building.observing import log
from opkiln.machine.facts import (
    ABSENT,
    CHOICE,
    DIRECTORY,
    FILE,
    LINK,
    LISTING,
    PROGRAM,
    split_names,
)

if TYPE_CHECKING:
    from pathlib import Path

BEGAN = "B 10 1 0 0 0.000000000 /usr/bin/g++"


def logged(*records: str) -> bytes:
    return b"".join(os.fsencode(record) + b"\0" for record in records)


def parsed(*records: str) -> log.Observation:
    """What a log says that begins with the start of g++, as process 10."""
    found = log.parse(logged(BEGAN, *records))
    assert found is not None
    return found


def test_log_names_what_was_read_looked_up_written_missed_and_started() -> None:
    identity = "7 8 9 1700000000.000000005"
    found = parsed(
        "S 11 11 0 0 0.000000000 cc1plus",
        "B 11 10 0 0 0.000000000 /usr/lib/cc1plus",
        f"L 11 {identity} /usr/lib/cc1plus",
        f"R 11 {identity} /src/a b\n.h",
        f"E 11 {identity} /opt/tool",
        "I 11 0 0 0 0.0 /opt",
        f"D 11 {identity} /opt/bin",
        f"P 11 {identity} /opt/link",
        "N 11 0 0 0 0.0 /src/none.h",
        "W 11 0 0 0 0.0 /stage/a.s",
        "A 11 0 0 0 0.0 /stage/kept",
    )
    file = (log.Identity(7, 8, 9, 1_700_000_000_000_000_005),)
    seen = {
        "read": {"/usr/lib/cc1plus": file, "/src/a b\n.h": file, "/opt/tool": file},
        "found": {"/usr/lib/cc1plus", "/opt/tool"},
        "loaded": {"/usr/lib/cc1plus"},
        "directories": {"/opt"},
        "listed": {"/opt/bin"},
        "led": {"/opt/link"},
        "extended": {"/stage/kept"},
        "written": {"/stage/a.s": (1,), "/stage/kept": (1,)},
        "made": {"/stage/a.s"},
        "absent": {"/src/none.h"},
        "started": [
            log.Started("/usr/bin/g++", "", -1),
            log.Started("/usr/lib/cc1plus", "cc1plus", 0),
        ],
        "passed": {("D", "/opt/bin"): file, ("P", "/opt/link"): file},
    }
    assert vars(found) == {**vars(log.Observation()), **seen}


def test_blank_parts_of_a_path_do_not_count_and_lists_of_directories_are_parted() -> None:
    found = parsed(
        "N 10 0 0 0 0.0 /usr//lib///x", "Q 10 0 0 0 0.0 /a:/b;:/c d", "O 10 0 0 0 0.0 z.so"
    )
    assert found.absent == {"/usr/lib/x"}
    assert found.searched == {"/a", "/b", "/c d"}
    assert found.libraries == {"z.so"}


def test_nothing_is_lost_of_a_log_that_says_nothing_of_it() -> None:
    assert parsed().lost == ""


def test_the_writers_of_a_file_are_in_the_order_of_their_last_writes() -> None:
    write = "W {} 0 0 0 0.0 /stage/a.o".format
    program = "B 11 10 0 0 0.0 /usr/bin/as"
    assert parsed(program, write(10), write(11)).written == {"/stage/a.o": (0, 1)}
    assert parsed(program, write(10), write(11), write(10)).written == {"/stage/a.o": (1, 0)}


def test_a_program_that_was_looked_up_and_then_written_is_no_input() -> None:
    found = parsed("E 10 7 8 9 1.0 /stage/a.out", "W 10 0 0 0 0.0 /stage/a.out")
    assert (found.read, found.found) == ({}, set())


def test_the_identity_of_a_link_is_that_of_its_target_unless_the_link_itself_is_asked_for(
    tmp_path: Path,
) -> None:
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "file").write_text("12345")
    link = str(tmp_path / "link")
    assert log.Identity.now(link) == log.Identity.now(str(tmp_path / "file"))
    assert log.Identity.now(link, follow=False).inode == os.lstat(link).st_ino


def test_a_directory_that_gets_a_name_after_it_was_listed_is_not_the_one_that_was(
    tmp_path: Path,
) -> None:
    seen = os.stat(tmp_path)
    whole, part = divmod(seen.st_ctime_ns, 1_000_000_000)
    identity = f"{seen.st_dev} {seen.st_ino} {seen.st_size} {whole}.{part:09d}"
    found = parsed(f"D 10 {identity} {tmp_path}")
    assert gather.identical(found, "/stage")
    (tmp_path / "new").mkdir()
    os.utime(tmp_path, (1, 1))
    assert not gather.identical(found, "/stage")


def test_a_link_that_was_followed_is_itself_what_must_stay_and_of_a_listed_one_its_directory(
    tmp_path: Path,
) -> None:
    (tmp_path / "target").mkdir()
    link = tmp_path / "link"
    link.symlink_to("target")

    def row(kind: str, path: Path, found: os.stat_result) -> str:
        whole, part = divmod(found.st_ctime_ns, 1_000_000_000)
        return f"{kind} 10 {found.st_dev} {found.st_ino} {found.st_size} {whole}.{part:09d} {path}"

    stage = tmp_path / "stage"
    of_the_stage = row("P", stage / "own", link.lstat())  # says nothing: it is the step's own
    listed = parsed(of_the_stage, row("D", link, link.stat()))
    followed = parsed(of_the_stage, row("P", link, link.lstat()))
    assert gather.identical(listed, str(stage))
    assert gather.identical(followed, str(stage))
    (tmp_path / "target/new").touch()
    assert not gather.identical(listed, str(stage))
    assert gather.identical(followed, str(stage))
    link.rename(tmp_path / "before")
    link.symlink_to("target")
    assert not gather.identical(followed, str(stage))


def test_a_path_that_was_not_a_link_must_not_become_one_and_may_change_otherwise(
    tmp_path: Path,
) -> None:
    asked = tmp_path / "asked"
    asked.mkdir()
    found = parsed(f"P 10 0 0 0 0.0 {asked}")
    (asked / "new").touch()
    assert gather.identical(found, "/stage")
    asked.rename(tmp_path / "moved")
    asked.symlink_to("moved")
    assert not gather.identical(found, "/stage")


# Whether it counts


GAPS = {
    "half a record": logged(BEGAN, "R 10 7 8 9 1.0 /a")[:-5],
    "a program that did not announce itself": logged(BEGAN, "S 11 11 0 0 0.0 /static"),
    "a child that did not announce itself": logged(BEGAN, "S 10 12 0 0 0.0 /static"),
    "a program that was replaced by one that did not": logged(BEGAN, "S 10 10 0 0 0.0 /static"),
    "a program below one that did not": logged(BEGAN, "B 13 12 0 0 0.0 /usr/bin/as"),
    "a shell that did not announce itself": logged(BEGAN, "C 10 10 1 0 0.0 /bin/sh"),
    "one of two shells": logged(BEGAN, *["C 10 10 1 0 0.0 /bin/sh"] * 2, "B 11 10 0 0 0.0 /bin/sh"),
    "a lost record": logged(BEGAN, "X 0 0 0 0 0.0 too long"),
    "a record of no kind": logged(BEGAN, "? 10 7 8 9 1.0 /a"),
    "a damaged record": logged(BEGAN, "R 10 7"),
    "a damaged number": logged(BEGAN, "R 10 7 x 9 1.0 /a"),
    "a number too few": logged(BEGAN, "R 10 7  9 1.0 /a"),
    "an empty number": logged(BEGAN, "R 10  7 8 9 1.0 /a"),
}


@pytest.mark.parametrize("gap", GAPS)
def test_log_with_a_gap_is_not_complete(gap: str) -> None:
    found = log.parse(GAPS[gap])
    assert found is not None
    assert not found.complete


@pytest.mark.parametrize("data", [b"", logged(BEGAN)[:-1], logged("R 10 7 8 9 1.0 /a")])
def test_log_without_a_program_says_nothing(data: bytes) -> None:
    assert log.parse(data) is None


COMPLETE = {
    "a program that could not be started": (
        "S 10 10 0 0 0.0 /nowhere/as", "F 10 10 0 0 0.0 /nowhere/as",
    ),
    "one that was not even tried": ("F 10 10 0 0 0.0 /nowhere/as",),
    "a process that becomes another program": ("B 10 1 0 0 0.0 /usr/bin/as",),
    # Process 11 is a copy of a shell. It announces nothing, but its child is observed, so it is.
    "a program that a subshell starts": (
        "S 12 12 0 0 0.0 /usr/bin/mv", "B 12 11 0 0 0.0 /usr/bin/mv",
    ),
    "a shell of the C library": ("C 10 10 1 0 0.0 /bin/sh", "B 11 10 0 0 0.0 /bin/sh"),
    "a shell and another program": (
        "C 10 10 1 0 0.0 /bin/sh", "S 12 12 0 0 0.0 as", "B 12 10 0 0 0.0 /usr/bin/as",
        "B 11 10 0 0 0.0 /bin/sh",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", COMPLETE)
def test_log_without_a_gap_is_complete(case: str) -> None:
    assert parsed(*COMPLETE[case]).complete


@given(st.lists(st.sampled_from([BEGAN, *sum(COMPLETE.values(), ()), "R 10 7 8 9 1.0 /a"])),
       st.binary(max_size=8), st.integers(0, 200))  # fmt: skip
@example([BEGAN], b"", 0)
def test_any_log_is_parsed_and_one_that_was_cut_is_not_complete(
    records: list[str], junk: bytes, cut: int
) -> None:
    whole = logged(*records)
    log.parse(whole + junk)
    rest = whole[:cut]
    found = log.parse(rest)
    assert found is None or found.complete is False or rest.endswith(b"\0")


def test_log_file_is_taken_once_and_counts_as_long_as_no_record_was_lost(tmp_path: Path) -> None:
    path, whole = tmp_path / "log", tmp_path / f"log{log.WHOLE}"
    assert log.finish(str(path)) is None
    for lost in (False, True):
        log.start(str(path))
        assert (path.read_bytes(), whole.exists()) == (b"", True)
        path.write_bytes(logged(BEGAN) + b"N 10 0 0 0 0.0 /src/\xff\r\n.h\0")
        if lost:
            whole.unlink()
        found = log.finish(str(path))
        assert found is not None
        assert found.absent == {os.fsdecode(b"/src/\xff\r\n.h")}
        assert found.complete is not lost
        assert list(tmp_path.iterdir()) == []
    log.start(str(path))
    path.unlink()
    assert log.finish(str(path)) is None


# Who did it


@pytest.mark.parametrize("record", ["S 11 11 10 0 0.0 /evil/as", "S 10 11 1 0 0.0 /evil/as"])
def test_program_that_did_not_announce_itself_is_named(record: str) -> None:
    assert parsed(record).started[1] == log.Started("", "/evil/as", 0)


def test_what_a_forked_process_writes_is_written_by_its_parents_program() -> None:
    first, second = "W 11 0 10 0 0.0 /stage/a", "W 12 0 11 0 0.0 /stage/b"
    found = parsed("B 9 10 10 0 0.0 /usr/bin/as", first, second, "W 99 0 0 0 0.0 /tmp/x")
    assert found.written == {"/stage/a": (0,), "/stage/b": (0,), "/tmp/x": (0,)}


def test_what_a_copy_of_a_later_program_does_is_done_by_that_program() -> None:
    """Processes 12 and 13 are copies of cc1plus, which is process 11."""
    seen = parsed(
        "B 11 10 10 0 0.0 /usr/lib/cc1plus", "W 11 0 10 0 0.0 /stage/a",
        "W 12 0 11 0 0.0 /stage/b", "S 13 14 11 0 0.0 /evil/as",
    )  # fmt: skip
    assert seen.written == {"/stage/a": (1,), "/stage/b": (1,)}
    assert seen.started[2] == log.Started("", "/evil/as", 1)


def test_program_that_replaces_another_is_started_by_it() -> None:
    found = parsed("S 10 10 1 0 0.0 as", "B 10 1 1 0 0.0 /usr/bin/as", "W 10 0 0 0 0.0 /stage/a.o")
    assert found.started[1] == log.Started("/usr/bin/as", "as", 0)
    assert found.written == {"/stage/a.o": (1,)}


def test_program_may_run_twice_and_be_called_by_paths_that_are_links() -> None:
    found = parsed(
        "S 11 11 0 0 0.0 as", "B 11 10 0 0 0.0 /usr/bin/as",
        "S 12 12 0 0 0.0 /opt/as", "B 12 10 0 0 0.0 /usr/bin/as",
        "S 13 13 0 0 0.0 /opt/as", "F 13 13 0 0 0.0 /opt/as",
    )  # fmt: skip
    assert [each.program for each in found.started] == [
        "/usr/bin/g++",
        "/usr/bin/as",
        "/usr/bin/as",
    ]
    assert found.called == ("/opt/as",)


def test_child_may_begin_before_its_parent_has_recorded_it() -> None:
    records = ("B 11 10 0 0 0.0 /usr/bin/as", "S 10 11 0 0 0.0 /opt/as", "S 10 11 0 0 0.0 other")
    found = parsed(*records)
    assert found.complete
    assert found.started[1] == log.Started("/usr/bin/as", "/opt/as", 0)


# Whose a file is that is written


READ, LOOKED_UP = "R 10 7 8 9 1.0 /f", "E 10 7 8 9 1.0 /f"
MADE, KEPT = "W 10 0 0 0 0.0 /f", "A 10 0 0 0 0.0 /f"


@pytest.mark.parametrize(
    ("records", "read", "made", "rewritten"),
    [
        ((MADE, READ), True, True, False),
        ((MADE, READ, MADE, READ), True, True, False),
        ((MADE, KEPT, READ), True, True, False),
        ((READ, MADE), True, False, True),
        ((READ, KEPT), True, False, True),
        ((LOOKED_UP, READ, MADE), True, False, True),
        ((KEPT, READ), True, False, False),  # what was in it before was read, too
        ((KEPT,), False, False, False),
        ((LOOKED_UP, MADE), False, False, False),
        ((LOOKED_UP, MADE, READ), True, False, False),
    ],
)
def test_file_is_the_steps_own_if_it_was_made_before_anything_looked_at_it(
    records: tuple[str, ...], read: bool, made: bool, rewritten: bool
) -> None:
    found = parsed(*records)
    assert ("/f" in found.read, "/f" in found.made, "/f" in found.rewritten) == (
        read, made, rewritten,
    )  # fmt: skip


def test_every_file_that_was_behind_a_path_is_kept_once() -> None:
    one, other = "R 10 7 8 9 1.5 /a", "R 10 7 9 9 1.5 /a"
    assert [each.inode for each in parsed(one, other, one).read["/a"]] == [8, 9]


def test_file_that_appears_while_it_is_looked_for_stays_absent() -> None:
    """One part of the compile did without it, another one read it."""
    found = parsed(
        "N 10 0 0 0 0.0 /inc/n.h", "R 10 7 8 9 1.5 /inc/n.h",
        "N 10 0 0 0 0.0 /tmp/own", "W 10 0 0 0 0.0 /tmp/own", "R 10 7 9 9 1.5 /tmp/own",
        "W 10 0 0 0 0.0 /tmp/dir", "I 10 0 0 0 0.0 /tmp/dir",
    )  # fmt: skip
    assert found.absent == {"/inc/n.h"}
    assert found.directories == set()


# What the step depends on


def observed(*read: str | Path, **seen: Any) -> log.Observation:
    """A step that read these files as they are now; those that are not there, as they once were."""
    gone = log.Identity(0, 0, 0, 0)
    names = [*map(str, read), *map(str, seen.get("found", ()))]
    files = {path: (log.Identity.now(path) if os.path.exists(path) else gone,) for path in names}
    more: dict[str, Any] = {name: set(map(str, paths)) for name, paths in seen.items()}
    return replace(parsed(), read=files, **more)


def replace(seen: log.Observation, **more: Any) -> log.Observation:
    made = copy.copy(seen)
    vars(made).update(more)
    return made


def paths_of(seen: log.Observation, stage: str | Path = "/stage", **more: Any) -> set[Any]:
    found = gather.list_inputs(seen, str(stage), **more).facts
    return {(kind, path) for kind, path, what in found if not what}


def test_inputs_are_what_was_read_looked_up_or_started_outside_of_the_stage(
    tmp_path: Path,
) -> None:
    stage, made = tmp_path / "stage", tmp_path / "made.s"
    beside, tool, script = f"{tmp_path}/stage2/a.h", f"{tmp_path}/tool", "/opt/cc"
    own = (f"{stage}/b.h", made, "/proc/cpuinfo", "/sys/x")
    seen = observed(beside, *own, found=(tool,), made=(made,), listed=own, directories=own,
                    absent=(*own, f"{tmp_path}/c.h"))  # fmt: skip
    for each in (str(stage), f"{stage}/"):
        found = gather.list_inputs(seen, each, called=(script, tool, f"{stage}/tool"))
        assert found.facts == (
            (ABSENT, str(tmp_path), "c.h"),
            (FILE, beside, ""), (PROGRAM, script, ""), (PROGRAM, tool, ""),
        )  # fmt: skip
        assert found.files == (beside, script, tool)


def test_file_that_was_read_and_looked_up_counts_as_a_program(tmp_path: Path) -> None:
    path = f"{tmp_path}/a.h"
    assert paths_of(observed(path, found=(path,))) == {(PROGRAM, path)}


def test_directory_that_was_looked_up_counts_unless_a_file_was_found_in_it(tmp_path: Path) -> None:
    """gcc looks for directories by a dot at the end."""
    full, empty = f"{tmp_path}/full", f"{tmp_path}/empty"
    seen = observed(f"{full}/sub/a.h", directories=(full, f"{full}/sub/.", f"{empty}/.", empty),
                    listed=(f"{full}/", empty, "/"))  # fmt: skip
    assert paths_of(seen) == {
        (FILE, f"{full}/sub/a.h"), (DIRECTORY, empty), (LISTING, full), (LISTING, empty),
        (LISTING, "/"),
    }  # fmt: skip


def test_path_that_is_asked_for_its_link_counts_and_the_links_on_it_and_where_they_lead(
    tmp_path: Path,
) -> None:
    (tmp_path / "real" / "sub").mkdir(parents=True)
    (tmp_path / "real" / "sub" / "file").touch()
    (tmp_path / "real" / "up").symlink_to("sub/../sub")
    (tmp_path / "first").symlink_to("second")
    (tmp_path / "second").symlink_to(tmp_path / "real")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "other").symlink_to("real")
    seen = observed(led=(tmp_path / "first/up/./file", tmp_path / "circle", tmp_path / "real"))
    found = {os.path.relpath(path, os.path.realpath(tmp_path)) for _, path in paths_of(seen)}
    assert found == {"first", "second", "real/up", "circle", "first/up/file", "real"}
    assert {kind for kind, _ in paths_of(seen)} == {LINK}


def test_path_that_leads_out_of_the_stage_is_known_by_its_own(tmp_path: Path) -> None:
    seen = observed(f"{tmp_path}/stage/src/a.h", f"{tmp_path}/stage/b.h")

    def unlinked(path: str) -> str:
        return path.replace(f"{tmp_path}/stage/src", "/package")

    assert paths_of(seen, tmp_path / "stage", unlinked=unlinked) == {(FILE, "/package/a.h")}


def test_inputs_that_something_else_stands_for_are_left_out() -> None:
    seen = observed("/py/a", "/pyx/b", listed=["/py"], absent=["/py/c", "/d", "/py/e"])
    chosen = [("cc", ("/py/cc",))]
    assert gather.list_inputs(seen, "/stage", chosen=chosen, covered=("/py/",)).facts == (
        (ABSENT, "/", "d"), (CHOICE, "cc", "/py/cc"), (FILE, "/pyx/b", ""),
    )  # fmt: skip


# Names that must stay absent


def absent(*names: str | Path, stage: str = "/stage") -> tuple[tuple[str, tuple[str, ...]], ...]:
    found = gather.list_inputs(observed(absent=names), stage).facts
    return tuple((path, tuple(split_names(what))) for kind, path, what in found if kind == ABSENT)


def test_absent_names_are_summed_up_by_the_nearest_directory_that_exists(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    names = [tmp_path / name for name in ("a/x.h", "a/X", "a/b/c/y.h", "a/b/z.h", "stage/t.s")]
    assert absent(*names, stage=f"{tmp_path}/stage") == (
        (str(tmp_path / "a"), ("X", "b/c/y.h", "b/z.h", "x.h")),
    )
    nowhere = "no-such-directory-of-opkiln"
    assert absent(f"/{nowhere}/a.h", f"/{nowhere}/MAX/") == (
        ("/", (f"{nowhere}/MAX", f"{nowhere}/a.h")),
    )


def test_names_that_a_search_along_path_missed_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert absent(tmp_path / "as") == ((str(tmp_path), ("as",)),)


# Several steps


def test_inputs_of_several_steps_are_joined_in_order_and_without_repeats() -> None:
    shorter, longer, other = ("cc", ("/a/cc",)), ("cc", ("/a/cc", "/b/cc")), ("as", ("/a/as",))
    assert gather.list_inputs(observed(), "/stage", chosen=(longer, shorter, other)).facts == (
        (CHOICE, "as", "/a/as"), (CHOICE, "cc", "/a/cc\0/b/cc"),
    )  # fmt: skip
    one = gather.Inputs(
        ((FILE, "/a", ""), (FILE, "/b", ""), (ABSENT, "/y", "1\0002"), (ABSENT, "/x", "1"),
         (CHOICE, "cc", "/a/cc\0/b/cc")), ("/l",),
    )  # fmt: skip
    two = gather.Inputs(
        ((FILE, "/a", ""), (LINK, "/a", ""), (ABSENT, "/y", "1\0003"), (CHOICE, "cc", "/a/cc")),
        ("/l", "/k"),
    )
    assert gather.union([one, two]) == gather.Inputs(
        ((ABSENT, "/x", "1"), (ABSENT, "/y", "1\0002\0003"), (CHOICE, "cc", "/a/cc\0/b/cc"),
         (FILE, "/a", ""), (FILE, "/b", ""), (LINK, "/a", "")), ("/k", "/l"),
    )  # fmt: skip
    assert gather.union([]) == gather.Inputs()


def test_what_a_step_made_itself_may_change_afterwards_and_nothing_else(tmp_path: Path) -> None:
    stage, made, source = tmp_path / "stage", tmp_path / "made.s", tmp_path / "a.h"
    source.write_text("1")
    seen = observed(f"{stage}/t.s", made, "/proc/self/none", source, made=(made,))
    assert gather.identical(seen, str(stage))
    assert gather.identical(seen, f"{stage}/")
    assert not gather.identical(observed(f"{stage}2/a.h"), str(stage))
    now = seen.read[str(source)]
    then = (now[0]._replace(inode=now[0].inode + 1),)
    for behind in (then, (*then, *now)):
        assert not gather.identical(replace(seen, read={str(source): behind}), str(stage))
    source.write_text("22")
    assert not gather.identical(seen, str(stage))
    source.unlink()
    assert not gather.identical(seen, str(stage))


def test_two_steps_agree_if_the_files_that_both_read_are_the_same() -> None:
    def reading(**inodes: int) -> log.Observation:
        read: dict[str, Any] = {
            f"/{path.replace('_', '/')}": (log.Identity(1, inode, 1, 1),)
            for path, inode in inodes.items()
        }
        return replace(parsed(), read=read)

    first = reading(a=1, b=2, proc_null=3)
    assert gather.agree(first, reading(a=1, c=9))
    assert gather.agree(first, reading(b=2, proc_null=4))
    assert not gather.agree(first, reading(a=1, b=3))
