"""What the grammars of arch lists share: separators, quoting, and asking an author's filter."""

from __future__ import annotations

from opkiln.errors import SpecError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    # What an author's ``filter_ccs`` is: it gets the names it may keep, and returns those it
    # keeps, as strings or, in DeepSpeed's way, as the parts of ``name.split(".")``.
    Rule = Callable[[list[str]], Iterable[str | Sequence[str]]]

_SHOWN = 48


def split(text: str) -> list[str]:
    """The words of a list: ``;``, ``,`` and white space separate, in any mix and number."""
    return text.replace(";", " ").replace(",", " ").split()


def quote(word: str) -> str:
    """A word as an error quotes it: escaped, on one line, and shortened when it is long."""
    if len(word) <= _SHOWN:
        return repr(word)
    return f"{word[:_SHOWN]!r}… ({len(word)} characters)"


def ask(rule: Rule, names: list[str]) -> list[str]:
    """The names that an author's filter keeps, as it spells them. Raises SpecError."""
    who = getattr(rule, "__qualname__", repr(rule))
    given = ", ".join(names)
    try:
        answer = rule([*names])
        if isinstance(answer, str):
            raise TypeError(f"it returned {quote(answer)}, not a list")
        # A generator runs only now, so its failure belongs to the filter too.
        return [item if isinstance(item, str) else ".".join(map(str, item)) for item in answer]
    except Exception as error:
        raise SpecError(
            f"the arch filter {who} failed on {given}",
            why=f"{type(error).__name__}: {error}",
            hint='a filter returns the ones of its argument to keep: ["8.0", "9.0"]',
        ) from error


def unknown(rule: Rule, item: str, names: list[str]) -> SpecError:
    """The error for a filter that returned what it was not given."""
    who = getattr(rule, "__qualname__", repr(rule))
    return SpecError(
        f"the arch filter {who} returned {quote(item)}, which it was not given",
        why=f"a filter can only remove; it was given: {', '.join(names)}",
        hint="name the architecture in the arch list instead",
    )
