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
    assert found.complete
    assert found.read == {"/src/a b\n.h": (log.Identity(7, 8, 9, 1_700_000_000_000_000_005),)}
    assert found.absent == {"/src/none.h"}
    assert found.written == {"/stage/a.s": (1,)}
    assert found.programs == ("/usr/bin/g++", "/usr/lib/cc1plus")
    assert found.started == (
        log.Started("/usr/bin/g++", "", -1), log.Started("/usr/lib/cc1plus", "cc1plus", 0),
    )  # fmt: skip


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
    "a number too few": logged(BEGAN, "R 10 7  9 1.0 /a"),
    "an empty number": logged(BEGAN, "R 10  7 8 9 1.0 /a"),
}


@pytest.mark.parametrize("gap", GAPS)
def test_a_log_with_a_gap_is_not_complete(gap: str) -> None:
    assert not log.parse(GAPS[gap]).complete


@pytest.mark.parametrize("record", ["S 11 11 10 0 0.0 /evil/as", "S 10 11 1 0 0.0 /evil/as"])
def test_a_program_that_did_not_announce_itself_is_named(record: str) -> None:
    assert log.parse(logged(BEGAN, record)).started[1] == log.Started("", "/evil/as", 0)


def test_what_a_forked_process_writes_is_written_by_its_parents_program() -> None:
    first, second = "W 11 0 10 0 0.0 /stage/a", "W 12 0 11 0 0.0 /stage/b"
    found = log.parse(logged(BEGAN, "B 9 10 10 0 0.0 /usr/bin/as", first, second))
    assert found.written == {"/stage/a": (0,), "/stage/b": (0,)}


def test_what_a_copy_of_a_later_program_does_is_done_by_that_program() -> None:
    """Processes 12 and 13 are copies of cc1plus, which is process 11."""
    seen = log.parse(logged(
        BEGAN, "B 11 10 10 0 0.0 /usr/lib/cc1plus", "W 11 0 10 0 0.0 /stage/a",
        "W 12 0 11 0 0.0 /stage/b", "S 13 14 11 0 0.0 /evil/as",
    ))  # fmt: skip
    assert seen.written == {"/stage/a": (1,), "/stage/b": (1,)}
    assert seen.started[2] == log.Started("", "/evil/as", 1)


def test_a_program_that_replaces_another_is_started_by_it() -> None:
    found = log.parse(logged(BEGAN, "S 10 10 1 0 0.0 as", "B 10 1 1 0 0.0 /usr/bin/as"))
    assert found.started[1] == log.Started("/usr/bin/as", "as", 0)


def test_a_program_that_a_copy_of_a_shell_starts_leaves_no_gap() -> None:
    """Process 11 is a subshell. It announces nothing, but its child is observed, so it is."""
    seen = log.parse(logged(
        BEGAN, "S 12 12 0 0 0.0 /usr/bin/mv", "B 12 11 0 0 0.0 /usr/bin/mv",
    ))  # fmt: skip
    assert seen.complete
    assert seen.programs == ("/usr/bin/g++", "/usr/bin/mv")


def test_a_program_is_known_by_the_path_that_it_was_called_by(tmp_path: Path) -> None:
    real, link, other = (tmp_path / name for name in ("real", "link", "other"))
    real.write_text("")
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
    assert log.parse(logged(BEGAN, *tried)).complete
    assert log.parse(logged(BEGAN, *tried[1:])).complete


def test_a_child_may_begin_before_its_parent_has_recorded_it() -> None:
    records = ("B 11 10 0 0 0.0 /usr/bin/as", "S 10 11 0 0 0.0 /opt/as", "S 10 11 0 0 0.0 other")
    found = log.parse(logged(BEGAN, *records))
    assert found.complete
    assert found.started[1] == log.Started("/usr/bin/as", "/opt/as", 0)


def test_a_process_that_is_observed_may_become_another_program_without_saying_so_first() -> None:
    assert log.parse(logged(BEGAN, "B 10 1 0 0 0.0 /usr/bin/as")).complete


def test_a_log_file_is_read_as_it_is_and_a_missing_one_counts_as_no_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert log.read(str(path)) is None
    path.write_bytes(logged(BEGAN) + b"N 10 0 0 0 0.0 /src/\xff\r\n.h\0")
    found = log.read(str(path))
    assert found is not None
    assert found.absent == {os.fsdecode(b"/src/\xff\r\n.h")}


def test_a_file_is_the_steps_own_if_it_was_written_before_anything_read_it() -> None:
    found = log.parse(logged(
        BEGAN,
        "W 10 0 0 0 0.0 /tmp/first.s", "R 10 7 8 9 1.0 /tmp/first.s",
        "R 10 7 8 9 1.0 /src/cache.gch", "W 10 0 0 0 0.0 /src/cache.gch",
    ))  # fmt: skip
    assert found is not None
    assert found.made == {"/tmp/first.s"}
    assert set(found.written) == {"/tmp/first.s", "/src/cache.gch"}


def test_a_write_of_a_process_that_did_not_announce_itself_is_the_first_programs() -> None:
    found = log.parse(logged(BEGAN, "W 99 0 0 0 0.0 /tmp/x"))
    assert found is not None
    assert found.written == {"/tmp/x": (0,)}


def test_every_file_that_was_behind_a_path_is_kept_once() -> None:
    one, other = "R 10 7 8 9 1.5 /a", "R 10 7 9 9 1.5 /a"
    found = log.parse(logged(BEGAN, one, other, one))
    assert found is not None
    assert [each.inode for each in found.read["/a"]] == [8, 9]


def test_a_process_may_become_another_program_and_a_program_may_run_twice() -> None:
    found = log.parse(logged(
        "B 10 1 0 0 0.0 /bin/sh", "S 10 10 0 0 0.0 /usr/bin/g++", "B 10 1 0 0 0.0 /usr/bin/g++",
        "W 10 0 0 0 0.0 /stage/a.o",
        "S 11 11 0 0 0.0 as", "B 11 10 0 0 0.0 /usr/bin/as",
        "S 12 12 0 0 0.0 as", "B 12 10 0 0 0.0 /usr/bin/as",
    ))  # fmt: skip
    assert found is not None
    assert found.programs == ("/bin/sh", "/usr/bin/g++", "/usr/bin/as")
    assert found.written == {"/stage/a.o": (1,)}


def test_a_running_program_that_starts_another_and_is_not_replaced_leaves_a_gap() -> None:
    exec_without_a_word = logged(BEGAN, "S 10 10 0 0 0.0 /static")
    assert not log.parse(exec_without_a_word).complete


def observed(
    *read: str, made: tuple[str, ...] = (), absent: tuple[str, ...] = ()
) -> log.Observation:
    """A step that read these files as they are now; those that are not there, as they once were."""
    gone = log.Identity(0, 0, 0, 0)
    files = {path: (log.Identity.now(path) if os.path.exists(path) else gone,) for path in read}
    return log.Observation(files, {}, frozenset(made), frozenset(absent),
                           (log.Started("/usr/bin/g++", "", -1),))  # fmt: skip


def test_what_a_step_made_itself_may_change_afterwards(tmp_path: Path) -> None:
    stage, made, source = tmp_path / "stageX", tmp_path / "made.s", tmp_path / "a.h"
    source.write_text("1")
    seen = observed(f"{stage}/t.s", str(made), "/proc/self/none", str(source), made=(str(made),))
    assert inputs.identical(seen, str(stage))
    assert inputs.identical(seen, f"{stage}/")
    source.write_text("22")
    assert not inputs.identical(seen, str(stage))


def test_a_directory_beside_the_stage_is_not_the_steps_own(tmp_path: Path) -> None:
    beside = tmp_path / "stage2" / "a.h"
    assert not inputs.identical(observed(str(beside)), str(tmp_path / "stage"))
    beside.parent.mkdir()
    beside.write_text("1")
    stage = str(tmp_path / "stageX")
    seen = observed(str(beside), f"{stage}/b.h")
    assert inputs.of(seen, stage).files == (str(beside),)
    assert inputs.of(seen, f"{stage}/").files == (str(beside),)


def test_inputs_are_what_was_read_and_neither_devices_nor_what_the_step_made(
    tmp_path: Path,
) -> None:
    first, second, made = (str(tmp_path / name) for name in ("b.h", "a.h", "made.s"))
    seen = observed(first, "/dev/null", "/proc/cpuinfo", "/sys/x", made, second, made=(made,),
                    absent=(made, "/dev/none", str(tmp_path / "c.h")))  # fmt: skip
    found = inputs.of(seen, "/stage")
    assert found.files == (first, second)
    assert found.programs == ("/usr/bin/g++",)
    assert found.absent == ((str(tmp_path), ("c.h",)),)


def test_names_that_the_search_along_path_missed_are_not_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{tmp_path}/more")
    (tmp_path / "bin").mkdir()
    seen = observed(absent=(f"{tmp_path}/bin/as", f"{tmp_path}/bin/sub/x", f"{tmp_path}/as"))
    assert inputs.of(seen, "/stage").absent == (
        (str(tmp_path), ("as",)), (f"{tmp_path}/bin", ("sub/x",)),
    )  # fmt: skip


def test_an_absent_directory_and_an_absent_name_below_the_root_are_summed_up() -> None:
    nowhere = "no-such-directory-of-opkiln"
    seen = observed(absent=(f"/{nowhere}/a.h", f"/{nowhere}/MAX/"))
    assert inputs.of(seen, "/stage").absent == (("/", (f"{nowhere}/MAX", f"{nowhere}/a.h")),)


def test_the_inputs_of_several_steps_are_joined_in_order_and_without_repeats() -> None:
    one = inputs.Inputs(("/b", "/a"), (("/y", ("2", "1")), ("/x", ("1",))), ("g++", "as"))
    other = inputs.Inputs(("/a", "/c"), (("/y", ("3", "1")),), ("as", "ld"))
    assert inputs.union([one, other]) == inputs.Inputs(
        ("/b", "/a", "/c"), (("/x", ("1",)), ("/y", ("1", "2", "3"))), ("g++", "as", "ld")
    )
    assert inputs.union([]) == inputs.Inputs()


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
    names = ("a/x.h", "a/X", "a/b/c/y.h", "a/b/z.h", "stage/t.s")
    absent = frozenset(str(tmp_path / name) for name in names)
    found = inputs.of(log.Observation({}, {}, frozenset(), absent, ()), str(tmp_path / "stage"))
    assert found.absent == ((str(tmp_path / "a"), ("X", "b/c/y.h", "b/z.h", "x.h")),)


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


def test_a_link_is_followed_by_its_whole_name_and_only_if_it_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "good").symlink_to("there")
    (tmp_path / "badX").symlink_to("missing")
    asked = (f"{tmp_path}/good/Xm.h", f"{tmp_path}/badX/Xm.h", f"{tmp_path}/badX")
    assert inputs.of(observed(absent=asked), "/stage").absent == (
        (str(tmp_path), ("badX", "badX/Xm.h", "missing", "missing/Xm.h")),
        (f"{tmp_path}/good", ("Xm.h",)),
    )


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


@pytest.mark.parametrize("name", ["n.h", "n.h/", "MAX"])
def test_a_directory_by_the_name_of_a_header_is_not_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    found = inputs.of(observed(f"{tmp_path}/{name}"), "/stage")
    assert found.files == ()
    assert found.absent == ((str(tmp_path), (name.rstrip("/") + "/",)),)


def test_the_root_that_is_opened_is_not_a_file() -> None:
    assert inputs.of(observed("/"), "/stage").files == ()


def test_a_script_is_known_by_its_own_path_and_by_its_interpreters() -> None:
    seen = log.parse(logged(BEGAN, "S 11 11 0 0 0.0 /opt/cc", "B 11 10 0 0 0.0 /bin/sh"))
    assert inputs.of(seen, "/stage").programs == ("/usr/bin/g++", "/bin/sh", "/opt/cc")


def test_a_program_that_was_called_by_a_link_of_the_stage_is_known_by_its_own_path(
    tmp_path: Path,
) -> None:
    real, link = tmp_path / "as", tmp_path / "stage" / "as"
    real.touch()
    link.parent.mkdir()
    link.symlink_to(real)
    seen = log.parse(logged(BEGAN, f"S 11 11 0 0 0.0 {link}", f"B 11 10 0 0 0.0 {real}"))
    assert inputs.of(seen, str(link.parent)).programs == ("/usr/bin/g++", str(real))


def test_of_a_name_on_path_the_longest_list_of_programs_is_kept() -> None:
    shorter, longer = ("cc", ("/a/cc",)), ("cc", ("/a/cc", "/b/cc"))
    other = ("as", ("/a/as",))
    assert inputs.of(observed(), "/stage", (longer, shorter, other)).chosen == (other, longer)
    steps = [inputs.Inputs(chosen=(longer,)), inputs.Inputs(chosen=(other, shorter))]
    assert inputs.union(steps).chosen == (other, longer)


def test_two_steps_agree_if_the_files_that_both_read_are_the_same() -> None:
    def reading(**inodes: int) -> log.Observation:
        read = {f"/{path.replace('_', '/')}": (log.Identity(1, inode, 1, 1),)
                for path, inode in inodes.items()}  # fmt: skip
        return log.Observation(read, {}, frozenset(), frozenset(), ())

    first = reading(a=1, b=2, dev_null=3)
    assert inputs.agree(first, reading(a=1, c=9))
    assert inputs.agree(first, reading(b=2, dev_null=4))
    assert not inputs.agree(first, reading(a=1, b=3))
