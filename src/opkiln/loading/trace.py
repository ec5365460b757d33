"""The decision trace: every candidate for an op, and why it was taken or refused."""

from __future__ import annotations

from opkiln.record import Record


class Decision(Record):
    """One candidate."""

    resort: str  # loaded, prebuilt, store, build, fallback
    verdict: str  # taken, refused, none
    reason: str
    subject: str = ""  # the path or key it is about

    def __str__(self) -> str:
        where = f"  [{self.subject}]" if self.subject else ""
        return f"{self.resort:9} {self.verdict:8} {self.reason}{where}"


class Trace:
    """The decisions of one load, in order."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []

    def add(self, resort: str, verdict: str, reason: str, subject: str = "") -> None:
        self.decisions.append(Decision(resort, verdict, reason, subject))

    def refusals(self) -> list[str]:
        """Why nothing native serves, in the order it was tried."""
        return [d.reason for d in self.decisions if d.verdict == "refused"]

    def __str__(self) -> str:
        return "\n".join(str(decision) for decision in self.decisions)
