"""What the grammars of arch lists share: separators, quoting, and calls of an author's filter."""

from __future__ import annotations

from opkiln.errors import SpecError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    # The type of an author's ``filter_ccs``. It gets names and returns those to keep: as strings,
    # or, as in DeepSpeed, as the parts of ``name.split(".")``.
    Rule = Callable[[list[str]], Iterable[str | Sequence[str]]]

_SHOWN = 48


def split(text: str) -> list[str]:
    """The words of a list, separated by any mix of ``;``, ``,`` and white space."""
    return text.replace(";", " ").replace(",", " ").split()


def quote(word: str) -> str:
    """A word for an error message: escaped, on one line, and shortened if it is long."""
    if len(word) <= _SHOWN:
        return repr(word)
    return f"{word[:_SHOWN]!r}… ({len(word)} characters)"


def ask(rule: Rule, names: list[str]) -> list[str]:
    """The names that an author's filter keeps, in the filter's spelling. Raises SpecError."""
    who = getattr(rule, "__qualname__", repr(rule))
    given = ", ".join(names)
    try:
        answer = rule([*names])
        if isinstance(answer, str):
            raise TypeError(f"it returned {quote(answer)}, not a list")
        # A generator runs only here, so its failure is the filter's failure.
        return [item if isinstance(item, str) else ".".join(map(str, item)) for item in answer]
    except Exception as error:
        raise SpecError(
            f"the arch filter {who} failed on {given}",
            why=f"{type(error).__name__}: {error}",
            hint='return the items of the argument to keep: ["8.0", "9.0"]',
        ) from error


def unknown(rule: Rule, item: str, names: list[str]) -> SpecError:
    """The error for a filter that returned a name that it was not given."""
    who = getattr(rule, "__qualname__", repr(rule))
    return SpecError(
        f"the arch filter {who} returned {quote(item)}, which it was not given",
        why=f"a filter can only remove; it was given: {', '.join(names)}",
        hint="name the architecture in the arch list instead",
    )
