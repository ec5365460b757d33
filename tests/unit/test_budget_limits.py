"""What the budget counts, where its lock file is, and what a report and an error say of it."""

from __future__ import annotations

import os
import stat
import threading
from typing import TYPE_CHECKING

import pytest

from opkiln.errors import BuildCancelled, BuildTimeout
from opkiln.run import budget, events, slots
from opkiln.settings import override

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from opkiln.run.events import Event

pytestmark = pytest.mark.timed

GIB = 1 << 30


def measured(
    monkeypatch: pytest.MonkeyPatch,
    *,
    quota: float | None = None,
    cpus: frozenset[int] | None = None,
    limit: int | None = None,
    total: int = 100 * GIB,
    memory: int | None = None,
) -> budget.Limits:
    """The limits of a process on CPUs 4 to 7, under these limits of its cgroup."""
    for name, value in (
        ("cpu_quota", quota), ("cpus", cpus), ("memory_limit", limit), ("total_memory", total),
    ):  # fmt: skip
        monkeypatch.setattr(budget, name, lambda root, value=value: value)
    with override(memory=memory):
        return budget.measure("/", {7, 6, 5, 4})


def test_slots_are_the_cpus_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(monkeypatch)
    assert found == budget.Limits(
        (4, 5, 6, 7), 80 * GIB, 20 * GIB, "CPU affinity", "80% of the machine's memory"
    )


def test_quota_below_the_affinity_bounds_the_slots_and_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = measured(monkeypatch, quota=1.5)
    assert (found.slots, found.cpus_from) == ((4, 5), "cgroup quota of 1.5 CPUs")
    assert found.share == 40 * GIB
    for quota in (4.0, 6.0):
        found = measured(monkeypatch, quota=quota)
        assert (found.slots, found.cpus_from) == ((4, 5, 6, 7), "CPU affinity")
        assert found.share == 20 * GIB


def test_memory_is_shared_by_all_cpus_of_the_group_or_of_its_quota(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = frozenset(range(16))
    assert measured(monkeypatch, cpus=group).share == 5 * GIB
    assert measured(monkeypatch, cpus=group, quota=8.0).share == 10 * GIB
    assert measured(monkeypatch, cpus=group, quota=99.0).share == 5 * GIB
    assert measured(monkeypatch, cpus=frozenset({0})).share == 16 * GIB


def test_memory_is_that_of_the_setting_the_group_or_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = measured(monkeypatch, limit=10 * GIB)
    assert (found.memory, found.memory_from) == (8 * GIB, "80% of the cgroup's limit")
    found = measured(monkeypatch, limit=100 * GIB)
    assert (found.memory, found.memory_from) == (80 * GIB, "80% of the machine's memory")
    found = measured(monkeypatch, limit=10 * GIB, memory=5)
    assert (found.memory, found.memory_from, found.share) == (5, "OPKILN_MEMORY", 1)
    assert measured(monkeypatch, memory=3).share == 1, "a share is never nothing"


def test_own_cpus_are_those_that_the_kernel_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def affinity(pid: int) -> set[int]:
        asked.append(pid)
        return {3, 1}

    monkeypatch.setattr(os, "sched_getaffinity", affinity)
    monkeypatch.setattr(budget, "cpu_quota", lambda root: None)
    assert budget.measure().slots == (1, 3)
    assert asked == [0]


def a_budget(limits: int, table: slots.SlotTable, *refused: str) -> budget.Budget:
    return budget.Budget(
        budget.Limits(tuple(range(limits)), 4 * GIB, GIB, "a", "b"), table, refused
    )


def test_step_takes_a_slot_for_each_share_of_memory_that_it_begins() -> None:
    one = a_budget(4, slots.SlotTable(None, -1))
    assert [one.slots_for(memory) for memory in (0, 1, GIB, GIB + 1, 4 * GIB, 99 * GIB)] == [
        1, 1, 1, 2, 4, 4,
    ]  # fmt: skip


def test_report_has_the_numbers_the_place_and_every_refusal() -> None:
    table = slots.SlotTable("/run/slots", -1)
    one = a_budget(2, table, "/first: refused")
    with override(max_jobs=3):
        assert one.describe() == budget.Description(
            one.limits, 3, "/run/slots", ("/first: refused",)
        )
    table.broken = "no locks"
    with override(max_jobs=None):
        assert one.describe() == budget.Description(
            one.limits, None, None, ("/first: refused", "no locks")
        )


def test_wait_that_is_given_up_names_the_holder_if_it_is_known() -> None:
    error = budget._no_free_cpu(1.50, 77)
    assert error.what == "gave up waiting for a free CPU: pid 77 holds one or is next"
    assert error.why == (
        "no build step of this user on this host ended in 1.5 s (OPKILN_BUILD_TIMEOUT)"
    )
    assert error.hint == "ps -o pid,stat,etime,args -p 77"
    for unknown in (0, None):
        error = budget._no_free_cpu(2.0, unknown)
        assert error.what == (
            "gave up waiting for a free CPU: another process holds one or is next"
        )
        assert error.hint == "ps -o pid,stat,etime,args -x"


# The wait


class Scripted(slots.SlotTable):
    """A table whose slots are all taken until a time, with a clock that only waits move."""

    def __init__(self, patch: pytest.MonkeyPatch, *, free_at: float, next_in_line: bool) -> None:
        super().__init__(None, -1)
        self.now, self.free_at, self.next_in_line = 100.0, 100.0 + free_at, next_in_line
        self.waits: list[float] = []
        self.joined = 0
        self.changes: list[float] = []  # when a slot changes hands
        patch.setattr(budget.time, "monotonic", lambda: self.now)
        patch.setattr(budget.random, "uniform", lambda low, high: (low + high) / 2)
        patch.setattr(self.changed, "wait", self._wait)

    def _wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds

    def join(self, ask: slots.SlotRequest) -> None:
        self.joined += 1

    def leave(self, ask: slots.SlotRequest) -> None:
        self.joined -= 1

    def take(self, ask: slots.SlotRequest) -> tuple[int, ...]:
        return (0,) if self.now >= self.free_at else ()

    def is_next(self, ask: slots.SlotRequest) -> bool:
        return self.next_in_line

    def holder(self, ask: slots.SlotRequest) -> int | None:
        return 77

    def holders(self, ask: slots.SlotRequest) -> tuple[object, ...]:
        return ("held", sum(self.now - 100 >= each for each in self.changes))

    def give(self, taken: tuple[int, ...]) -> None:
        assert taken == (0,)


def test_wait_looks_again_soon_at_first_and_then_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = Scripted(monkeypatch, free_at=1.0, next_in_line=True)
    with a_budget(1, table).hold() as taken:
        assert taken == (0,)
    expected, pause = [], 0.007
    while sum(expected) < 1.0:
        pause = min(pause * 1.5, 0.05)
        expected.append(0.75 * pause)
    assert table.waits == pytest.approx(expected)
    behind = Scripted(monkeypatch, free_at=2.0, next_in_line=False)
    with a_budget(1, behind).hold():
        pass
    assert max(behind.waits) == pytest.approx(0.75 * 0.2)


def test_waiter_is_told_whom_it_waits_for_about_once_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = Scripted(monkeypatch, free_at=3.5, next_in_line=True)
    told: list[tuple[int, float]] = []
    with a_budget(1, table).hold(waiting=lambda pid, seconds: told.append((pid, seconds))):
        pass
    assert [pid for pid, _ in told] == [77] * 4
    assert [seconds for _, seconds in told] == pytest.approx([0.2, 1.2, 2.2, 3.2], abs=0.2)
    quick = Scripted(monkeypatch, free_at=0.1, next_in_line=True)
    with a_budget(1, quick).hold(waiting=lambda pid, seconds: told.append((pid, seconds))):
        pass
    assert len(told) == 4


def test_wait_ends_when_no_slot_has_changed_hands_for_as_long_as_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def given_up(*changes: float, limit: float, since: float | None = None) -> float:
        table = Scripted(monkeypatch, free_at=99.0, next_in_line=True)
        table.changes = list(changes)
        with (
            pytest.raises(BuildTimeout, match="pid 77 holds one"),
            a_budget(1, table).hold(limit=limit, since=since),
        ):
            pytest.fail("there was no free slot")
        assert table.joined == 0
        return table.now - 100

    # The holders are looked at with each call: first after 0.2 s, then every second.
    assert given_up(limit=0.1) == pytest.approx(0.1, abs=0.1)
    assert given_up(limit=5.0) == pytest.approx(5.2, abs=0.2)
    assert given_up(3.0, limit=5.0) == pytest.approx(8.3, abs=0.3)
    assert given_up(limit=5.0, since=97.0) == pytest.approx(2.2, abs=0.2)  # it began at 100


def test_wait_that_is_cancelled_says_so_and_leaves_the_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = Scripted(monkeypatch, free_at=99.0, next_in_line=True)
    cancelled = threading.Event()

    def cancel(pid: int, seconds: float) -> None:
        cancelled.set()

    told = "^the build was cancelled while it waited for a free CPU$"
    with (
        pytest.raises(BuildCancelled, match=told),
        a_budget(1, table).hold(cancelled=cancelled, waiting=cancel),
    ):
        pytest.fail("there was no free slot")
    assert table.joined == 0
    assert table.now < 101


# The place of the lock file


def test_budget_is_one_object_for_each_combination_of_settings(tmp_path: Path) -> None:
    with override(runtime_dir=str(tmp_path / "a"), memory=GIB):
        one = budget.shared_budget()
        assert budget.shared_budget() is one
        assert one.limits.memory == GIB
        assert one.describe().where == str(tmp_path / "a" / "slots")
    with override(runtime_dir=str(tmp_path / "b"), memory=GIB):
        assert budget.shared_budget() is not one
    with override(runtime_dir=str(tmp_path / "a"), memory=2 * GIB):
        other = budget.shared_budget()
        assert other is not one
        assert other._table is one._table
    with override(runtime_dir=str(tmp_path / "a"), memory=GIB, tmpdir=str(tmp_path)):
        assert budget.shared_budget() is not one


def places(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], tuple[str, ...], list[str]]:
    """(where the lock file is looked for, why each was refused, what was told), if none will do."""
    tried: list[str] = []

    def refuse(place: str) -> slots.SlotTable:
        tried.append(place)
        raise OSError(30, f"no {len(tried)}")

    monkeypatch.setattr(budget, "_open_table", refuse)
    notes: list[Event] = []
    with events.listen(notes.append):
        table, refused = budget._find_table()
    assert table is budget._alone
    assert {note.kind for note in notes} == {events.NOTE}
    return tried, refused, [note.data["text"] for note in notes]


def test_lock_file_is_in_the_chosen_directory_in_memory_or_among_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = os.geteuid()
    usual = [f"/dev/shm/opkiln-{uid}", f"{tmp_path}/opkiln-{uid}"]
    with override(runtime_dir="/chosen", tmpdir=str(tmp_path)):
        tried, refused, told = places(monkeypatch)
    assert tried == ["/chosen", *usual]
    assert refused == ("/chosen: no 1", f"{usual[0]}: no 2", f"{usual[1]}: no 3")
    assert told == [
        "OPKILN_RUNTIME_DIR is not used: /chosen: no 1",
        "the build budget applies to this process only: " + "; ".join(refused),
    ]
    with override(runtime_dir=None, tmpdir=None):
        tried, refused, told = places(monkeypatch)
    assert tried == [usual[0], f"/tmp/opkiln-{uid}"]
    assert len(told) == 1


def test_lock_file_and_its_directory_are_private_and_opened_once(tmp_path: Path) -> None:
    place = str(tmp_path / "run")
    old = os.umask(0)
    try:
        table = budget._open_table(place)
    finally:
        os.umask(old)
    assert table.path == f"{place}/slots"
    assert stat.S_IMODE(os.stat(place).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(f"{place}/slots").st_mode) == 0o600
    open_files = os.listdir("/proc/self/fd")
    assert budget._open_table(place) is table
    assert os.listdir("/proc/self/fd") == open_files
    os.unlink(f"{place}/slots")
    assert budget._open_table(place) is not table


def test_lock_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(0o700)
    (tmp_path / "run" / "slots").symlink_to(tmp_path / "elsewhere")
    open_files = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="symbolic link"):
        budget._open_table(str(tmp_path / "run"))
    assert os.listdir("/proc/self/fd") == open_files
    assert not (tmp_path / "elsewhere").exists()
    budget._open_table(str(tmp_path / "other"))  # nor to a file that is open already
    (tmp_path / "run" / "slots").unlink()
    (tmp_path / "run" / "slots").symlink_to(tmp_path / "other" / "slots")
    with pytest.raises(OSError, match="symbolic link"):
        budget._open_table(str(tmp_path / "run"))


def test_link_in_the_directorys_place_is_refused_and_the_report_says_so(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(0o700)
    (tmp_path / "run").symlink_to(tmp_path / "real")
    with pytest.raises(OSError, match=r"Not a directory|symbolic link"):
        budget._open_table(str(tmp_path / "run"))
    with override(runtime_dir=str(tmp_path / "run")):
        assert budget.shared_budget().describe().refused[0].startswith(f"{tmp_path}/run: ")
    assert os.listdir(tmp_path / "real") == []


def test_fifo_in_the_directorys_place_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run")
    with pytest.raises(NotADirectoryError):
        budget._open_table(str(tmp_path / "run"))


def test_forked_child_has_a_budget_although_a_thread_of_its_parent_was_asking_for_it(
    tmp_path: Path,
) -> None:
    with override(runtime_dir=str(tmp_path / "run")):
        budget.shared_budget()
        with budget._lock:  # as another thread would hold it
            child = os.fork()
            if child == 0:
                os._exit(0 if budget.shared_budget().describe().where else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o750])
def test_directory_that_others_may_read_will_do(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    assert budget._open_table(str(tmp_path)).path == f"{tmp_path}/slots"


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o1777])
def test_directory_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(PermissionError) as raised:
        budget._open_table(str(tmp_path))
    assert raised.value.strerror == f"it is writable by others (mode {mode:04o})"
    assert raised.value.errno == 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_directory_of_another_user_is_refused_with_both_numbers(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, -1)
    with pytest.raises(PermissionError) as raised:
        budget._open_table(str(tmp_path))
    assert raised.value.strerror == "it belongs to uid 65534, not to uid 0 or root"
    assert raised.value.errno == 1


# What the kernel grants


def tree(root: Path, files: dict[str, str]) -> str:
    for name, text in {"proc/meminfo": "MemTotal:  16777216 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return str(root)


@pytest.mark.parametrize(
    ("own", "file"),
    [
        ("0::/jobs/one", "sys/fs/cgroup/jobs/one/memory.events"),
        ("4:memory:/jobs/one", "sys/fs/cgroup/memory/jobs/one/memory.oom_control"),
    ],
)
def test_out_of_memory_kills_are_counted_for_the_group_and_the_machine(
    tmp_path: Path, own: str, file: str
) -> None:
    files = {
        "proc/self/cgroup": own,
        "proc/vmstat": "pgfault 7\noom_kill 5\nnr_free 1",
        file: "low 0\noom 4\noom_kill 3\noom_group_kill 0",
    }
    assert budget.out_of_memory_kills(tree(tmp_path, files)) == (3, 5)
    assert budget.out_of_memory_kills(str(tmp_path / "nothing")) == (0, 0)


def test_version_2_limits_count_wherever_they_are_set(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/jobs/one/step",
            "sys/fs/cgroup/jobs/cpu.max": "250000 100000",
            "sys/fs/cgroup/jobs/memory.max": "max",
            "sys/fs/cgroup/jobs/one/cpu.max": "max 100000",
            "sys/fs/cgroup/jobs/one/memory.max": str(8 * GIB),
            "sys/fs/cgroup/jobs/one/step/memory.max": "max",
        },
    )
    assert budget.cpu_quota(root) == 2.5
    assert budget.memory_limit(root) == 8 * GIB
    with override(memory=None):
        limits = budget.measure(root, range(8))
    assert limits.slots == (0, 1, 2)
    assert limits.memory == int(0.8 * 8 * GIB)
    assert limits.share == limits.memory // 3
    assert limits.cpus_from == "cgroup quota of 2.5 CPUs"
    assert limits.memory_from == "80% of the cgroup's limit"


def test_version_1_limits_are_found_in_a_container_that_sees_the_hosts_path(
    tmp_path: Path,
) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
        },
    )
    assert budget.cpu_quota(root) == 0.5
    assert budget.memory_limit(root) == 2 * GIB
    assert budget.measure(root, {4, 7}).slots == (4,)


CPU = "3:cpu,cpuacct:/"
QUOTAS: dict[str, tuple[str, dict[str, str], float | None]] = {
    "a part of another period": (CPU, {"cpu,cpuacct/cpu.cfs_quota_us": "100000",
                                       "cpu,cpuacct/cpu.cfs_period_us": "50000"}, 2.0),
    "without a period": (CPU, {"cpu,cpuacct/cpu.cfs_quota_us": "50000"}, 0.5),
    "mounted by its own name alone": (CPU, {"cpu/cpu.cfs_quota_us": "50000"}, 0.5),
    "of nothing": ("0::/", {"cpu.max": "0 100000"}, None),
    "of a group with a colon": ("0::/a:b", {"a:b/cpu.max": "100000 100000"}, 1.0),
    "outside of the mount": ("0::/../..", {"../cpu.max": "100000 100000"}, None),
    "beside a group that is not ASCII": ("1:name=\xe9:/\n0::/", {"cpu.max": "100000 100000"}, 1.0),
}  # fmt: skip


@pytest.mark.parametrize("case", QUOTAS)
def test_a_cpu_quota_is_found_where_the_kernel_shows_it(tmp_path: Path, case: str) -> None:
    own, files, quota = QUOTAS[case]
    shown = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    assert budget.cpu_quota(tree(tmp_path, {"proc/self/cgroup": own, **shown})) == quota


@pytest.mark.parametrize(
    ("own", "files", "cpus"),
    [
        ("0::/", {"cpuset.cpus.effective": "0-2,8"}, {0, 1, 2, 8}),
        ("5:cpuset:/", {"cpuset/cpuset.effective_cpus": "2", "cpuset/cpuset.cpus": "2-9"}, {2}),
        ("5:cpuset:/", {"cpuset/cpuset.cpus": "2-4"}, {2, 3, 4}),
        ("5:cpuset:/", {}, None),
    ],
)  # fmt: skip
def test_the_cpus_of_a_group_are_its_effective_ones_if_the_kernel_tells_them(
    tmp_path: Path, own: str, files: dict[str, str], cpus: set[int] | None
) -> None:
    shown = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    assert budget.cpus(tree(tmp_path, {"proc/self/cgroup": own, **shown})) == cpus


def test_memory_of_a_machine_that_does_not_tell_it_is_asked_of_the_c_library(
    tmp_path: Path,
) -> None:
    assert budget.total_memory(tree(tmp_path, {})) == 16 * GIB
    (tmp_path / "proc/meminfo").unlink()
    pages = os.sysconf("SC_PHYS_PAGES")
    assert budget.total_memory(str(tmp_path)) == pages * os.sysconf("SC_PAGE_SIZE")


def test_no_limits_means_the_machine(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n3:cpu:/\n0::/../..",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    assert budget.cpu_quota(root) is None
    assert budget.memory_limit(root) is None
    with override(memory=None):
        limits = budget.measure(root, {1, 3})
    assert limits.slots == (1, 3)
    assert limits.memory == int(0.8 * 16 * GIB)
    assert limits.memory_from == "80% of the machine's memory"


def test_pinned_processes_share_the_memory_of_their_group(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpuset.cpus.effective": "0-31,64-95"},
    )
    with override(memory=64 * GIB):
        limits = budget.measure(root, range(8, 16))
    assert limits.slots == tuple(range(8, 16))
    assert limits.share == GIB
    assert limits.memory_from == "OPKILN_MEMORY"


@pytest.mark.parametrize(("size", "limit"), [("0", None), ("1", 1), (str(1 << 60), None)])
def test_a_limit_of_memory_is_more_than_nothing_and_less_than_no_limit(
    tmp_path: Path, size: str, limit: int | None
) -> None:
    files = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": size}
    assert budget.memory_limit(tree(tmp_path, files)) == limit


@pytest.mark.parametrize(
    "ask",
    [budget.cpu_quota, budget.memory_limit, budget.out_of_memory_kills, budget.cpus,
     budget.total_memory, budget.measure],
)  # fmt: skip
def test_it_is_this_machine_that_is_asked_unless_another_root_is_named(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[[], object]
) -> None:
    read: list[str] = []

    def note(path: str) -> str:
        read.append(path)
        return ""

    monkeypatch.setattr(budget, "_read", note)
    ask()
    assert read
    assert all(path.startswith("/proc/") for path in read)


def test_this_machines_limits_make_sense() -> None:
    with override(memory=None):
        limits = budget.measure()
    assert set(limits.slots) <= os.sched_getaffinity(0)
    assert 64 << 20 < limits.memory < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
