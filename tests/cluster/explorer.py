"""Explores every interleaving of a few ranks that run the shipped state machine.

The store, the clocks and the beats are simulated; ``opkiln.cluster.protocol`` is the real one. A
step is one access to the store by one rank, the end of a piece of work, the passing of a lease on
one rank's clock, a beat, a death, or a deadline. From each world that can be reached, every step
that is possible is taken once.

Clocks are relative. Each rank's clock stands at 0, and what it remembers moves into the past; a
lease is 1. So a world is the same at any time of day, and there are finitely many.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from opkiln.cluster import protocol
from opkiln.cluster.messages import PLAN, Hello, JobOutcome, Made, Offer, Vote
from opkiln.cluster.protocol import Done, End, FetchOp, Look, MakeOp, Pause, Put, State, Swap

if TYPE_CHECKING:
    from collections.abc import Iterator

NEVER = 10**6  # a deadline that has not come
GONE = JobOutcome(error="the store is gone")
STALE = 7  # a beat that is not the newest one


class Rank(NamedTuple):
    """One process."""

    number: int
    state: State
    alive: bool = True
    jobs: tuple[MakeOp | FetchOp, ...] = ()
    ended: JobOutcome | None = None
    read: tuple[Any, ...] = ()  # the values of the first keys of a look that is not at its end


class World(NamedTuple):
    """Everything at one moment. Ranks and the store's contents are numbers of ``Table``s: there are
    far fewer of them than worlds, and what follows from each is worked out once."""

    ranks: tuple[int, ...]
    store: int
    deaths: int  # how many may still happen
    stalls: int  # how many leases may still run out although the other rank lives
    deadlines: int
    trouble: bool  # whether any of these has happened


class Table:
    """Numbers for values."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.numbers: dict[Any, int] = {}

    def number(self, value: Any, key: Any = None) -> int:
        key = value if key is None else key
        if (known := self.numbers.get(key)) is None:
            known = self.numbers[key] = len(self.values)
            self.values.append(value)
        return known


class Moves(NamedTuple):
    """What can happen to a rank."""

    lives: bool
    ends: tuple[tuple[str, int], ...]  # of each piece of work: its name, and the rank after it
    fresh: tuple[int, ...]  # the ranks that it has just heard of
    overdue: frozenset[int]  # the ranks that it has not heard of for a lease
    later: int | None  # this rank after a lease has passed on its clock
    dead: int
    late: int  # this rank after its deadline


def _with(ranks: tuple[int, ...], at: int, rank: int) -> tuple[int, ...]:
    return (*ranks[:at], rank, *ranks[at + 1 :])


class Violation(AssertionError):
    """A property does not hold. The message has the steps that lead there."""


@dataclass(kw_only=True)
class Explorer:
    """A job, and what may happen to it."""

    hellos: tuple[Hello, ...]
    deaths: int = 0
    stalls: int = 0
    deadlines: int = 0
    server: int | None = None  # the rank whose process has the store; None: a process of its own
    absent: tuple[int, ...] = ()  # ranks that never come
    unfit: tuple[int, ...] = ()  # ranks that cannot use what others made
    broken: tuple[int, ...] = ()  # ranks whose builds fail for a reason of their machine
    wrong: bool = False  # the source does not compile
    torn: bool = False  # a look reads one key after the other, and others write in between
    machine: Any = protocol  # the module, or one with a mistake planted
    seen: dict[World, tuple[World, str] | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.all_ranks, self.stores = Table(), Table()
        self.gone = self.stores.number(None, "the process that served it has ended")
        self.accesses: dict[tuple[int, int], tuple[str, int, int]] = {}
        self.of_rank: dict[int, Moves] = {}

    def explore(self, most: int = 10**7) -> int:
        """Visit every world; the number of them. Raises Violation."""
        first = self.first()
        self.seen = {first: None}
        front = [first]
        while front:
            world = front.pop()
            self.check(world)
            for name, after in self.steps(world):
                if after not in self.seen:
                    self.seen[after] = (world, name)
                    front.append(after)
            assert len(self.seen) <= most, f"more than {most} worlds"
        self.check_ends()
        return len(self.seen)

    def first(self) -> World:
        started = [
            self.machine.start(
                rank, len(self.hellos), hello, lease=1, deadline=NEVER, serves=rank == self.server
            )
            for rank, hello in enumerate(self.hellos)
        ]
        ranks = tuple(
            self.number(Rank(rank, state, alive=rank not in self.absent))
            for rank, state in enumerate(started)
        )
        return World(ranks, self.stores.number(()), self.deaths, self.stalls, self.deadlines, False)

    def number(self, rank: Rank) -> int:
        return self.all_ranks.number(rank)

    def ranks(self, world: World) -> list[Rank]:
        return [self.all_ranks.values[each] for each in world.ranks]

    # Steps

    def steps(self, world: World) -> Iterator[tuple[str, World]]:
        """Every step that is possible, by name."""
        ranks, store, deaths, stalls, deadlines, _ = world
        moves = [self.moves(each) for each in ranks]
        for at, mine in enumerate(moves):
            if not mine.lives:
                continue
            name, rank, after = self.access(ranks[at], store)
            yield name, World(_with(ranks, at, rank), after, *world[2:])
            for name, rank in mine.ends:
                yield name, World(_with(ranks, at, rank), *world[1:])
            if any(at in other.overdue for other in moves):
                yield f"beat {at}", World(self.beat(ranks, at), *world[1:])
            if mine.later is not None:
                lively = any(moves[each].lives for each in mine.fresh)
                if not lively:
                    yield f"lease {at}", World(_with(ranks, at, mine.later), *world[1:])
                elif stalls:
                    yield (
                        f"lease {at}",
                        World(_with(ranks, at, mine.later), store, deaths, stalls - 1, deadlines,
                              True),
                    )  # fmt: skip
            if deaths:
                after = self.gone if at == self.server else store
                yield (
                    f"die {at}",
                    World(_with(ranks, at, mine.dead), after, deaths - 1, stalls, deadlines, True),
                )
            if deadlines and mine.late != ranks[at]:
                yield (
                    f"deadline {at}",
                    World(_with(ranks, at, mine.late), store, deaths, stalls, deadlines - 1, True),
                )

    def moves(self, rank: int) -> Moves:
        if (known := self.of_rank.get(rank)) is None:
            known = self.of_rank[rank] = self._moves(self.all_ranks.values[rank])
        return known

    def _moves(self, rank: Rank) -> Moves:
        """What can happen to a rank, whatever the others are."""
        state, heard = rank.state, rank.state.heard
        fresh = tuple(watched for watched, each in heard if each.since == 0)
        past = tuple((watched, each._replace(since=-1)) for watched, each in heard)
        silent = state._replace(heard=(), silent=frozenset())
        return Moves(
            rank.alive and rank.ended is None,
            tuple(
                (f"{rank.number}: {type(job).__name__} ends", self.number(self.finish(rank, job)))
                for job in (() if rank.read else rank.jobs)  # seen between two actions
            ),
            fresh,
            frozenset(at for at, each in heard if each.beat == 0 and each.since < 0),
            self.number(rank._replace(state=state._replace(heard=past))) if fresh else None,
            self.number(Rank(rank.number, silent, alive=False)),
            self.number(rank._replace(state=state._replace(deadline=0))),
        )

    def access(self, rank: int, store: int) -> tuple[str, int, int]:
        """The rank's next access to the store: its name, and both after it."""
        if (known := self.accesses.get((rank, store))) is None:
            known = self.accesses[rank, store] = self._access(self.all_ranks.values[rank], store)
        return known

    def _access(self, rank: Rank, contents: int) -> tuple[str, int, int]:
        action = self.machine.next_action(rank.state)
        assert isinstance(action, (Put, Swap, Look)), action
        name = f"{rank.number}: {type(action).__name__} {action[0]}"
        if contents == self.gone:
            return name, self.number(rank._replace(ended=GONE, jobs=(), read=())), self.gone
        store = dict(self.stores.values[contents])
        answer: Any = None
        if isinstance(action, Put):
            store[action.key] = action.value
        elif isinstance(action, Swap):
            if self.may_swap(action, store.get(action.key)):
                self.check_plan(store.get(action.key), action)
                store[action.key] = action.value
            answer = store.get(action.key)
        else:
            answer = [self.read(store, key) for key in action.keys]
            if self.torn:
                answer = [*rank.read, answer[len(rank.read)]]
                name += f" {action.keys[len(rank.read)]}"
                if len(answer) < len(action.keys):
                    return name, self.number(rank._replace(read=tuple(answer))), contents
                rank = rank._replace(read=())
        state = self.machine.apply_answer(rank.state, action, answer, 0)
        rank = self.settle(rank._replace(state=state))
        if not isinstance(action, Look):
            contents = self.stores.number(tuple(sorted(store.items(), key=lambda each: each[0])))
        if rank.ended is not None and rank.number == self.server:
            contents = self.gone
        return name, self.number(rank), contents

    def may_swap(self, action: Swap, now: Any) -> bool:
        return bool(now == action.expected)

    def check_plan(self, before: Any, action: Swap) -> None:
        """What was made once stays: a rank may have fetched it, and voted."""
        if action.key == PLAN and before is not None:
            for old, new in zip(before.tasks, action.value.tasks, strict=True):
                if old.made is not None and old.made != new.made:
                    raise Violation(f"a library was replaced by another: {old} by {new}")

    def read(self, store: dict[str, Any], key: str) -> Any:
        if key.startswith("beat/"):
            return 0 if f"hello/{key[5:]}" in store else None
        return store.get(key)

    def settle(self, rank: Rank) -> Rank:
        """Do what concerns this rank alone, until it needs the store again."""
        while True:
            action = self.machine.next_action(rank.state)
            if isinstance(action, End):
                return rank._replace(ended=action.outcome, jobs=())
            if not isinstance(action, (MakeOp, FetchOp, Pause)):
                return rank
            state = self.machine.apply_answer(rank.state, action, None, 0)
            starts = state.started != rank.state.started
            jobs = (*rank.jobs, action) if starts else rank.jobs
            rank = rank._replace(state=state, jobs=jobs)

    def finish(self, rank: Rank, job: MakeOp | FetchOp) -> Rank:
        """A piece of work ends."""
        got: Made | Vote
        if isinstance(job, MakeOp):
            got = Made(f"library of {rank.number}", "bundle", 1)  # no two builds are equal
            if self.wrong:
                got = Made(reason="it does not compile", final=True)
            elif rank.number in self.broken:
                got = Made(reason="the disk is full")
        else:
            fits = self.fits(rank.number, job.made.digest)
            got = Vote(job.made.digest) if fits else Vote(reason="it does not fit")
        state = self.machine.apply_done(rank.state, Done(job.op, got))
        jobs = tuple(each for each in rank.jobs if each != job)
        return self.settle(rank._replace(state=state, jobs=jobs))

    def beat(self, ranks: tuple[int, ...], at: int) -> tuple[int, ...]:
        """The ranks after one of them has beaten."""
        for watcher, number in enumerate(ranks):
            if at in self.moves(number).overdue:
                rank = self.all_ranks.values[number]
                heard = tuple(
                    (watched, each._replace(beat=STALE) if watched == at else each)
                    for watched, each in rank.state.heard
                )
                after = rank._replace(state=rank.state._replace(heard=heard))
                ranks = _with(ranks, watcher, self.number(after))
        return ranks

    # Properties

    def check(self, world: World) -> None:
        """What must hold in every world."""
        ended = {r.ended for r in self.ranks(world) if r.ended is not None and r.ended != GONE}
        self.require(len(ended) <= 1, world, "two ranks have different outcomes")
        for outcome in ended:
            if outcome.error:
                self.require(self.may_fail(world, outcome), world, "a job failed without reason")
                continue
            for number, rank in enumerate(self.ranks(world)):
                for op, choice in enumerate(outcome.choices):
                    vote = rank.state.votes[op]
                    has = vote is not None and vote.digest == choice.digest and self.fits(
                        number, choice.digest
                    )  # fmt: skip
                    self.require(
                        has or not choice.digest, world, f"rank {number} does not have the library"
                    )
            if self.can_be_native():
                found = world.trouble or all(choice.digest for choice in outcome.choices)
                self.require(found, world, "the ranks run a reference without reason")
        if any(rank.ended == GONE for rank in self.ranks(world)):
            self.require(world.trouble, world, "the store ended before a rank had the outcome")
        if not world.trouble:
            builds = sum(("make", 0) in rank.state.started for rank in self.ranks(world))
            self.require(builds <= 1 + len(self.broken), world, "an op was built twice")

    def can_be_native(self) -> bool:
        makers = [
            rank
            for rank, hello in enumerate(self.hellos)
            if rank not in self.broken and any(o.can_build or o.digest for o in hello.offers)
        ]
        return bool(makers) and not self.unfit and not self.wrong

    def fits(self, number: int, digest: str) -> bool:
        return number not in self.unfit or digest == f"library of {number}"

    def may_fail(self, world: World, outcome: JobOutcome) -> bool:
        return world.trouble or len({hello.offers for hello in self.hellos}) > 1

    def check_ends(self) -> None:
        """From every world, the ranks that live end if nothing more goes wrong: work ends, beats
        go on, dead ranks become silent. Only a rank that died before it said who it is has to be
        waited for until a deadline."""
        good: set[tuple[tuple[int, ...], int]] = set()
        for world in self.seen:
            passed = []
            at = world.ranks, world.store
            for _ in range(200):
                if at in good or not any(self.moves(each).lives for each in at[0]):
                    good.update(passed, [at])
                    break
                passed.append(at)
                after = self.fair_round(*at)
                if after in passed:  # a rank that only looks comes back to where it was
                    self.require(self.one_never_came(*at), world, "the ranks hang")
                    late = tuple(self.moves(each).late for each in at[0])
                    self.require(late != at[0], world, "the ranks hang after their deadline")
                    after = late, at[1]
                at = after
            else:
                self.require(False, world, "the ranks do not come to an end")

    def fair_round(self, ranks: tuple[int, ...], store: int) -> tuple[tuple[int, ...], int]:
        """Every rank that lives does a step and beats, and every dead one falls silent."""
        for at in range(len(ranks)):
            while ends := self.moves(ranks[at]).ends:
                ranks = _with(ranks, at, ends[0][1])
            if self.moves(ranks[at]).lives:
                _, rank, store = self.access(ranks[at], store)
                ranks = _with(ranks, at, rank)
        dead = frozenset(at for at, each in enumerate(ranks) if not self.moves(each).lives)
        for at, each in enumerate(ranks):
            if at not in dead and dead.intersection(self.moves(each).fresh):
                ranks = _with(ranks, at, self.without_news(each, dead))
        for at in set(range(len(ranks))) - dead:
            ranks = self.beat(ranks, at)
        return ranks, store

    def without_news(self, number: int, dead: frozenset[int]) -> int:
        """A rank that has not heard of the dead ones for a lease."""
        rank = self.all_ranks.values[number]
        heard = tuple(
            (watched, each._replace(since=-1) if watched in dead else each)
            for watched, each in rank.state.heard
        )
        return self.number(rank._replace(state=rank.state._replace(heard=heard)))

    def one_never_came(self, ranks: tuple[int, ...], store: int) -> bool:
        said = dict(self.stores.values[store] or ())
        dead = [at for at, each in enumerate(ranks) if not self.all_ranks.values[each].alive]
        return any(f"hello/{at}" not in said for at in dead)

    def require(self, holds: bool, world: World, what: str) -> None:
        if holds:
            return
        path: list[str] = []
        at: World | None = world
        while at is not None and (before := self.seen.get(at)) is not None:
            path.insert(0, before[1])
            at = before[0]
        raise Violation(f"{what}, after:\n" + "\n".join(path))


def job(
    ranks: int,
    *,
    ops: int = 1,
    nodes: int = 2,
    have: tuple[int, ...] = (),
    cannot: tuple[int, ...] = (),
    other: tuple[int, ...] = (),
) -> tuple[Hello, ...]:
    """What ranks say: which of them have a library, cannot build one, have other sources."""
    return tuple(
        Hello(
            f"h{rank % nodes}", rank, f"n{rank % nodes}",
            tuple(
                Offer(
                    f"op{op}",
                    facts=(("sources", "other" if rank in other else "same"),),
                    digest="old" if rank in have else "",
                    can_build=rank not in cannot,
                )
                for op in range(ops)
            ),
        )
        for rank in range(ranks)
    )  # fmt: skip
