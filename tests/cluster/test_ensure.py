"""Real ranks on two nodes with stores of their own: one build, one fetch per node, one library."""

from __future__ import annotations

import signal
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from fault_rows import whole
from ranks import Job, Node, run, skewed
from results import keep, spread
from sample.levels import LOW
from sample.quiet import slowdown, within

from opkiln.settings import LAYOUT
from opkiln.store import tuned

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ranks import Ended

LEASE = 3.0

pytestmark = pytest.mark.timed


@pytest.fixture
def nodes(tmp_path: Path) -> list[Node]:
    return [Node(tmp_path / "a"), Node(tmp_path / "b")]


@pytest.fixture
def shared(tmp_path: Path) -> str:
    return str(tmp_path / "shared")


def test_cold_job_builds_once_fetches_once_per_node_and_a_warm_one_does_neither(
    nodes: list[Node], shared: str
) -> None:
    cold = run(nodes, 2, store=f"{shared}/cold")
    assert [each.code for each in cold] == [0] * 4, cold
    assert len({each.choice[0] for each in cold}) == 1
    assert Counter(each.choice[2] for each in cold) == {
        "built": 1, "fetched": 1, "found on this node": 2,
    }  # fmt: skip
    assert sorted(node.builds() for node in nodes) == [0, 1]
    assert [len(node.entries()) for node in nodes] == [1, 1]
    warm = run(nodes, 2, store=f"{shared}/warm")
    assert [each.choice for each in warm] == [(cold[0].choice[0], "", "cached")] * 4
    assert sorted(node.builds() for node in nodes) == [0, 1]


def test_choices_of_rank_0_are_taken_by_all_ranks(nodes: list[Node], shared: str) -> None:
    """Those for the ops of the call; a rank's own choice for the same question is replaced."""
    run(nodes, 1, store=f"{shared}/first")
    (dist,) = {each["distribution"] for each in nodes[0].entries()}
    asked = tuned.Question(dist, "value", "a model", "float32[8]", "", ("A=1", "A=2"), "sources")
    roots = [str(node.cache / LAYOUT) for node in nodes]
    tuned.keep(roots[0], ours := tuned.TunedChoice(asked, "A=2", {"A=1": 2.0, "A=2": 1.0}))
    tuned.keep(roots[0], tuned.TunedChoice(asked._replace(op="other"), "A=2", {"A=2": 1.0}))
    tuned.keep(roots[1], tuned.TunedChoice(asked, "A=1", {"A=1": 1.0, "A=2": 2.0}))
    ended = run(nodes, 1, store=f"{shared}/second")
    assert [each.code for each in ended] == [0, 0], ended
    assert list(tuned.read_choices(roots[1])) == [ours]


def test_rank_with_other_sources_is_named_on_every_rank(nodes: list[Node], shared: str) -> None:
    nodes[1].source.write_text('extern "C" int value() { return 25; }\n')
    ended = run(nodes, 2, {0: {}}, store=shared)
    for each in ended:
        assert "op value: rank 2 (host " in each.said["error"], each
        assert "have another set of sources" in each.said["error"]
    assert [node.builds() for node in nodes] == [0, 0]


def repeated(
    name: str, request: pytest.FixtureRequest, where: Path, one: Callable[[Path], list[Ended]]
) -> None:
    """A fault of a node, 20 times with --full-counts: all ranks agree on one library each time."""
    many = whole(request.config)
    seconds = []
    for number in range(20 if many else 1):
        (where / str(number)).mkdir()
        ended = one(where / str(number))
        assert [each.code for each in ended] == [0] * len(ended), ended
        assert len({each.choice[0] for each in ended}) == 1, ended
        assert all(each.choice[0] for each in ended), ended
        seconds.append(max(each.said["seconds"] for each in ended))
    row = {"runs": len(seconds), "runs_in_which_ranks_differ": 0, "seconds": spread(seconds)}
    request.node.user_properties.append(("note", f"{name}: {row}"))
    if many:
        keep("faults", name, row)


def test_node_without_a_compiler_gets_the_library(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    def one(where: Path) -> list[Ended]:
        nodes = [Node(where / "a", compilers=False), Node(where / "b")]
        ended = run(nodes, 2, store=str(where / "shared"))
        assert [node.builds() for node in nodes] == [0, 1]
        return ended

    repeated("a node without a compiler", request, tmp_path, one)


def test_rank_with_the_least_cpu_builds_and_its_library_serves_all(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    def one(where: Path) -> list[Ended]:
        nodes = [Node(where / "a"), Node(where / "b")]
        nodes[1].variables["OPKILN_CPU"] = LOW
        ended = run(nodes, 2, store=str(where / "shared"))
        assert [node.builds() for node in nodes] == [0, 1]
        return ended

    repeated("a node with an older CPU", request, tmp_path, one)


@pytest.mark.parametrize("hours", [2, pytest.param(-2, marks=pytest.mark.full)])
def test_clock_and_file_times_of_a_node_that_are_two_hours_wrong_change_nothing(
    hours: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Once of the node that builds, once of the one that fetches; then with a builder that dies,
    and a clock that is as wrong to the other side."""
    clock = skewed(tmp_path, hours)

    def two(where: Path, wrong: int) -> list[Node]:
        nodes = [Node(where / "a"), Node(where / "b")]
        nodes[wrong].variables |= clock
        nodes[wrong].shift_times(hours)
        return nodes

    def one(where: Path) -> list[Ended]:
        wrong = int(where.name) % 2
        nodes = two(where, wrong)
        ended = run(nodes, 2, store=str(where / "shared"))
        apart = ended[2 * wrong].said["now"] - ended[2 - 2 * wrong].said["now"]
        assert abs(apart - 3600 * hours) < 60  # it is wrong
        assert [node.builds() for node in nodes] == [1, 0]
        assert Counter(each.choice[2] for each in ended) == {
            "built": 1, "fetched": 1, "found on this node": 2,
        }  # fmt: skip
        warm = run(nodes, 1, store=str(where / "again"))
        assert {each.choice[2] for each in warm} == {"cached"}
        return ended

    repeated(f"a clock {hours:+d} h", request, tmp_path, one)
    nodes = two(tmp_path, 1)
    nodes[1].variables["SKEW_SECONDS"] = str(-3600 * hours)
    nodes[1].shift_times(-2 * hours)
    at_once = {"at": "before _send", "signal": signal.SIGKILL, "mark": str(tmp_path / "mark")}
    killed, other = run(nodes, 1, {0: at_once}, store=str(tmp_path / "killed"), lease=LEASE)
    assert killed.code == -signal.SIGKILL
    assert "rank 0 (host " in other.said["error"], other
    named_after = other.said["ended"] - float((tmp_path / "mark").read_text())
    assert named_after < (LEASE + 3) * slowdown()


def test_job_that_is_started_again_ignores_what_its_ranks_said_before(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """As torchrun does: the store is the same. The first time a rank never comes, and the launcher
    kills all; the second time another one dies before it votes."""

    def one(where: Path) -> list[Ended]:
        nodes, store = [Node(where / "a"), Node(where / "b")], str(where / "shared")
        first = Job(store=store)
        for rank in range(3):
            first.start(nodes[rank // 2], rank, 4)
        said = (where / "shared").glob
        assert within(30, lambda: len(list(said("*+hello+*"))) == 3)
        first.kill()
        # The rank that did not come finds its place free, in a round that is over.
        second = Job(store=store, lease=LEASE)
        struck = {0: {"at": "Put vote/0", "signal": signal.SIGKILL}}
        for rank in (3, 0, 1, 2):
            late = [] if rank == 3 else [{"at": f"Put hello/{rank}", "pause": 0.5}]
            second.start(nodes[rank // 2], rank, 4, also=late, **struck.get(rank, {}))
        came, killed, *others = second.end()
        assert killed.code == -signal.SIGKILL
        for each in (came, *others):
            assert "rank 0 (host " in each.said["error"], each
        return run(nodes, 2, store=store)

    repeated("a job that is started again, twice", request, tmp_path, one)


def test_source_that_does_not_compile_is_an_error_on_every_rank(
    nodes: list[Node], shared: str
) -> None:
    for node in nodes:
        node.source.write_text("int value( { return 23; }\n")
    ended = run(nodes, 2, store=shared)
    for each in ended:
        assert "op value cannot be used by all ranks" in each.said["error"], each
        assert "expected" in each.said["error"]  # what g++ says


def test_rank_that_never_comes_is_named_within_the_deadline(nodes: list[Node], shared: str) -> None:
    job = Job(store=shared, timeout=3)
    for rank in (0, 2):
        job.start(nodes[rank // 2], rank, 3)
    for each in job.end(limit=30):
        assert "rank 1 did not call ensure() within 3 s" in each.said["error"]
        assert each.said["seconds"] < 6 * slowdown()
