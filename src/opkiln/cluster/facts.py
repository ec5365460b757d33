"""Facts that must be the same on all ranks. If they differ, even the references would differ.

A fact is a version, or a list of named parts. Ranks exchange the digests of such lists. If these
differ, each rank lists its own parts in its error.
"""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Any

from opkiln import __version__
from opkiln.base.digest import key, sha256_file
from opkiln.base.model import REGISTERED, Op
from opkiln.cluster.program import ProgramPart, Programs
from opkiln.decision.terms import Request
from opkiln.errors import OpkilnError
from opkiln.store.key import anchored_fields

Facts = dict[str, str | tuple[ProgramPart, ...]]
Functions = dict[str, list[tuple[str, Any]]]

# Every field of an op's declaration is compared, except these.
NOT_COMPARED = (
    "root",  # the package is installed somewhere else
    "declared_by",  # for messages
    "overloads",  # OPKILN_MODE=check adds one, and computes the same
    # The devices that a library is built for: the ranks agree on the library itself.
    "rule",
    "asked",
)
_WORDS = {
    "fake": "shape function",
    "backward": "gradient",
    **{rule: f"{rule} function" for rule in ("vmap", "variant", "tune_key")},
}
_LONGEST = 4000  # characters of a list of parts


def library_facts(request: Request) -> Facts:
    """The facts of an op's declaration and its sources. Headers are compared when its library is
    fetched."""
    found: Facts = {"opkiln": __version__}
    try:
        if request.sdk is not None:
            found["torch"] = request.sdk.version
    except OpkilnError:
        pass  # why it cannot run here is the offer's reason
    declared = tuple(ProgramPart(name, key("field", value)) for name, value in _fields(request.op))
    return {**found, "declaration": declared, "set of sources": _sources(request.op)}


def function_facts(op: Op, functions: Functions, programs: Programs) -> Facts:
    """The facts of an op's code in Python."""
    found: Facts = {"Python": str(sys.implementation.cache_tag)} if functions else {}
    for part, listed in functions.items():
        found[_WORDS.get(part, part)] = programs.parts(op.spec.distribution, listed)
    return found


def functions_of(op: Op) -> Functions:
    found: Functions = {} if op.registration is None else op.registration.functions.by_part()
    return found


def digest(facts: Facts) -> tuple[tuple[str, str], ...]:
    """Facts in the form in which ranks exchange them."""
    return tuple(
        (name, fact if isinstance(fact, str) else key("fact", fact)[:16])
        for name, fact in facts.items()
    )


def list_parts(facts: Facts, name: str) -> str:
    """The parts of a fact as text, for people who compare them with those of another rank."""
    fact = facts.get(name, ())
    parts = () if isinstance(fact, str) else fact
    return ", ".join(f"{each.name} {each.digest[:8]}" for each in parts)[:_LONGEST]


def find_change(before: Facts, functions: Functions, op: Op) -> str:
    """The parts that have changed since the op had these functions, in words. Empty if there are
    none."""
    if (now := functions_of(op)) == functions:
        return ""  # what these functions read may have changed since: a cache, a counter
    found = function_facts(op, now, Programs())
    names = (_WORDS.get(part, part) for part in REGISTERED)
    return " and ".join(name for name in names if before.get(name) != found.get(name))


def _fields(op: Op) -> list[tuple[str, Any]]:
    told = {} if op.registration is None else op.registration._asdict()
    apart = (*NOT_COMPARED, "functions", "spec", "registration")
    fields = (*op._asdict().items(), *told.items(), *anchored_fields(op.spec).items())
    return [(name, value) for name, value in fields if name not in apart]


def _sources(op: Op) -> tuple[ProgramPart, ...]:
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in op.spec.inline}
    for source in op.spec.sources:
        try:
            if source not in digests:
                digests[source] = sha256_file(os.path.join(op.spec.root, source))
        except OSError as error:
            digests[source] = f"missing: {error.errno}"
    return tuple(ProgramPart(os.path.basename(each), digests[each]) for each in op.spec.sources)
