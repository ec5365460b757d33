"""Choices that were made by measuring (``tune=``), kept in the store.

    <layer>/tuned/<distribution>/<op>/<digest>.json

One small file for each op, device model, shape class and set of chosen values, so two processes
that measure different things never overwrite each other. The file's name is the digest of what the
choice is for. A file that cannot be read, or that is about something else, is ignored, and the
choice is measured anew.
"""

from __future__ import annotations

import json
import os
from typing import NamedTuple

from opkiln.base.digest import is_temporary, key, read_file, write_private
from opkiln.base.model import place_of
from opkiln.errors import SpecError
from opkiln.store.inventory import directories

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from opkiln.store.layers import Store

_LARGEST = 1 << 16  # bytes of one choice
# Exceptions that ``from_text`` raises for a text that is not a choice.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError, SpecError)


class Question(NamedTuple):
    """What a choice is about."""

    distribution: str
    op: str
    device: str  # the model: a choice holds for all devices of one model
    shape: str  # the class of shapes
    values: str  # of the parameters that the author chose: HEAD=64, T=half
    candidates: tuple[str, ...]  # BLOCK=128, ...
    sources: str  # their digest


class TunedChoice(NamedTuple):
    """An answer, and what was measured."""

    question: Question
    candidate: str
    microseconds: dict[str, float]  # by candidate


def find(store: Store, question: Question) -> TunedChoice | None:
    """The choice that is kept for this question, in the first layer that has one."""
    name = _name(question)
    for layer in store.location.layers:
        found = None if layer.bundle else _read(os.path.join(layer.root, name))
        if found is not None and found.question == question:
            return found
    return None


def keep(root: str, choice: TunedChoice) -> None:
    """Write a choice into a layer, in one step. Raises OSError."""
    write_private(os.path.join(root, _name(choice.question)), to_text(choice).encode())


def read_choices(root: str) -> Iterator[TunedChoice]:
    """Every choice of a layer that can be read."""
    for path in directories(os.path.join(root, "tuned"), 3):
        found = None if is_temporary(path) else _read(path)
        if found is not None:
            yield found


def remove(root: str, choice: TunedChoice) -> None:
    """Forget a choice. Raises OSError."""
    os.unlink(os.path.join(root, _name(choice.question)))


def to_text(choice: TunedChoice) -> str:
    """A choice as it is kept and sent; the same choice gives the same text."""
    asked = choice.question._asdict()
    row = {**asked, "choice": choice.candidate, "microseconds": choice.microseconds}
    return json.dumps(row, indent=1, sort_keys=True)


def from_text(text: str | bytes) -> TunedChoice:
    """The choice that ``to_text`` wrote. Raises one of MALFORMED."""
    row = json.loads(text)
    words = {name: row[name] for name in Question._fields if name != "candidates"}
    candidates, candidate, times = row["candidates"], row["choice"], row["microseconds"]
    if not all(isinstance(each, str) for each in (*words.values(), *candidates)):
        raise ValueError("a field is not text")
    if candidate not in candidates:
        raise ValueError(f"{candidate!r} is not one of the candidates")
    place_of(words["distribution"], words["op"])
    measured = {str(name): float(value) for name, value in times.items()}
    return TunedChoice(Question(**words, candidates=tuple(candidates)), candidate, measured)


def _name(question: Question) -> str:
    place = place_of(question.distribution, question.op)
    return os.path.join("tuned", place, key("tuned", list(question)) + ".json")


def _read(path: str) -> TunedChoice | None:
    try:
        return from_text(read_file(path, _LARGEST))
    except (OSError, *MALFORMED):
        return None  # missing or damaged: it is measured anew
