"""Real ranks on two nodes with stores of their own: one build, one fetch per node, one library."""

from __future__ import annotations

import signal
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from ranks import Node, run

if TYPE_CHECKING:
    from pathlib import Path


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


def test_rank_with_other_sources_is_named_on_every_rank(nodes: list[Node], shared: str) -> None:
    nodes[1].source.write_text('extern "C" int value() { return 24; }\n')
    ended = run(nodes, 2, {0: {}}, store=shared)
    for each in ended:
        assert "op value: rank 2 (host " in each.said["error"], each
        assert "have another set of sources" in each.said["error"]
    assert [node.builds() for node in nodes] == [0, 0]


def test_node_without_a_compiler_gets_the_library(tmp_path: Path, shared: str) -> None:
    nodes = [Node(tmp_path / "a", compilers=False), Node(tmp_path / "b")]
    ended = run(nodes, 2, store=shared)
    assert [each.code for each in ended] == [0] * 4, ended
    assert len({each.choice[0] for each in ended}) == 1
    assert [node.builds() for node in nodes] == [0, 1]


def test_rank_with_the_least_cpu_builds_and_its_library_serves_all(
    nodes: list[Node], shared: str
) -> None:
    nodes[1].variables["OPKILN_CPU"] = "x86-64-v2"
    ended = run(nodes, 2, store=shared)
    assert [each.code for each in ended] == [0] * 4, ended
    assert len({each.choice[0] for each in ended}) == 1
    assert [node.builds() for node in nodes] == [0, 1]


def test_source_that_does_not_compile_is_an_error_on_every_rank(
    nodes: list[Node], shared: str
) -> None:
    for node in nodes:
        node.source.write_text("int value( { return 23; }\n")
    ended = run(nodes, 2, store=shared)
    for each in ended:
        assert "op value cannot be used by all ranks" in each.said["error"], each
        assert "expected" in each.said["error"]  # what g++ says
        assert each.said["seconds"] < 20


def test_rank_that_never_comes_is_named_within_the_deadline(nodes: list[Node], shared: str) -> None:
    from ranks import Job

    job = Job(store=shared, timeout=3)
    for rank in (0, 2):
        job.start(nodes[rank // 2], rank, 3)
    for each in job.end(limit=30):
        assert "rank 1 did not call ensure() within 3 s" in each.said["error"]
        assert each.said["seconds"] < 6


# The steps of the protocol at which a rank is killed, and whether it is the one that builds.
STEPS = (
    "Put hello/0", "Swap lead", "Swap plan", "before make", "before _send", "after _send",
    "after make", "Put result/0/0", "Put vote/0", "Swap outcome", "Put left/0",
)  # fmt: skip
FEW = ("Swap plan", "after make", "Put vote/0", "Put left/0")


@pytest.mark.parametrize("step", STEPS)
def test_killed_leader_or_builder_is_named_and_its_work_is_done(
    step: str, nodes: list[Node], shared: str, request: pytest.FixtureRequest
) -> None:
    from fault_rows import whole
    from ranks import Job

    if step not in FEW and not whole(request.config):
        pytest.skip("every fourth step: --full-counts")
    job = Job(store=shared, timeout=15)
    # Rank 0 comes first, so it leads and builds.
    job.start(nodes[0], 0, 3, at=step, signal=signal.SIGKILL)
    job.start(nodes[1], 1, 3, at="Put hello/1", pause=0.7)
    job.start(nodes[1], 2, 3, at="Put hello/2", pause=0.7)
    killed, *others = job.end(limit=60)
    assert killed.code == -signal.SIGKILL
    for node in nodes:
        node.verify()
    if step in ("Swap outcome", "Put left/0"):
        # It had voted. Whoever reads the outcome, or takes the lead, finds all votes.
        assert len({each.choice[0] for each in others}) == 1
    elif step == "Put hello/0":
        for each in others:
            assert "rank 0 did not call ensure() within 15 s" in each.said["error"]
    else:
        for each in others:
            assert "rank 0 (host " in each.said["error"], each
            assert "died, stopped or lost the network" in each.said["error"]
            assert each.said["seconds"] < 13
        # The next start of the job finds the op built.
        again = run(nodes, 2, store=f"{shared}-again")
        assert len({each.choice[0] for each in again}) == 1
        assert all(each.choice[2] != "built" for each in again)
    assert sum(node.builds() for node in nodes) in (1, 2) or step == "Put hello/0"
