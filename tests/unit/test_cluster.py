"""The parts of ``opkiln.ensure`` that need no other process: stores, channels, who is who."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from sample import child

import opkiln
from opkiln.cluster import job, leading, protocol, work
from opkiln.cluster.channel import PART, Channel
from opkiln.cluster.ensure import Handle, _Agreeing
from opkiln.cluster.messages import Hello, JobOutcome, Made, Offer, OpTask, Vote, WorkPlan
from opkiln.cluster.stores import KeyValues, Memory, SharedDirectory
from opkiln.errors import ClusterError, SettingError, StoreError, UsageError
from opkiln.report import collect
from opkiln.settings import origin_of, place_in_job, settings

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.timed


@pytest.fixture(params=["memory", "directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> KeyValues:
    return Memory() if request.param == "memory" else SharedDirectory(str(tmp_path / "shared"))


def channel(store: KeyValues, secret: str | None = None, name: str = "job") -> Channel:
    return Channel(store, name, secret, 5.0)


# Stores


def test_swap_writes_only_over_what_was_expected(store: KeyValues) -> None:
    assert store.swap("a/b", None, b"one") == b"one"
    assert store.swap("a/b", None, b"two") == b"one"
    assert store.swap("a/b", b"one", b"three") == b"three"
    assert store.swap("a/b", b"one", b"four") == b"three"
    assert store.look(["a/b", "c"]) == [b"three", None]


def test_one_of_many_threads_swaps_first(store: KeyValues) -> None:
    found: list[bytes] = []

    def race(number: int) -> None:
        found.append(store.swap("lead", None, str(number).encode()))

    threads = [threading.Thread(target=race, args=(n,)) for n in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(set(found)) == 1


def test_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(StoreError, match="cannot talk through this directory"):
        SharedDirectory(str(shared))


# Channels


def test_record_comes_back_as_tuples_of_the_same_bytes(store: KeyValues) -> None:
    plan = WorkPlan(3, True, (OpTask((1, 2)), OpTask((0,), made=Made("d", "b", 5, 0))))
    ours = channel(store, "secret")
    assert ours.swap("plan", None, plan) == plan
    after = plan._replace(revision=4)
    assert ours.swap("plan", ours.look(["plan"])[0], after) == after


def test_record_without_the_jobs_secret_is_refused(store: KeyValues) -> None:
    channel(store, "theirs").put("plan", 1)
    with pytest.raises(ClusterError, match="the record plan in the job's store is refused"):
        channel(store, "ours").look(["plan"])


def test_record_of_another_key_or_job_is_refused(store: KeyValues) -> None:
    ours = channel(store, "secret")
    ours.put("vote/1", 1)
    (data,) = store.look(["opkiln/job/vote/1"])
    assert data is not None
    for name in ("opkiln/job/vote/2", "opkiln/restarted/vote/1"):
        store.put(name, data)
    with pytest.raises(ClusterError, match="refused"):
        ours.look(["vote/2"])
    with pytest.raises(ClusterError, match="refused"):
        channel(store, "secret", "restarted").look(["vote/1"])


def test_what_was_said_before_a_restart_is_not_read(store: KeyValues) -> None:
    channel(store, name="job/0").swap("lead", None, 7)
    assert channel(store, name="job/1").swap("lead", None, 2) == 2


def test_bundle_travels_in_parts_and_a_changed_one_is_refused(store: KeyValues) -> None:
    data = bytes(range(256)) * (PART // 256) + b"the rest"
    ours = channel(store)
    digest = ours.put_bundle(data)
    assert ours.get_bundle(digest, len(data)) == data
    store.put(f"opkiln/job/bundle/{digest}/1", b"the REST")
    with pytest.raises(ClusterError, match="is not the one that was written"):
        ours.get_bundle(digest, len(data))


def test_store_that_does_not_answer_is_an_error_in_time() -> None:
    class Stuck(Memory):
        def look(self, keys: Any) -> Any:
            time.sleep(60)

    began = time.monotonic()
    with pytest.raises(ClusterError, match="does not answer"):
        Channel(Stuck(), "job", None, 0.2).look(["plan"])
    assert time.monotonic() - began < 5


# Who is who


def test_launchers_say_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place_in_job() is None
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert place_in_job() == (0, 1)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "2")  # mpirun within a Slurm job
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    assert place_in_job() == (2, 4)
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SettingError, match="do not name a rank"):
        place_in_job()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n0", "n0"), ("n0,n1", "n0"), ("gpu[003-007,9],login1", "gpu003"), ("a[1,2]", "a1")],
)
def test_first_host_of_slurms_list(nodes: str, first: str) -> None:
    assert job.first_host(nodes) == first


def test_rank_without_a_way_to_the_others_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UsageError, match="rank 1 of 2 does not know how to reach the others"):
        opkiln.ensure("cpu_adam")


def test_ensure_adds_no_import_to_a_job_that_does_not_call_it() -> None:
    code = """
    import sys
    import opkiln
    from opkiln.loading import loader
    assert not any(name.startswith("opkiln.cluster") for name in sys.modules)
    opkiln.ensure
    assert "opkiln.cluster.ensure" in sys.modules
    assert "torch" not in sys.modules
    """
    child.run(code, forked=False)


# What a leader decides


def hellos(*offers: Offer) -> list[Hello]:
    return [Hello(f"h{n}", n, f"n{n}", (offer,)) for n, offer in enumerate(offers)]


def test_the_rank_that_differs_is_the_one_that_few_agree_with() -> None:
    same, other = (Offer("op", facts=(("torch", version),)) for version in ("2.13", "2.12"))
    found = leading.difference(hellos(same, other, same))
    assert found is not None
    assert found.error == "op op: rank 1 (host h1, pid 1) has another torch"
    assert found.why.splitlines() == ["rank 1 (host h1, pid 1): 2.12", "the other ranks: 2.13"]


def test_a_library_that_most_ranks_have_is_sent_and_none_is_built() -> None:
    have, older, build = (
        Offer("op", digest="d"),
        Offer("op", digest="e"),
        Offer("op", can_build=True),
    )
    assert leading.candidates(0, hellos(build, older, have, have)) == [2, 3, 1, 0]


def test_the_build_that_runs_on_most_cpus_is_made() -> None:
    new = Offer("op", can_build=True, cpu=("avx2", "avx512f"))
    old = Offer("op", can_build=True, cpu=("avx2",))
    assert leading.candidates(0, hellos(new, new, old)) == [2, 0, 1]


def test_ops_are_built_on_different_nodes() -> None:
    two = [Hello(f"h{n}", n, f"n{n // 2}", (Offer("a", can_build=True),) * 2) for n in range(4)]
    plan = leading.first_plan(two)
    assert [task.maker for task in plan.tasks] == [0, 2]


def test_a_maker_that_was_silent_and_went_on_counts() -> None:
    able = [Offer("op", can_build=True)] * 3
    plan = leading.first_plan(hellos(*able))
    plan = leading.next_plan(plan, hellos(*able), frozenset({0}))
    assert plan.tasks[0].tried == (0, 1)
    plan = leading.add_result(plan, 0, 0, Made("d"), hellos(*able)[0])
    assert plan.tasks[0].made == Made("d", by=0)


# Threads as ranks


class Worker:
    """Makes a library of its own, after a moment."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.made = 0

    def make(self, op: int, ship: bool) -> Made:
        self.made += 1
        time.sleep(0.05)
        return Made(f"library of {self.rank}", "bundle", 1)

    def fetch(self, op: int, made: Made) -> Vote:
        return Vote(made.digest)


def test_threads_agree_through_a_store(store: KeyValues) -> None:
    workers = [Worker(rank) for rank in range(4)]
    found: dict[int, JobOutcome] = {}

    def run(rank: int) -> None:
        hello = Hello("h", rank, f"n{rank}", (Offer("op", can_build=True),))
        state = protocol.start(rank, 4, hello, lease=3, deadline=time.monotonic() + 30)
        found[rank] = work.agree(state, channel(store, "secret"), workers[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    assert len({found[rank] for rank in range(4)}) == 1
    assert found[0].choices[0].digest.startswith("library of ")
    assert sum(each.made for each in workers) == 1


def test_ranks_that_name_no_ops_wait_for_each_other(store: KeyValues) -> None:
    found: dict[int, JobOutcome] = {}

    def run(rank: int) -> None:
        state = protocol.start(
            rank, 2, Hello("h", rank, "n", ()), lease=3, deadline=time.monotonic() + 30
        )
        found[rank] = work.agree(state, channel(store), Worker(rank))

    first = threading.Thread(target=run, args=(0,))
    first.start()
    first.join(0.3)
    assert not found
    run(1)
    first.join(30)
    assert found == {0: JobOutcome(), 1: JobOutcome()}
    assert opkiln.ensure(()) == ()


# Settings


def test_secret_of_the_job_is_not_in_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPKILN_JOB_SECRET", "abcdefgh12345678")
    assert settings.job_secret == "abcdefgh12345678"
    value = collect._setting_value("OPKILN_JOB_SECRET", *origin_of("job_secret"))
    assert value.value == "***"


def test_rank_that_comes_before_the_jobs_store_is_there_soon_after_it() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address, port = server.getsockname()
        opened: list[float] = []

        def open_late() -> None:
            time.sleep(0.4)
            opened.append(time.monotonic())
            server.listen()

        thread = threading.Thread(target=open_late)
        thread.start()
        job._await_server(address, port, 20)
        thread.join()
        assert 0 < time.monotonic() - opened[0] < 0.35


def test_rank_ends_its_wait_for_a_store_that_never_comes() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        began = time.monotonic()
        with pytest.raises(ConnectionRefusedError):
            job._await_server(*server.getsockname(), 0.2)
        assert 0.2 <= time.monotonic() - began < 2


class Started:
    """The processes of one start of a job of two ranks, all in this process."""

    def __init__(self, store: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.monkeypatch = store, monkeypatch
        self.known: list[dict[tuple[str, str], int]] = [{}, {}]

    def channel(self, rank: int, *, moved: bool = False) -> Channel:
        self.monkeypatch.setattr(job, "_rounds", self.known[rank])
        place = job.JobPlace(rank, 2, self.store, "job")
        return job.channel(place, "0", 5.0, moved=moved)


def test_ranks_that_are_started_again_do_not_read_what_was_said_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Memory()
    for start in range(3):
        started = Started(store, monkeypatch)
        channels = [started.channel(rank) for rank in range(2)]
        assert channels[0].look(["hello/0"]) == [None]
        channels[0].put("hello/0", f"start {start}")
        assert channels[1].look(["hello/0"]) == [f"start {start}"]


def test_rank_whose_predecessor_never_came_goes_on_where_the_others_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Memory()
    Started(store, monkeypatch).channel(0)  # and rank 1 died before it came
    again = Started(store, monkeypatch)
    early = again.channel(1)
    assert early.look(["outcome"]) == [None]
    again.channel(0).put("hello/0", "again")
    (told,) = early.look(["outcome"])
    assert told == job.MOVED
    assert again.channel(1, moved=True).look(["hello/0"]) == ["again"]


def test_each_store_has_its_own_starts_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "_rounds", {})
    used, new = (SharedDirectory(str(tmp_path / name)) for name in ("used", "new"))
    channel(used, name="job/2").swap("here/0/0", None, "another process")
    for store, number in ((used, 1), (new, 0)):
        job.channel(job.JobPlace(0, 2, store, "job"), "0", 5.0).put("hello/0", "here")
        assert channel(store, name=f"job/2/{number}/0").look(["hello/0"]) == ["here"]


class Stale:
    """Rank 1 of a job of two. Its predecessor never came, so it is in a round that is over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(job, "_rounds", {})
        self.store = Memory()
        self.common = channel(self.store, name="job/2")
        self.common.swap("here/0/0", None, "a process that has ended")
        place = job.JobPlace(1, 2, self.store, "job")
        self.agreeing = _Agreeing(place, 0, timeout=30.0, lease=1.0, signing_key=None)
        self.new = channel(self.store, name="job/2/1/0")

    def rank_0_starts_again(self) -> None:
        assert self.common.swap("round", None, 1) == 1
        channel(self.store, name="job/2/0/0").swap("outcome", None, job.MOVED)


def test_step_at_which_a_rank_did_not_switch_is_one_for_all_ranks_of_the_next_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stale = Stale(monkeypatch)
    handle = Handle(stale.agreeing, [])
    assert [handle.switch(), handle.switch()] == [None, None]
    stale.rank_0_starts_again()
    deadline = time.monotonic() + 20
    while stale.new.look(["hello/1"]) == [None]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert stale.new.look(["switch/0", "switch/1", "switch/2"]) == ["no", "no", None]
    stale.new.swap("outcome", None, JobOutcome())
    assert handle.switch() == ()


def test_rank_that_cannot_take_part_tells_those_of_the_next_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stale = Stale(monkeypatch)
    stale.rank_0_starts_again()
    stale.agreeing.tell_all(ValueError("no such op"))
    (told,) = stale.new.look(["outcome"])
    assert told.error == "rank 1: ValueError: no such op"


def test_two_processes_with_one_rank_are_an_error_and_not_a_chase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Memory()
    first, second = Started(store, monkeypatch), Started(store, monkeypatch)
    first.channel(0)
    second.channel(0)
    with pytest.raises(ClusterError, match="rank 0 of the job is another process now"):
        first.channel(0, moved=True)
