"""Jobs of hundreds of ranks, simulated: the shipped state machine in bench/cluster_scale.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from opkiln.cluster import protocol, work
from opkiln.cluster.messages import OUTCOME
from opkiln.cluster.stores import Torch

BENCH = Path(__file__).resolve().parents[2] / "bench" / "cluster_scale.py"


@pytest.fixture(scope="module")
def scale() -> Any:
    found = importlib.util.spec_from_file_location("cluster_scale", BENCH)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["cluster_scale"] = module
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cold(scale: Any) -> Any:
    return scale.simulated(64, scale.CASES[1])


def test_cold_job_of_many_ranks_builds_once_and_fetches_once_per_node(cold: Any) -> None:
    assert (cold["agreed"], cold["errors"]) == (64, {})
    assert (cold["builds"], cold["fetches"]) == (1, 64 // 8 - 1)


def test_store_is_busy_less_than_half_of_the_time(cold: Any) -> None:
    assert cold["store_busy_s"] < cold["seconds"] / 2


def test_requests_grow_with_the_ranks_and_not_with_their_square(scale: Any) -> None:
    warm = scale.CASES[0]
    few, many = (scale.simulated(ranks, warm)["requests"] / ranks for ranks in (16, 128))
    assert many < 2 * few


def test_error_at_the_deadline_comes_in_time_and_its_requests_grow_with_the_ranks(
    scale: Any,
) -> None:
    few, many = (scale.simulated(ranks, scale.CASES[3]) for ranks in (16, 128))
    for row, ranks in ((few, 16), (many, 128)):
        named = f"rank {ranks - 1} did not call ensure() within 20 s"
        assert row["errors"] == {named: ranks - 1, "missing": 1}
        assert row["late_s"] < 1
    assert many["requests"] < 8 * few["requests"]


def test_rank_that_is_not_answered_in_time_gives_up_and_the_simulation_says_so(
    scale: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale, "_REQUEST", 0.5)  # a store of two requests a second
    row = scale.simulated(64, scale.CASES[0])
    assert row["agreed"] < 64
    assert row["errors"]["the job's store does not answer"] > 0


def test_rank_that_waits_asks_the_store_twice_at_a_look(scale: Any) -> None:
    server = scale.Server()
    store = Torch(server)
    for key in ("lead", "plan", "beat/0"):
        server.set(key, b"- 0")
    keys = (OUTCOME, "lead", "plan", "beat/0")
    first = store.look(keys)
    server.asked = []
    assert store.look(keys) == first == [None, b"- 0", b"- 0", b"- 0"]
    assert len(server.asked) == 2


def test_absent_keys_of_many_ranks_are_not_asked_for_one_by_one(scale: Any) -> None:
    server = scale.Server()
    for rank in (3, 70):
        Torch(server).put(f"job/vote/{rank}", b"- 0")
    store = Torch(server)
    keys = [f"job/vote/{rank}" for rank in range(200)]
    server.asked = []
    found = dict(zip(keys, store.look(keys), strict=True))
    assert [key for key, value in found.items() if value] == ["job/vote/3", "job/vote/70"]
    # The list is there, its contents, both keys are there, their values.
    assert len(server.asked) == 4


def test_follower_reads_no_key_for_each_rank(scale: Any) -> None:
    state = protocol.start(3, 100_000, scale.hello_of(3, False), lease=6, deadline=99)
    state = state._replace(phase=protocol.WORK, leader=0)
    action = protocol.next_action(state)
    assert isinstance(action, protocol.Look)
    assert len(action.keys) == 4


def test_pause_of_many_ranks_leaves_the_store_time() -> None:
    looks = max(100_000 / work.choose_pause(100_000, waited) for waited in (0, 1, 100))
    assert 4 * looks < 42_000  # four requests for each
