"""The decisions of a leader, as pure functions of the ranks' records.

A leader that is replaced may decide at the same time as the next one. So nothing here depends on
who leads, and a decision (a task that is made) stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from opkiln.cluster.messages import Ballot, Hello, JobOutcome, Made, OpTask, Vote, WorkPlan

_LONGEST_REASON = 2000  # characters; the plan is compared as a whole by the store
# All ranks read an outcome, so it names only a few of many ranks and counts the others.
_SHOWN, _NAMED = 4, 64


def name_rank(rank: int, hellos: Mapping[int, Hello]) -> str:
    """A rank in words: ``rank 3 (host b, pid 4711)``."""
    hello = hellos.get(rank)
    return f"rank {rank}" if hello is None else f"rank {rank} (host {hello.host}, pid {hello.pid})"


def difference(hellos: Sequence[Hello]) -> JobOutcome | None:
    """The failure of a job whose ranks were not given the same ops; None if they were.

    The value of most ranks is taken as the right one; of equally frequent ones, the lowest rank's.
    """
    known = dict(enumerate(hellos))
    others, why = _compare(
        [", ".join(offer.name for offer in hello.offers) for hello in hellos], known
    )
    if others:
        what = f"{_ranks(others, known)} asked for other ops than the other ranks"
        return JobOutcome(error=what, why=why)
    for op, offer in enumerate(hellos[0].offers):
        told = [dict(hello.offers[op].facts) for hello in hellos]
        for fact in dict.fromkeys(fact for each in told for fact in each):
            others, why = _compare([each.get(fact, "none") for each in told], known)
            if others:
                what = f"op {offer.name}: {_ranks_have(others, known)} another {fact}"
                return JobOutcome(error=what, why=why, differ_in=(op, fact))
    return None


def _compare(values: Sequence[str], known: Mapping[int, Hello]) -> tuple[list[int], str]:
    """(the ranks whose value differs from that of most ranks, a line for each value)."""
    common = Counter(values).most_common(1)[0][0]
    others = [rank for rank, value in enumerate(values) if value != common]
    named = [f"{name_rank(each, known)}: {values[each]}" for each in others[:_SHOWN]]
    return others, "\n".join([*named, f"the other ranks: {common}"])


def _ranks(ranks: Sequence[int], hellos: Mapping[int, Hello]) -> str:
    shown = [name_rank(each, hellos) for each in ranks[:_SHOWN]]
    more = [f"{len(ranks) - _SHOWN} more"] if len(ranks) > _SHOWN else []
    return ", ".join([*shown, *more])


def _ranks_have(ranks: Sequence[int], hellos: Mapping[int, Hello]) -> str:
    return f"{_ranks(ranks, hellos)} {'has' if len(ranks) == 1 else 'have'}"


def first_plan(hellos: Sequence[Hello]) -> WorkPlan:
    """The first plan: the rank that makes each op."""
    ship = len({hello.node for hello in hellos}) > 1
    empty = WorkPlan(0, ship, tuple(OpTask() for _ in hellos[0].offers))
    return next_plan(empty, hellos, frozenset())


def next_plan(plan: WorkPlan, hellos: Sequence[Hello], silent: frozenset[int]) -> WorkPlan:
    """The plan after the makers' results. ``silent`` ranks have stopped beating.

    Returns ``plan`` itself if nothing changes. A task that is made stays as it is.
    """
    return _change_tasks(plan, (
        task if task.made is not None else _next_task(op, task, hellos, silent)
        for op, task in enumerate(plan.tasks)
    ))  # fmt: skip


def add_result(plan: WorkPlan, op: int, rank: int, made: Made, hello: Hello) -> WorkPlan:
    """The plan after a rank has made an op, or failed; ``plan`` itself if that is known already."""
    if made.final:
        reason = f"{name_rank(rank, {rank: hello})}: {made.reason}"
        made = made._replace(reason=reason[:_LONGEST_REASON])
    after = plan.tasks[op].end(rank, made)
    return _change_tasks(plan, (*plan.tasks[:op], after, *plan.tasks[op + 1 :]))


def _change_tasks(plan: WorkPlan, changed: Iterable[OpTask]) -> WorkPlan:
    tasks = tuple(changed)
    return plan if tasks == plan.tasks else plan._replace(revision=plan.revision + 1, tasks=tasks)


def _next_task(op: int, task: OpTask, hellos: Sequence[Hello], silent: frozenset[int]) -> OpTask:
    digests = {hello.offers[op].digest for hello in hellos}
    if len(digests) == 1 and (digest := digests.pop()):
        return task._replace(made=Made(digest))
    if task.maker >= 0 and task.maker not in silent:
        return task  # it is at work
    for rank in candidates(op, hellos):
        if rank not in task.tried and rank not in silent:
            return task.begin(rank)
    return task._replace(made=Made(reason=_why_none(op, task, hellos)[:_LONGEST_REASON]))


def candidates(op: int, hellos: Sequence[Hello]) -> list[int]:
    """The ranks that can make an op, the best first.

    Ranks that have a library come first, since they only send it. The most common library is
    preferred, so that the least is sent. Then come ranks whose build runs on the CPUs of most
    ranks. Several ops go to several nodes.
    """
    offers = [hello.offers[op] for hello in hellos]
    common = Counter(offer.digest for offer in offers if offer.digest)
    runs_on = {
        features: sum(set(features) <= set(other.cpu) for other in offers)
        for features in {offer.cpu for offer in offers if offer.can_build}
    }
    nodes: dict[str, int] = {}
    for hello in hellos:
        nodes.setdefault(hello.node, len(nodes))

    def order(rank: int) -> tuple[int, ...]:
        offer = offers[rank]
        turn = (nodes[hellos[rank].node] - op) % len(nodes)
        return (-common[offer.digest], -runs_on.get(offer.cpu, 0), turn, rank)

    able = [rank for rank, offer in enumerate(offers) if offer.digest or offer.can_build]
    return sorted(able, key=order)


def _why_none(op: int, task: OpTask, hellos: Sequence[Hello]) -> str:
    known, told = dict(enumerate(hellos)), dict(task.failed)
    for rank, hello in enumerate(hellos):
        if rank in told:
            continue
        if rank in task.tried:
            told[rank] = "it stopped answering while it made the op"
        elif not hello.offers[op].can_build:
            told[rank] = hello.offers[op].reason
    lines = dict.fromkeys(f"{name_rank(rank, known)}: {told[rank]}" for rank in sorted(told))
    return "\n".join(["no rank could make it", *list(lines)[:_SHOWN]])


def count_votes(plan: WorkPlan, hellos: Sequence[Hello], ballots: Sequence[Ballot]) -> JobOutcome:
    """The outcome of a vote of all ranks."""
    known = dict(enumerate(hellos))
    choices: list[Vote] = []
    for op, task in enumerate(plan.tasks):
        made = task.made
        assert made is not None  # nobody votes before
        votes = [ballot[op] for ballot in ballots]
        lacking = [rank for rank, vote in enumerate(votes) if vote.digest != made.digest]
        if made.digest and not lacking:
            choices.append(Vote(made.digest))
            continue
        reasons = [f"{name_rank(rank, known)}: {votes[rank].reason}" for rank in lacking[:_SHOWN]]
        reason = "\n".join(reasons) if made.digest else made.reason
        for rank, hello in known.items():
            if why := hello.offers[op].native_only:
                name = hello.offers[op].name
                return JobOutcome(
                    error=f"op {name} cannot be used by all ranks, and its reference must not "
                    f"serve: {why} ({name_rank(rank, known)})",
                    why=reason,
                )
        choices.append(Vote(reason=reason))
    return JobOutcome(tuple(choices), tuned=hellos[0].tuned)


def lost_outcome(ranks: Sequence[int], hellos: Mapping[int, Hello], lease: float) -> JobOutcome:
    """The failure of a job that has lost ranks."""
    return JobOutcome(
        error=f"{_ranks_have(ranks, hellos)} died, stopped or lost the network",
        why=f"nothing was heard of it for {lease:g} s, and all other ranks have voted",
        lost=tuple(ranks[:_NAMED]),
    )


def late_outcome(
    rank: int,
    timeout: float,
    hellos: Sequence[Hello | None],
    plan: WorkPlan | None,
    ballots: Sequence[Ballot | None],
) -> JobOutcome:
    """The failure of a job when one rank's time is up. It names the ranks that were waited for."""
    known = {each: hello for each, hello in enumerate(hellos) if hello is not None}
    absent = [each for each, hello in enumerate(hellos) if hello is None]
    missing, what = absent, "did not call ensure()"
    if not absent and plan is not None:
        what = "did not finish making an op"
        missing = sorted({task.maker for task in plan.tasks} - {-1})
        if not missing:
            what = "did not vote"
            missing = [each for each, ballot in enumerate(ballots) if ballot is None]
    return JobOutcome(
        error=f"{_ranks(missing, known)} {what} within {timeout:g} s"
        if missing
        else f"the ranks did not agree within {timeout:g} s",
        why=f"the time of {name_rank(rank, known)} is up",
        lost=tuple(absent[:_NAMED]),
    )
