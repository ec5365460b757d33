"""Every interleaving of two and three ranks: they agree, nobody hangs, and mistakes are found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from explorer import STALE, Explorer, Violation, job
from fault_rows import whole

from opkiln.cluster import protocol
from opkiln.cluster.messages import OUTCOME, PLAN, Vote

if TYPE_CHECKING:
    from opkiln.cluster.protocol import State

JOBS: dict[str, dict[str, Any]] = {
    "nothing goes wrong": {"hellos": job(3)},
    "two ops on two nodes": {"hellos": job(2, ops=2)},
    "all have it": {"hellos": job(3, have=(0, 1, 2))},
    "one has it": {"hellos": job(3, have=(2,), cannot=(0, 1))},
    "nobody can build it": {"hellos": job(3, cannot=(0, 1, 2))},
    "it does not compile": {"hellos": job(3), "wrong": True},
    "one disk is full": {"hellos": job(3), "broken": (0,)},
    "every disk is full": {"hellos": job(2), "broken": (0, 1)},
    "one rank cannot use it": {"hellos": job(3), "unfit": (1,)},
    "one rank has other sources": {"hellos": job(3, other=(1,))},
    "the store is in rank 0": {"hellos": job(3), "server": 0},
    "one of two dies": {"hellos": job(2), "deaths": 1},
    "one of three dies": {"hellos": job(3), "deaths": 1},
    "the rank with the store dies": {"hellos": job(2), "deaths": 1, "server": 0},
    "a lease runs out too early": {"hellos": job(2), "stalls": 1},
    "a lease runs out and one dies": {"hellos": job(2), "stalls": 1, "deaths": 1},
    "keys are read one by one": {"hellos": job(2), "torn": True, "deaths": 1},
    "a deadline passes": {"hellos": job(2), "deadlines": 1},
    "two deadlines pass": {"hellos": job(2), "deadlines": 2},
    "a deadline passes and one dies": {"hellos": job(2), "deadlines": 1, "deaths": 1},
    "one never comes": {"hellos": job(3), "absent": (2,), "deadlines": 2, "server": 0},
    "one never comes and one dies": {
        "hellos": job(3),
        "absent": (2,),
        "deadlines": 2,
        "deaths": 1,
        "stalls": 1,
    },
}
# Minutes each.
LARGE: dict[str, dict[str, Any]] = {
    "a deadline passes and a lease runs out": {"hellos": job(2), "deadlines": 1, "stalls": 1},
    "leases of two run out": {"hellos": job(2), "stalls": 3},
    "a lease of three runs out": {"hellos": job(3), "stalls": 1},
    "keys are read one by one and a lease runs out": {"hellos": job(2), "torn": True, "stalls": 1},
    "three ranks read keys one by one": {"hellos": job(3), "torn": True},
    "two of three die": {"hellos": job(3), "deaths": 2},
    "a deadline of three passes": {"hellos": job(3), "deadlines": 1, "server": 0},
    "a lease of three runs out and one dies": {"hellos": job(3), "stalls": 1, "deaths": 1},
}


# Seconds each; what goes wrong alone, or with two ranks, is explored in every run.
LONG = ("one of three dies", "a lease runs out and one dies", "two deadlines pass")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in LONG else []) for name in JOBS]
)
def test_ranks_agree_and_end_in_every_interleaving(name: str) -> None:
    worlds = Explorer(**JOBS[name]).explore()
    print(f"{name}: {worlds} worlds")
    assert worlds > 50


@pytest.mark.parametrize("name", LARGE)
def test_ranks_agree_and_end_in_every_interleaving_of_a_large_job(
    name: str, request: pytest.FixtureRequest
) -> None:
    if not whole(request.config):
        pytest.skip("takes minutes: --full-counts")
    print(f"{name}: {Explorer(**LARGE[name]).explore()} worlds")


# Mistakes that are planted into the machine. Each is found.


def test_an_outcome_that_is_not_taken_from_the_store_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = protocol._apply_swap

    def own(state: State, action: protocol.Swap, answer: Any) -> State:
        return right(state, action, action.value if action.key == OUTCOME else answer)

    monkeypatch.setattr(protocol, "_apply_swap", own)
    with pytest.raises(Violation, match="two ranks have different outcomes"):
        Explorer(hellos=job(2), stalls=1, deadlines=1).explore()


def test_a_lease_by_the_other_ranks_clock_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = protocol._update_heard

    def by_their_clock(state: State, seen: dict[str, Any], now: float) -> State:
        state = right(state, seen, now)
        ahead = 7200  # their clock is two hours ahead of ours
        silent = frozenset(
            rank for rank, each in state.heard if now - (each.since + ahead) >= state.lease
        )
        return state._replace(silent=silent)

    monkeypatch.setattr(protocol, "_update_heard", by_their_clock)
    with pytest.raises(Violation, match="the ranks hang"):
        Explorer(hellos=job(2), deaths=1).explore()


def test_a_beat_that_is_compared_with_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    # A rank that takes any beat in the store for a sign of life.
    right = protocol._update_heard

    def any_beat(state: State, seen: dict[str, Any], now: float) -> State:
        forgotten = tuple((rank, each._replace(beat=STALE)) for rank, each in state.heard)
        return right(state._replace(heard=forgotten), seen, now)

    monkeypatch.setattr(protocol, "_update_heard", any_beat)
    with pytest.raises(Violation, match="the ranks hang"):
        Explorer(hellos=job(2), deaths=1).explore()


def test_a_plan_that_is_written_without_comparing_is_found() -> None:
    class Careless(Explorer):
        def may_swap(self, action: protocol.Swap, now: Any) -> bool:
            return action.key == PLAN or super().may_swap(action, now)

    with pytest.raises(Violation, match="a library was replaced by another"):
        Careless(hellos=job(3), stalls=1).explore()


def test_a_vote_for_a_library_that_was_not_fetched_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def at_once(state: State, action: protocol.FetchOp) -> State:
        return protocol._add_vote(state, action.op, Vote(action.made.digest))

    monkeypatch.setattr(protocol, "_apply_fetch", at_once)
    with pytest.raises(Violation, match="does not have the library"):
        Explorer(hellos=job(2), unfit=(1,)).explore()


def test_a_rank_that_waits_for_a_dead_reporter_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = protocol._list_watched

    def trusting(state: State) -> list[int]:
        return [rank for rank in right(state) if rank != state.reporter or rank == state.leader]

    monkeypatch.setattr(protocol, "_list_watched", trusting)
    with pytest.raises(Violation, match="the ranks hang"):
        Explorer(hellos=job(3), absent=(2,), deadlines=1, deaths=1).explore()


def test_a_rank_that_stops_looking_after_its_vote_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = protocol._apply_look

    def deaf(state: State, seen: dict[str, Any], now: float) -> State:
        if state.voted and state.leader != state.rank:
            seen = {**seen, OUTCOME: None}
        return right(state, seen, now)

    monkeypatch.setattr(protocol, "_apply_look", deaf)
    # Otherwise it would take the lead when the leader has ended, and find the outcome so.
    monkeypatch.setattr(protocol, "_list_watched", lambda _: [])
    with pytest.raises(Violation, match=r"the ranks (hang|do not come to an end)"):
        Explorer(hellos=job(2)).explore()


def test_a_store_that_ends_with_the_first_rank_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = protocol.start

    def hasty(*args: Any, **kwargs: Any) -> State:
        return right(*args, **{**kwargs, "serves": False})

    monkeypatch.setattr(protocol, "start", hasty)
    with pytest.raises(Violation, match="the store ended before a rank had the outcome"):
        Explorer(hellos=job(2), server=0).explore()
