"""Shared by the grammars of arch lists: words, quoting, authors' filters, support by toolkits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from opkiln.base.lazy import Record
from opkiln.errors import ArchError, SpecError

# The type of an author's ``filter_ccs``. It gets names and returns those to keep: as strings, or,
# as in DeepSpeed, as the parts of ``name.split(".")``.
Rule = Callable[[list[str]], Iterable[str | Sequence[str]]]

A = TypeVar("A")

_SHOWN = 48


class Filtered(Record):
    """The architectures that an op's filter kept, and those that it removed."""

    kept: tuple[Any, ...]
    removed: tuple[Any, ...]


class Usable(Record):
    """The architectures that a toolkit compiles for, and the others with the reasons."""

    kept: tuple[Any, ...]
    refused: tuple[tuple[Any, str], ...]


def split(text: str) -> list[str]:
    """The words of a list, separated by any mix of ``;``, ``,`` and white space."""
    return text.replace(";", " ").replace(",", " ").split()


def require_words(text: str, kind: str, grammar: str, example: str) -> list[str]:
    """The words of a list that must have one. Raises ArchError."""
    words = split(text)
    if not words:
        raise ArchError(f"{quote(text)} names no {kind} architecture", why=grammar, hint=example)
    return words


def quote(word: str) -> str:
    """A word for an error message: escaped, on one line, and shortened if it is long."""
    if len(word) <= _SHOWN:
        return repr(word)
    return f"{word[:_SHOWN]!r}… ({len(word)} characters)"


def native(word: str, found: Sequence[A] | None, vendor: str, example: str) -> tuple[A, ...]:
    """This machine's GPUs, for the word that means them. Raises ArchError if there are none."""
    if not found:
        raise ArchError(
            f"{word!r} means this machine's GPUs, but there are none",
            why=f"no {vendor} GPU was found",
            hint=example,
        )
    return tuple(found)


def show(archs: Iterable[object]) -> str:
    """The canonical text of a list; ``parse`` gives the same list back."""
    return ";".join(map(str, archs))


def apply_filter(
    archs: Sequence[A],
    rule: Rule,
    name: Callable[[A], str],
    named: Callable[[str, Sequence[A]], Iterable[A]],
) -> Filtered:
    """Apply an author's filter: it gets the ``name`` of each, and ``named`` gives those that an
    item of its answer means. Raises SpecError."""
    names = list(dict.fromkeys(map(name, archs)))
    who = getattr(rule, "__qualname__", repr(rule))
    keep: set[A] = set()
    for item in _ask(rule, who, names) if names else []:
        found = named(item, archs)
        if not found:
            raise SpecError(
                f"the arch filter {who} returned {quote(item)}, which it was not given",
                why=f"a filter can only remove; it was given: {', '.join(names)}",
                hint="name the architecture in the arch list instead",
            )
        keep.update(found)
    replaced = set(map(name, keep - set(archs)))  # by a variant that the author names
    return Filtered(
        kept=tuple(sorted(keep)),
        removed=tuple(arch for arch in archs if arch not in keep and name(arch) not in replaced),
    )


def _ask(rule: Rule, who: str, names: list[str]) -> list[str]:
    """The names that an author's filter keeps, in the filter's spelling. Raises SpecError."""
    try:
        answer = rule([*names])
        if isinstance(answer, str):
            raise TypeError(f"it returned {quote(answer)}, not a list")
        # A generator runs only here, so its failure is the filter's failure.
        return [item if isinstance(item, str) else ".".join(map(str, item)) for item in answer]
    except Exception as error:
        raise SpecError(
            f"the arch filter {who} failed on {', '.join(names)}",
            why=f"{type(error).__name__}: {error}",
            hint='return the items of the argument to keep: ["8.0", "9.0"]',
        ) from error


def usable(archs: Iterable[A], refusal: Callable[[A], str]) -> Usable:
    """Which of these a toolkit compiles for; ``refusal`` says why not, or is empty."""
    judged = [(arch, refusal(arch)) for arch in archs]
    return Usable(
        kept=tuple(arch for arch, reason in judged if not reason),
        refused=tuple((arch, reason) for arch, reason in judged if reason),
    )
