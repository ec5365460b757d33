"""The messages that ranks exchange through the job's store: the keys, and a record for each value.

    hello/<rank>            Hello    once, by that rank: its identity, and its state of each op
    beat/<rank>             a number that the rank counts up while it lives
    lead                    the rank that leads; taken by compare-and-set
    plan                    Plan     by compare-and-set: the leader says who makes what; the ranks
                            that make it say what came of it
    vote/<rank>             Ballot   once, by that rank: the library of each op that it could open
    outcome                 Outcome  once, by compare-and-set: what all ranks do
    late                    the rank that names those who did not answer in time; taken by
                            compare-and-set by the first rank whose time is up
    left/<rank>             once: the rank has read the outcome
    turn                    Task     of a load that ranks make one after the other (``sharing``)

An op is known by its position in the list that all ranks were given. All records are tuples of
tuples, texts and numbers, so the same value has the same bytes wherever it is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

LEAD, PLAN, OUTCOME, LATE = "lead", "plan", "outcome", "late"


def key_of(kind: str, *numbers: int) -> str:
    return "/".join((kind, *map(str, numbers)))


def values_by_rank(seen: Mapping[str, Any], kind: str) -> Iterator[tuple[int, Any]]:
    """Each rank whose key ``<kind>/<rank>`` was read, and its value; None if it is absent.

    It goes through the keys that were read, not through all ranks: most looks have four keys, and
    a job may have many thousand ranks.
    """
    prefix = f"{kind}/"
    for key, value in seen.items():
        if key.startswith(prefix):
            yield int(key[len(prefix) :]), value


class Offer(NamedTuple):
    """A rank's state of one op, before anything is made."""

    name: str
    # (name, value) of each fact that must be the same on all ranks (``facts.py``).
    facts: tuple[tuple[str, str], ...] = ()
    digest: str = ""  # SHA-256 of the library that it would load now; empty if it has none
    can_build: bool = False
    reason: str = ""  # why it cannot build it
    native_only: str = ""  # why the reference must not serve here; empty if it may
    cpu: tuple[str, ...] = ()  # the CPU features that its build would need


class Hello(NamedTuple):
    """Who a rank is, and what it has."""

    host: str
    pid: int
    node: str  # the same for ranks that share a host and a store directory
    offers: tuple[Offer, ...]
    tuned: tuple[str, ...] = ()  # what rank 0 has measured for the ops (``store.tuned``)


class Made(NamedTuple):
    """The result of making an op: a library, which the job uses if all ranks can; or why none."""

    digest: str = ""  # of the library; empty if there is none
    bundle: str = ""  # SHA-256 of the bundle in the store; empty if none was asked for
    size: int = 0  # of the bundle
    by: int = -1  # the rank that made it
    reason: str = ""  # why there is none
    final: bool = False  # whether that follows from the input: no other rank need try


class OpTask(NamedTuple):
    """The progress of one op. It changes by compare-and-set."""

    tried: tuple[int, ...] = ()  # the ranks that were to make it
    failed: tuple[tuple[int, str], ...] = ()  # those that could not, and why
    made: Made | None = None

    @property
    def maker(self) -> int:
        """The rank that is at work now; -1 if none is."""
        ended = not self.tried or self.made is not None or self.tried[-1] in dict(self.failed)
        return -1 if ended else self.tried[-1]

    def begin(self, rank: int) -> OpTask:
        """The task after another rank has begun to make it, or the same one again."""
        failed = tuple(each for each in self.failed if each[0] != rank)
        return self._replace(tried=(*self.tried, rank), failed=failed)

    def end(self, rank: int, made: Made) -> OpTask:
        """The task after a rank has made it, or could not. What was made first stays."""
        if self.made is not None or rank in dict(self.failed):
            return self
        if made.digest or made.final:
            return self._replace(made=made._replace(by=rank))
        return self._replace(failed=(*self.failed, (rank, made.reason)))


class WorkPlan(NamedTuple):
    """The decisions so far. The next leader continues from here."""

    revision: int  # no two plans are equal, so a compare-and-set never mistakes one for another
    ship: bool  # whether a library must travel: the ranks do not share one store
    tasks: tuple[OpTask, ...]


class Vote(NamedTuple):
    """The library that a rank can use for one op, by its digest; or none, and why."""

    digest: str = ""
    reason: str = ""


Ballot = tuple[Vote, ...]


class JobOutcome(NamedTuple):
    """The agreement: all ranks open these libraries and run these references, or all fail."""

    choices: tuple[Vote, ...] = ()  # for each op; an empty digest is the reference
    error: str = ""  # what is wrong; empty if the ranks agree on the choices
    why: str = ""
    # Ranks that are lost or never came; only the first ones if there are many. Nobody waits for
    # them to read this.
    lost: tuple[int, ...] = ()
    differ_in: tuple[int, str] = (-1, "")  # an op and the fact in which they differ
    tuned: tuple[str, ...] = ()  # what rank 0 has measured; all ranks take it into their stores


# Records by their names in the texts.
_RECORDS: dict[str, type[Any]] = {
    "Offer": Offer, "Hello": Hello, "Made": Made, "Task": OpTask, "Plan": WorkPlan, "Vote": Vote,
    "Outcome": JobOutcome,
}  # fmt: skip
_NAMES = {record: name for name, record in _RECORDS.items()}


def encode(value: Any) -> str:
    """The text of a record, or of a plain value."""
    return json.dumps(_make_plain(value), separators=(",", ":"))


def decode(text: str) -> Any:
    """The value that ``encode`` made a text of. Raises ValueError, TypeError, KeyError or
    RecursionError for any other text."""
    return _tuples(json.loads(text, object_hook=_record))


def _make_plain(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    fields = [_make_plain(each) for each in value]
    name = _NAMES.get(type(value))
    return fields if name is None else {name: fields}


def _record(found: dict[str, Any]) -> Any:
    ((name, fields),) = found.items()
    return _RECORDS[name](*map(_tuples, fields))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
