"""What a check comes to, and the words in which it says so."""

from __future__ import annotations

from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

PASS, SKIP, WARN, FAIL = "PASS", "SKIP", "WARN", "FAIL"  # the better first


class Outcome(NamedTuple):
    """A verdict, the values it rests on, and a command that a shell takes as it is."""

    verdict: str
    evidence: str
    command: str = ""  # empty where nothing is to be done, or no command does it


class Finding(NamedTuple):
    """An outcome under the name of its check."""

    check: str
    verdict: str
    evidence: str
    command: str


def passed(evidence: str) -> Outcome:
    """It is as it should be."""
    return Outcome(PASS, evidence)


def skipped(evidence: str) -> Outcome:
    """There is nothing to check here, or no way to; ``evidence`` says which."""
    return Outcome(SKIP, evidence)


def warned(evidence: str, command: str = "") -> Outcome:
    """It works, but not as well or not as was asked."""
    return Outcome(WARN, evidence, command)


def failed(evidence: str, command: str = "") -> Outcome:
    """Something that builds or loads ops does not work."""
    return Outcome(FAIL, evidence, command)


def worst(findings: Iterable[Finding]) -> str:
    """The worst verdict; a check that was skipped is no fault, so PASS where there is no other."""
    verdicts = {each.verdict for each in findings}
    return next((verdict for verdict in (FAIL, WARN) if verdict in verdicts), PASS)


def copyable(hint: str) -> str:
    """An error's hint as a shell takes it.

    Hints may have a remark behind the command, and name a variable without ``export``; those that
    begin with words for people come out empty.
    """
    command = hint.partition("    ")[0].strip()
    first = command.partition(" ")[0]
    name, equals, _ = first.partition("=")
    if equals and name.isidentifier():
        return f"export {command}"
    return "" if first in ("set", "add", "install", "move", "restart") else command


def joined(*parts: str) -> str:
    """Facts on one line, those that are not empty."""
    return "; ".join(" ".join(part.split()) for part in parts if part.strip())
