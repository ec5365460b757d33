"""The observer's log: what it says, and when it counts as no log."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from opkiln.observing import inputs, log

if TYPE_CHECKING:
    from pathlib import Path

BEGAN = "B 10 1 0 0 0.000000000 /usr/bin/g++"


def logged(*records: str) -> bytes:
    return b"".join(os.fsencode(record) + b"\0" for record in records)


def test_a_log_names_what_was_read_written_missed_and_started() -> None:
    found = log.parse(logged(
        BEGAN,
        "S 11 11 0 0 0.000000000 cc1plus",
        "B 11 10 0 0 0.000000000 /usr/lib/cc1plus",
        "R 11 7 8 9 1700000000.000000005 /src/a b\n.h",
        "N 11 0 0 0 0.000000000 /src/none.h",
        "W 11 0 0 0 0.000000000 /stage/a.s",
    ))  # fmt: skip
    assert found is not None
    assert found.read == {"/src/a b\n.h": (log.Identity(7, 8, 9, 1_700_000_000_000_000_005),)}
    assert found.absent == {"/src/none.h"}
    assert found.written == {"/stage/a.s": "/usr/lib/cc1plus"}
    assert found.programs == ("/usr/bin/g++", "/usr/lib/cc1plus")


GAPS = {
    "nothing": b"",
    "half a record": logged(BEGAN)[:-5],
    "no program": logged("R 10 7 8 9 1.0 /a"),
    "a program that did not announce itself": logged(BEGAN, "S 11 11 0 0 0.0 /static"),
    "a child that did not announce itself": logged(BEGAN, "S 10 12 0 0 0.0 /static"),
    "a program below one that did not": logged(BEGAN, "B 13 12 0 0 0.0 /usr/bin/as"),
    "a lost record": logged(BEGAN, "X 0 0 0 0 0.0 too long"),
    "a damaged record": logged(BEGAN, "R 10 7"),
    "a damaged number": logged(BEGAN, "R 10 7 x 9 1.0 /a"),
}


@pytest.mark.parametrize("gap", GAPS)
def test_a_log_with_a_gap_counts_as_no_log(gap: str) -> None:
    assert log.parse(GAPS[gap]) is None


def test_a_program_that_a_copy_of_a_shell_starts_leaves_no_gap() -> None:
    """Process 11 is a subshell. It announces nothing, but its child is observed, so it is."""
    seen = log.parse(logged(
        BEGAN, "S 12 12 0 0 0.0 /usr/bin/mv", "B 12 11 0 0 0.0 /usr/bin/mv",
    ))  # fmt: skip
    assert seen is not None
    assert seen.programs == ("/usr/bin/g++", "/usr/bin/mv")


def test_a_program_is_known_by_the_path_that_it_was_called_by(tmp_path: Path) -> None:
    real, link, other = (tmp_path / name for name in ("real", "link", "other"))
    for path in (real, other):
        path.write_text("")
    link.symlink_to(real)
    seen = log.parse(logged(
        BEGAN, f"S 11 11 0 0 0.0 {link}", f"B 11 10 0 0 0.0 {real}", f"S 12 12 0 0 0.0 {other}",
        f"F 12 12 0 0 0.0 {other}", f"N 12 0 0 0 0.0 {other}",
        "S 13 13 0 0 0.0 as", "B 13 10 0 0 0.0 /usr/bin/as",
    ))  # fmt: skip
    assert seen is not None
    found = inputs.of(seen, str(tmp_path / "stage"))
    assert found.programs == ("/usr/bin/g++", "/usr/bin/as", str(link))
    assert found.absent == ((str(tmp_path), ("other",)),)


def test_a_program_that_could_not_be_started_leaves_no_gap() -> None:
    tried = ("S 10 10 0 0 0.0 /nowhere/as", "F 10 10 0 0 0.0 /nowhere/as")
    assert log.parse(logged(BEGAN, *tried)) is not None


def test_a_child_may_begin_before_its_parent_has_recorded_it() -> None:
    records = ("B 11 10 0 0 0.0 /usr/bin/as", "S 10 11 0 0 0.0 /usr/bin/as")
    assert log.parse(logged(BEGAN, *records)) is not None


def test_a_file_that_was_exchanged_between_two_reads_is_not_identical(tmp_path: Path) -> None:
    path = tmp_path / "n.h"
    path.write_text("1")
    now = log.Identity.now(str(path))
    then = now._replace(inode=now.inode + 1)

    def seen(*identities: log.Identity) -> log.Observation:
        return log.Observation({str(path): identities}, {}, frozenset(), frozenset(), ())

    assert inputs.identical(seen(now), "/stage")
    assert not inputs.identical(seen(then), "/stage")
    assert not inputs.identical(seen(then, now), "/stage")
    path.unlink()
    assert not inputs.identical(seen(now), "/stage")


def test_absent_names_are_summed_up_by_the_nearest_directory_that_exists(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    names = ("a/x.h", "a/b/c/y.h", "a/b/z.h", "stage/t.s")
    absent = frozenset(str(tmp_path / name) for name in names)
    found = inputs.of(log.Observation({}, {}, frozenset(), absent, ()), str(tmp_path / "stage"))
    assert found.absent == ((str(tmp_path / "a"), ("b/c/y.h", "b/z.h", "x.h")),)


def test_a_link_that_leads_nowhere_also_counts_where_it_leads(tmp_path: Path) -> None:
    """The file that is missing there may be made, which changes nothing where the link is."""
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "n.h").symlink_to("../far/n.h")
    (tmp_path / "two").symlink_to("missing/two")
    asked = [str(tmp_path / "one" / "n.h"), str(tmp_path / "two" / "m.h")]
    seen = log.Observation({}, {}, frozenset(), frozenset(asked), ())
    absent = {
        os.path.normpath(os.path.join(directory, name))
        for directory, names in inputs.of(seen, "/stage").absent
        for name in names
    }
    far = {str(tmp_path / "far" / "n.h"), str(tmp_path / "missing" / "two" / "m.h")}
    assert absent == {*asked, *far}


def test_a_file_that_appears_while_it_is_looked_for_stays_absent() -> None:
    """One part of the compile did without it, another one read it."""
    found = log.parse(logged(
        BEGAN,
        "N 10 0 0 0 0.000000000 /inc/n.h",
        "R 10 7 8 9 1700000000.000000005 /inc/n.h",
        "N 10 0 0 0 0.000000000 /tmp/own",
        "W 10 0 0 0 0.000000000 /tmp/own",
        "R 10 7 9 9 1700000000.000000005 /tmp/own",
    ))  # fmt: skip
    assert found is not None
    assert found.absent == {"/inc/n.h"}


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "n.h").symlink_to("n.h")
    seen = log.Observation({}, {}, frozenset(), frozenset([str(tmp_path / "n.h")]), ())
    assert inputs.of(seen, "/stage").absent == ((str(tmp_path), ("n.h",)),)


def test_a_directory_by_the_name_of_a_header_is_not_a_file(tmp_path: Path) -> None:
    (tmp_path / "n.h").mkdir()
    path = str(tmp_path / "n.h")
    seen = log.Observation({path: (log.Identity.now(path),)}, {}, frozenset(), frozenset(), ())
    found = inputs.of(seen, "/stage")
    assert found.files == ()
    assert found.absent == ((str(tmp_path), ("n.h/",)),)
