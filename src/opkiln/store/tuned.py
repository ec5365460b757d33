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
from typing import Any, NamedTuple

from opkiln.digest import key, read_file
from opkiln.errors import SpecError, UsageError
from opkiln.model import place_of
from opkiln.store.inventory import directories
from opkiln.writing import is_temporary, write_private

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from opkiln.store.layers import Store

SCHEMA = 1
_LARGEST = 1 << 16  # bytes of one choice
_MOST = 1 << 26  # bytes of an exported file


class Question(NamedTuple):
    """What a choice is for."""

    distribution: str
    op: str
    device: str  # the model: a choice holds for all devices of one model
    shape: str  # the class of shapes
    values: str  # of the parameters that the author chose: HEAD=64, T=half
    candidates: tuple[str, ...]  # BLOCK=128, ...
    sources: str  # their digest


class Choice(NamedTuple):
    """An answer, and what was measured."""

    question: Question
    candidate: str
    microseconds: dict[str, float]  # by candidate


def find(store: Store, question: Question) -> Choice | None:
    """The choice that is kept for this question, in the first layer that has one."""
    name = _name(question)
    for layer in store.location.layers:
        found = None if layer.bundle else _read(os.path.join(layer.root, name))
        if found is not None and found.question == question:
            return found
    return None


def keep(root: str, choice: Choice) -> None:
    """Write a choice into a layer, in one step. Raises OSError."""
    text = json.dumps(_as_json(choice), indent=1, sort_keys=True)
    write_private(os.path.join(root, _name(choice.question)), text.encode())


def kept(root: str) -> Iterator[Choice]:
    """Every choice of a layer that can be read."""
    for path in directories(os.path.join(root, "tuned"), 3):
        found = None if is_temporary(path) else _read(path)
        if found is not None:
            yield found


def remove(root: str, choice: Choice) -> None:
    """Forget a choice. Raises OSError."""
    os.unlink(os.path.join(root, _name(choice.question)))


def exported(choices: Iterable[Choice]) -> bytes:
    """Choices as one file for other machines; the same choices give the same bytes."""
    rows = sorted((_as_json(each) for each in choices), key=json.dumps)
    return (json.dumps({"schema": SCHEMA, "tuned": rows}, indent=1) + "\n").encode()


def imported(path: str) -> list[Choice]:
    """The choices of an exported file. Raises UsageError."""
    try:
        document = json.loads(read_file(path, _MOST))
        if document["schema"] != SCHEMA:
            raise ValueError(f"its schema is {document['schema']!r}, not {SCHEMA}")
        found = [_choice(each) for each in document["tuned"]]
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, RecursionError, SpecError) as error:
        raise UsageError(
            f"{path} is not a file that `opkiln tuned export` wrote",
            why=f"{type(error).__name__}: {error}",
        ) from error
    return found


def _name(question: Question) -> str:
    place = place_of(question.distribution, question.op)
    return os.path.join("tuned", place, key("tuned", list(question)) + ".json")


def _read(path: str) -> Choice | None:
    try:
        return _choice(json.loads(read_file(path, _LARGEST)))
    except (OSError, ValueError, KeyError, TypeError, RecursionError, SpecError):
        return None  # missing or damaged: it is measured anew


def _as_json(choice: Choice) -> dict[str, Any]:
    asked = choice.question._asdict()
    return {**asked, "choice": choice.candidate, "microseconds": choice.microseconds}


def _choice(row: Any) -> Choice:
    """Raises KeyError, TypeError, ValueError, SpecError."""
    words = {name: row[name] for name in Question._fields if name != "candidates"}
    candidates, candidate, times = row["candidates"], row["choice"], row["microseconds"]
    if not all(isinstance(each, str) for each in (*words.values(), *candidates)):
        raise ValueError("a field is not text")
    if candidate not in candidates:
        raise ValueError(f"{candidate!r} is not one of the candidates")
    place_of(words["distribution"], words["op"])
    measured = {str(name): float(value) for name, value in times.items()}
    return Choice(Question(**words, candidates=tuple(candidates)), candidate, measured)
