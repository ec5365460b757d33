"""What an accelerator answers when it is asked whether it can serve here."""

from __future__ import annotations

from opkiln.record import Record


class Answer(Record):
    """One accelerator that was asked."""

    name: str
    present: bool
    why: str = ""  # the device that answered; where none did, the reason
