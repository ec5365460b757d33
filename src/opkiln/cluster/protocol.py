"""One rank's part in the agreement, as a pure state machine: no clock, no thread, no store in it.

    action = next_action(state)                         ask the store, start work, wait, or end
    state  = apply_answer(state, action, answer, now)   after the store has answered
    state  = apply_done(state, done)                    after a piece of work has ended

The driver (``work.py``; in tests, an explorer of all interleavings) does one action after the
other. ``now`` is the time of this rank's monotonic clock, read before the store is asked: a rank
that is stopped in between must not take the others for silent.

What makes it safe:
- ``outcome`` is written once, by compare-and-set, and every rank takes the value in the store. So
  all ranks that end with an outcome have the same one, also if some were wrongly believed dead.
- An outcome with libraries needs the votes of all ranks, and a rank votes for a library only when
  it has it. So each rank that reads such an outcome can open its libraries.
- A plan replaces only the plan that it was made from. A leader that was stopped for a while finds
  another leader in the store and follows it.

Leases save time only. A rank is silent if its beat has not changed for a lease, measured from when
*this* rank saw it change, by *this* rank's clock. A rank that is wrongly believed dead costs a
second build; its result still counts if it comes first.

A rank whose time is up does not read the records of all other ranks: if each did, the reads would
grow with the square of the ranks. The first such rank takes ``late``, reads the records, and writes
the outcome for all. The others go on meanwhile, and take its place if it falls silent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from opkiln.cluster import leading
from opkiln.cluster.messages import (
    LATE,
    LEAD,
    OUTCOME,
    PLAN,
    Ballot,
    Hello,
    JobOutcome,
    Made,
    Vote,
    WorkPlan,
    key_of,
    values_by_rank,
)

T = TypeVar("T")

# Actions


class Put(NamedTuple):
    """Write a key that only this rank writes. The answer is None."""

    key: str
    value: Any


class Swap(NamedTuple):
    """Compare and set. None as the expected value: the key is not there. The answer is the value
    that the key has afterwards."""

    key: str
    expected: Any
    value: Any


class Look(NamedTuple):
    """Read keys without waiting. The answer has the value of each key, or None."""

    keys: tuple[str, ...]


class MakeOp(NamedTuple):
    """Start to build an op, or to send this rank's library of it. ``Done`` tells when it ends."""

    op: int
    ship: bool


class FetchOp(NamedTuple):
    """Start to get a library from the store of this node or from the job's. ``Done`` follows."""

    op: int
    made: Made


class Pause(NamedTuple):
    """Nothing to do. Look again in a moment, or when a piece of work ends."""


class End(NamedTuple):
    """The agreement is reached."""

    outcome: JobOutcome


Action = Put | Swap | Look | MakeOp | FetchOp | Pause | End


class Done(NamedTuple):
    """The end of a piece of work: a ``Made`` of Make, or a ``Vote`` of Fetch."""

    op: int
    got: Made | Vote


class LastBeat(NamedTuple):
    """The last beat of a rank, and when this rank saw it change."""

    beat: int
    since: float


# The phases of a rank
HELLO, CLAIM, WORK, EXPIRE, REPORT, LEAVE, LINGER, ENDED = range(8)


class State(NamedTuple):
    """All that a rank knows. Made by ``start``."""

    rank: int
    world: int
    lease: float
    deadline: float
    timeout: float  # what the deadline was made from, for messages
    serves: bool  # the job's store is in this process, and ends with it
    hello: Hello
    phase: int = HELLO
    looked: bool = False  # whether this rank has looked since it last paused
    leader: int | None = None
    reporter: int | None = None  # who says that the time is up; known to ranks whose own time is up
    plan: WorkPlan | None = None
    outcome: JobOutcome | None = None
    started: frozenset[tuple[str, int]] = frozenset()  # ("make" or "fetch", op)
    made: tuple[Made | None, ...] = ()  # what this rank has made, of each op
    votes: tuple[Vote | None, ...] = ()
    voted: bool = False
    heard: tuple[tuple[int, LastBeat], ...] = ()  # of the ranks that are watched
    silent: frozenset[int] = frozenset()  # those of them that have not beaten for a lease
    # Read by a leader
    hellos: tuple[Hello | None, ...] = ()
    ballots: tuple[Ballot | None, ...] = ()
    left: frozenset[int] = frozenset()


def start(
    rank: int,
    world: int,
    hello: Hello,
    *,
    lease: float,
    deadline: float,
    timeout: float = 0.0,
    serves: bool = False,
) -> State:
    """The state of a rank that has just called ``ensure``. ``deadline`` is a time of its clock."""
    ops = len(hello.offers)
    return State(
        rank, world, lease, deadline, timeout, serves, hello,
        made=(None,) * ops, votes=(None,) * ops,
        hellos=(None,) * world, ballots=(None,) * world,
    )  # fmt: skip


# The next action


def next_action(state: State) -> Action:
    """The next action. Asking again without an answer in between gives the same one."""
    if state.phase == ENDED:
        assert state.outcome is not None
        return End(state.outcome)
    if state.phase == HELLO:
        return Put(key_of("hello", state.rank), state.hello)
    if state.phase == CLAIM:
        return Swap(LEAD, state.leader, state.rank)
    if state.phase == EXPIRE:
        return Swap(LATE, state.reporter, state.rank)
    if state.phase == LEAVE:
        return Put(key_of("left", state.rank), 1)
    if state.phase == REPORT and state.looked:
        return Swap(OUTCOME, None, leading.late_outcome(
            state.rank, state.timeout, state.hellos, state.plan, state.ballots
        ))  # fmt: skip
    if state.phase == WORK and (action := _work(state)) is not None:
        return action
    return Pause() if state.looked else Look(_list_keys(state))


def _work(state: State) -> Action | None:
    """The action that follows from what is known; None if there is none."""
    plan = state.plan
    for op, task in enumerate(() if plan is None else plan.tasks):
        assert plan is not None
        if (result := state.made[op]) is not None:
            told = leading.add_result(plan, op, state.rank, result, state.hello)
            if told is not plan:
                return Swap(PLAN, plan, told)
        if task.maker == state.rank and ("make", op) not in state.started:
            return MakeOp(op, plan.ship)
        if task.made and state.votes[op] is None and ("fetch", op) not in state.started:
            return FetchOp(op, task.made)
    if not state.voted and None not in state.votes:
        return Put(key_of("vote", state.rank), state.votes)
    return _lead(state) if state.leader == state.rank else None


def _lead(state: State) -> Swap | None:
    """The next record that a leader must write; None if there is none."""
    hellos = [each for each in state.hellos if each is not None]
    if len(hellos) < state.world:
        return None
    if state.plan is None:
        if (failure := leading.difference(hellos)) is not None:
            return Swap(OUTCOME, None, failure)
        return Swap(PLAN, None, leading.first_plan(hellos))
    plan = leading.next_plan(state.plan, hellos, state.silent)
    if plan is not state.plan:
        return Swap(PLAN, state.plan, plan)
    if any(task.made is None for task in plan.tasks):
        return None
    ballots = [each for each in state.ballots if each is not None]
    if len(ballots) == state.world:
        return Swap(OUTCOME, None, leading.count_votes(plan, hellos, ballots))
    missing = _missing(state.ballots)
    # Ranks that live are waited for first: what they fetch serves the next start of the job.
    if set(missing) <= state.silent:
        known = dict(enumerate(hellos))
        return Swap(OUTCOME, None, leading.lost_outcome(missing, known, state.lease))
    return None


def _list_keys(state: State) -> tuple[str, ...]:
    """The keys that matter to this rank now."""
    if state.phase == LINGER:
        left = state.left | {state.rank}
        staying = [rank for rank in range(state.world) if rank not in left]
        return (*_keys("left", staying), *_keys("beat", staying))
    keys = [OUTCOME, LEAD, PLAN]
    if state.phase == REPORT or state.leader == state.rank:
        keys += _keys("hello", _missing(state.hellos))
        if _all_made(state):
            keys += _keys("vote", _missing(state.ballots))
    if state.phase == REPORT:
        return tuple(keys)
    return (*keys, *_keys("beat", _list_watched(state)))


def _keys(kind: str, ranks: Iterable[int]) -> list[str]:
    return [key_of(kind, rank) for rank in ranks]


def _missing(told: Sequence[object]) -> list[int]:
    """The ranks that have not told it yet."""
    return [rank for rank, each in enumerate(told) if each is None]


def _all_made(state: State) -> bool:
    """Whether all ops are made, so that only votes are missing."""
    return state.plan is not None and all(task.made is not None for task in state.plan.tasks)


def _list_watched(state: State) -> list[int]:
    """The ranks whose silence would matter to this one."""
    watched = {state.leader, state.reporter}
    if state.leader == state.rank and _all_made(state):
        watched.update(_missing(state.ballots))
    elif state.leader == state.rank:
        # Also the ranks that it has watched before, such as makers that were replaced: if one is
        # dead, that is known by the time of the vote.
        tasks = () if state.plan is None else state.plan.tasks
        watched |= {rank for task in tasks for rank in task.tried}
        watched |= {rank for rank, _ in state.heard}
    return sorted(rank for rank in watched if rank is not None and rank != state.rank)


# Answers


def apply_answer(state: State, action: Action, answer: Any, now: float) -> State:
    """The state after an action. ``answer`` is the store's."""
    if isinstance(action, Put):
        return _apply_put(state)
    if isinstance(action, Swap):
        return _apply_swap(state, action, answer)
    if isinstance(action, MakeOp):
        return state._replace(started=state.started | {("make", action.op)})
    if isinstance(action, FetchOp):
        return _apply_fetch(state, action)
    if isinstance(action, Pause):
        return state._replace(looked=False)
    assert isinstance(action, Look)
    return _apply_look(state, dict(zip(action.keys, answer, strict=True)), now)


def _apply_put(state: State) -> State:
    if state.phase == HELLO:
        return state._replace(phase=CLAIM)
    if state.phase == LEAVE:
        return state._replace(phase=LINGER if state.serves else ENDED, looked=False)
    return state._replace(voted=True)


def _apply_swap(state: State, action: Swap, answer: Any) -> State:
    if action.key == LEAD:
        if answer != state.rank:
            return _follow(state, answer)._replace(phase=WORK)
        # Earlier beats of the leader still count: it may also be a maker or a voter.
        return state._replace(phase=WORK, leader=answer, looked=False)
    if action.key == LATE:
        phase = REPORT if answer == state.rank else WORK
        return state._replace(phase=phase, reporter=answer, looked=False)
    if action.key == PLAN:
        return state._replace(plan=answer, looked=False)
    return state._replace(outcome=answer, phase=LEAVE)


def _follow(state: State, leader: int | None) -> State:
    """The state with another leader: other ranks are watched, and none was heard yet."""
    return state._replace(leader=leader, heard=(), silent=frozenset(), looked=False)


def _apply_fetch(state: State, action: FetchOp) -> State:
    """The state after a fetch was started. Without a library, or with one that this rank has, it
    votes at once."""
    op, made = action.op, action.made
    own = state.made[op]
    here = {state.hello.offers[op].digest, "" if own is None else own.digest}
    if not made.digest:
        return _add_vote(state, op, Vote(reason=made.reason))
    if made.digest in here:
        return _add_vote(state, op, Vote(made.digest))
    return state._replace(started=state.started | {("fetch", op)})


def _add_vote(state: State, op: int, vote: Vote) -> State:
    return state._replace(votes=(*state.votes[:op], vote, *state.votes[op + 1 :]))


def apply_done(state: State, done: Done) -> State:
    """The state after a piece of work."""
    op, got = done
    if isinstance(got, Vote):
        return _add_vote(state, op, got)
    return state._replace(made=(*state.made[:op], got, *state.made[op + 1 :]))


def _apply_look(state: State, seen: dict[str, Any], now: float) -> State:
    state = _update_heard(state._replace(looked=True), seen, now)
    if state.phase == LINGER:
        left = {rank for rank, value in values_by_rank(seen, "left") if value is not None}
        state = state._replace(left=state.left | left)
        assert state.outcome is not None
        gone = state.left | state.silent | {state.rank, *state.outcome.lost}
        staying = set(range(state.world)) - gone
        # Ranks that still beat have a lease to read the outcome, also after the deadline.
        is_late = now >= state.deadline + state.lease
        return state._replace(phase=ENDED) if not staying or is_late else state
    if seen[OUTCOME] is not None:
        return state._replace(outcome=seen[OUTCOME], phase=LEAVE)
    voting = _all_made(state)
    state = _read(state, seen)
    if state.phase == REPORT:
        # If the last op was made meanwhile, votes are missing: they are read, too.
        return state._replace(looked=voting == _all_made(state))
    if now >= state.deadline and (state.reporter is None or state.reporter in state.silent):
        return state._replace(phase=EXPIRE, looked=False)
    leader = seen[LEAD]
    if leader != state.leader:
        return _follow(state, leader)
    if leader != state.rank and leader in state.silent:
        return state._replace(phase=CLAIM)
    return state


def _update_heard(state: State, seen: dict[str, Any], now: float) -> State:
    """The state with the beats of the watched ranks. A newly watched rank's lease starts now."""
    before = dict(state.heard)
    heard = []
    for rank, value in values_by_rank(seen, "beat"):
        beat = -1 if value is None else value
        known = before.get(rank)
        if known is None or known.beat != beat:
            known = LastBeat(beat, now)
        heard.append((rank, known))
    silent = frozenset(rank for rank, each in heard if now - each.since >= state.lease)
    return state._replace(heard=tuple(heard), silent=silent)


def _read(state: State, seen: dict[str, Any]) -> State:
    """The state with the plan, hellos and votes that were read."""
    hellos = {rank: each for rank, each in values_by_rank(seen, "hello") if each is not None}
    ballots = {rank: each for rank, each in values_by_rank(seen, "vote") if each is not None}
    return state._replace(
        plan=state.plan if seen[PLAN] is None else seen[PLAN],
        hellos=_update(state.hellos, hellos),
        ballots=_update(state.ballots, ballots),
    )


def _update(before: tuple[T | None, ...], read: Mapping[int, T]) -> tuple[T | None, ...]:
    """One value for each rank, updated by those that were read. Most looks read none of them."""
    return tuple(read.get(rank, each) for rank, each in enumerate(before)) if read else before
