"""`kill -9` of each role at each step: nobody hangs, all others name the rank, stores stay whole.

    pytest tests/cluster/test_kills.py --full-counts      100 kills; else one for each role

Two nodes with two ranks each. Rank 0 builds, rank 1 finds the library on its node, rank 2 fetches
it, rank 3 leads: it comes first, and is the last of its node to look for the library.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from fault_rows import whole
from ranks import Job, Node, free_port, run
from results import keep, spread
from sample.quiet import slowdown

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.timed
LEASE, WAIT = 3.0, 15.0
BUILDER, VOTER, FETCHER, LEADER = range(4)


class Step(NamedTuple):
    """Where a rank is killed: ``at`` is a step of rank.py."""

    at: str
    nth: int = 1
    delay: float = 0.0


class Role(NamedTuple):
    """A rank, the steps that it comes to in their order, and how often each is tried."""

    rank: int
    steps: tuple[Step, ...]
    few: Step  # the one that every test run tries
    rounds: int = 1


def steps(*names: str | Step) -> tuple[Step, ...]:
    return tuple(Step(each) if isinstance(each, str) else each for each in names)


PLAN_IS_MADE, AFTER_IT = Step("Swap plan", nth=2), Step("after Swap plan", nth=2)
ROLES = {
    "builder": Role(BUILDER, steps(
        "Put hello/0", "Swap lead", "before make", "compiled", "before _send", "write part 0",
        "write part 1", "after _send", "after make", "Swap plan", "after Swap plan",
        "Put vote/0", "after Put vote/0", "Put left/0",
    ), Step("write part 1"), rounds=2),
    "fetcher": Role(FETCHER, steps(
        "Put hello/2", "Swap lead", "before fetch", "before _import", "read part 1",
        "before unpack_bytes", "after unpack_bytes", "after _import", "after fetch", "Put vote/2",
        "after Put vote/2", "Put left/2",
    ), Step("before unpack_bytes"), rounds=2),
    "voter": Role(VOTER, steps(
        "Put hello/1", "Swap lead", "before fetch", "after fetch", "Put vote/1",
        "after Put vote/1", "Put left/1",
    ), Step("Put vote/1"), rounds=2),
    "leader": Role(LEADER, steps(
        "Put hello/3", "Swap lead", "after Swap lead", "Swap plan", "after Swap plan",
        "before fetch", "after fetch", "Put vote/3", "Swap outcome", "after Swap outcome",
    ), Step("after Swap plan")),
    "leader that builds": Role(0, steps(
        "Put hello/0", "Swap lead", "Swap plan", "before make", "before _send", "after _send",
        "after make", PLAN_IS_MADE, "Put vote/0", "Swap outcome", "Put left/0",
    ), Step("after make")),
    "store host": Role(0, steps(
        Step("Put hello/0", delay=1.0), "Swap lead", "Swap plan", "before make", "compiled",
        "before _send", "write part 1", "after make", PLAN_IS_MADE, AFTER_IT,
        "Put vote/0", "Swap outcome", "linger",
    ), Step("write part 1")),
}  # fmt: skip
# Whoever dies here has voted, so the others agree without it.
VOTED = ("after Put vote/", "Put left/", "Swap outcome", "after Swap outcome")


def test_all_roles_together_are_a_hundred_kills() -> None:
    assert sum(role.rounds * len(role.steps) for role in ROLES.values()) == 100


def killed_by(step: Step, mark: Path) -> dict[str, Any]:
    return {**step._asdict(), "signal": int(signal.SIGKILL), "mark": str(mark)}


class Killed(NamedTuple):
    """A job of which one rank was killed."""

    others: list[dict[str, Any]]  # what the other ranks said
    seconds: float  # from the kill until all of them had ended
    compile: float  # the seconds of the longest compile


def killed(codes: list[int], said: list[dict[str, Any]], rank: int, mark: Path) -> Killed:
    assert codes[rank] == -signal.SIGKILL, (codes, said)
    assert [code for code in codes if code] == [-signal.SIGKILL], (codes, said)
    others = [each for number, each in enumerate(said) if number != rank]
    last = max(each["ended"] for each in others)
    builds = [wall for each in others for wall in each["built"].values()]
    return Killed(others, last - float(mark.read_text()), max(builds, default=0.0))


def job(role: Role, step: Step, nodes: list[Node], where: Path) -> Killed:
    """The ranks talk through a shared directory."""
    started = Job(store=str(where / "shared"), timeout=WAIT, lease=LEASE, part=2048)
    first = 0 if role is ROLES["leader that builds"] else LEADER
    for rank in range(4):
        also = [] if rank == first else [{"at": f"Put hello/{rank}", "pause": 0.8}]
        if rank == LEADER:
            also.append({"at": "before fetch", "pause": 0.6})
        if rank == role.rank:
            struck = killed_by(step, where / "mark")
            # A leader that dies before it says hello is waited for by the others.
            options = {**struck, "also": also if "hello" not in step.at else []}
        else:
            options = {"also": also}
        started.start(nodes[rank // 2], rank, 4, **options)
    ended = started.end(limit=60)
    codes, said = [each.code for each in ended], [each.said for each in ended]
    return killed(codes, said, role.rank, where / "mark")


def judge(role: Role, step: Step, came: Killed) -> None:
    """The stated outcome of a kill, on all ranks that live, in time."""
    errors = [each.get("error", "") for each in came.others]
    libraries = {tuple(map(tuple, each.get("choices", ()))) for each in came.others}
    limit = LEASE + came.compile + 3
    if step.at.startswith(VOTED):
        assert not any(errors), errors
        assert len({choices[0][1] for choices in libraries}) == 1, libraries
    elif step.at.startswith("Put hello/"):
        limit = WAIT + 3
        wanted = f"rank {role.rank} did not call ensure() within {WAIT:g} s"
        assert all(wanted in each for each in errors), errors
    else:
        for each in errors:
            assert f"rank {role.rank} (host " in each, errors
            assert "died, stopped or lost the network" in each
    assert came.seconds <= limit * slowdown(), (step, came)


def judge_without_a_store(role: Role, step: Step, came: Killed) -> None:
    """The store is gone. A rank has the one library if it read the outcome before; else an error
    that says who served the store."""
    agreed = [each["choices"][0][1] for each in came.others if "choices" in each]
    errors = [each["error"] for each in came.others if "error" in each]
    assert len(set(agreed)) <= 1, agreed
    assert not agreed or step.at == "linger", (step, agreed)
    for each in errors:
        assert "the job's store (127.0.0.1:" in each
        assert "rank 0" in each
    assert came.seconds <= (LEASE + came.compile + 3) * slowdown(), (step, came)


def tried(
    name: str, where: Path, request: pytest.FixtureRequest,
    run_one: Callable[[Role, Step, list[Node], Path], Killed],
    judge_one: Callable[[Role, Step, Killed], None],
    then: Callable[[list[Node], Path], None],
) -> None:  # fmt: skip
    """Kill the rank of a role at its steps; note the count and the times."""
    role = ROLES[name]
    all_of_them = whole(request.config)
    chosen = role.steps * role.rounds if all_of_them else (role.few,)
    named, agreed = [], []
    for number, step in enumerate(chosen):
        place = where / str(number)
        place.mkdir()
        nodes = [Node(place / "a"), Node(place / "b")]
        came = run_one(role, step, nodes, place)
        judge_one(role, step, came)
        for node in nodes:
            node.verify()
        if number < len(role.steps):
            then(nodes, place)
        beyond = came.seconds - came.compile
        if not step.at.startswith("Put hello/") or step.delay:
            (agreed if "choices" in came.others[0] else named).append(beyond)
    row: dict[str, Any] = {"kills": len(chosen), "hangs": 0, "steps": len(set(chosen))}
    if named:
        row["named_after_s_beyond_compile"] = spread(named)
    if agreed:
        row["agreed_after_s_beyond_compile"] = spread(agreed)
    request.node.user_properties.append(("note", f"kill -9 of the {name}: {row}"))
    if all_of_them:
        keep("kills", name, {**row, "lease_s": LEASE})


def next_start_builds_nothing(nodes: list[Node], where: Path) -> None:
    again = run(nodes, 2, store=str(where / "again"))
    assert len({each.choice[0] for each in again}) == 1
    assert all(each.choice[2] != "built" for each in again)


# Every interleaving of the protocol is explored without processes: test_all_interleavings.py.
_FIRST = ("builder", "leader")


@pytest.mark.parametrize(
    "name",
    [
        name if name in _FIRST else pytest.param(name, marks=pytest.mark.full)
        for name in ROLES
        if name != "store host"
    ],
)
def test_killed_rank_is_named_by_all_others_in_time(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    def then(nodes: list[Node], where: Path) -> None:
        if any(node.entries() for node in nodes):
            next_start_builds_nothing(nodes, where)

    tried(name, tmp_path, request, job, judge, then)


def test_ranks_whose_store_dies_with_its_process_say_so_in_time(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Rank 0 serves torch's TCPStore, leads and builds."""

    def over_tcp(role: Role, step: Step, nodes: list[Node], where: Path) -> Killed:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        special = {rank: {"at": f"Put hello/{rank}", "pause": 0.8} for rank in range(1, 4)}
        special[0] = killed_by(step, where / "mark")
        ended = run(nodes, 2, special, timeout=WAIT, lease=LEASE, part=2048, variables=address)
        return killed(
            [each.code for each in ended], [each.said for each in ended], 0, where / "mark"
        )

    tried("store host", tmp_path, request, over_tcp, judge_without_a_store, lambda *_: None)
