"""Makes facts (``store.facts``) of what the steps of a build were observed to do."""

from __future__ import annotations

import os

from opkiln import images
from opkiln.build_model import Plan
from opkiln.facts import (
    ABSENT,
    CHOICE,
    GONE,
    HIDDEN,
    UNSIGNED,
    Hasher,
    signature_of,
    together,
    value,
)
from opkiln.model import OUTSIDE
from opkiln.observing.inputs import Inputs
from opkiln.plan import anchors_of
from opkiln.store.deps import Fact

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Appeared(Exception):
    """A file was made while a compiler was looking for it: what it read is not certain."""


def gather(plan: Plan, inputs: Inputs, hasher: Hasher) -> tuple[Fact, ...]:
    """The facts that the inputs of a step come to. Raises OSError if a file is gone, and Appeared
    if a name that was looked for in vain exists by now."""
    images.forget()
    place = _Places(plan)
    found = []
    for kind, path, then in inputs.facts:
        if kind == CHOICE:
            found.append(Fact(CHOICE, "path", path, then, UNSIGNED))
        elif place.is_kept(path):
            signature = signature_of(kind, path, then)
            now = value(kind, path, then, hasher)
            if kind == ABSENT and now != then:
                raise Appeared(path)
            if now in (GONE, HIDDEN):
                raise FileNotFoundError(path)
            found.append(Fact(kind, *place.of(path), now, signature))
    return tuple(found)


class _Places:
    """Where a plan's files lie."""

    def __init__(self, plan: Plan) -> None:
        places = anchors_of(plan.spec, plan.toolchain)
        named = ("src", "opkiln", "torch", "python", "wheels")
        known = [(each, place.rstrip("/") + "/") for each in named if (place := places.get(each))]
        # The nearest counts: an environment with torch may be in the package's directory.
        self._anchors = sorted(known, key=lambda each: -len(each[1]))
        self._authors = tuple(path.rstrip("/") + "/" for path in _declared(plan))
        # The text of an inline source is in the intent key, and its file is removed.
        self._removed = plan.spec.root.rstrip("/") + "/" if plan.spec.inline else ""

    def is_kept(self, path: str) -> bool:
        return not (self._removed and (path + "/").startswith(self._removed))

    def of(self, path: str) -> tuple[str, str]:
        """(anchor, path below it)."""
        for anchor, place in self._anchors:
            if (path + "/").startswith(place):
                return anchor, path[len(place) :]
        return (OUTSIDE if path.startswith(self._authors) else "abs"), path


def _declared(plan: Plan) -> Iterator[str]:
    """The directories outside of its package that an op's declaration names."""
    flags = (*plan.spec.cxx_args, *plan.spec.device_args)
    yield from (os.path.join(plan.spec.root, path) for path in plan.spec.include_dirs)
    for flag, following in zip(flags, (*flags[1:], ""), strict=False):
        option = next((each for each in _INCLUDE_FLAGS if flag.startswith(each)), None)
        if option is not None:
            path = following if flag == option else flag[len(option) :]
            if os.path.isabs(path):
                yield path


_INCLUDE_FLAGS = ("-I", "-isystem", "-iquote", "-idirafter")


class Disagree(Exception):
    """Two steps saw different values of one path."""


def union(parts: Iterable[Iterable[Fact]]) -> tuple[Fact, ...]:
    """The facts of all these steps. Raises Disagree."""
    found: dict[tuple[str, str, str], Fact] = {}
    for fact in (fact for part in parts for fact in part):
        known = found.setdefault(fact[:3], fact)
        if known.value == fact.value:
            continue
        try:
            both = together(fact.kind, known.value, fact.value)
        except ValueError:
            raise Disagree(fact.path) from None
        # What one step looked for, the other may have seen another directory without.
        earlier = min(known.signature, fact.signature, key=lambda each: each.read_at)
        signature = earlier if known.signature[:-1] == fact.signature[:-1] else UNSIGNED
        found[fact[:3]] = known._replace(value=both, signature=signature)
    return tuple(found[place] for place in sorted(found))
