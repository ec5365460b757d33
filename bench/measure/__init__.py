"""The measures, one module each: ``rows(options, workspace)`` gives its lines of the table."""

from __future__ import annotations

from typing import NamedTuple


class Options(NamedTuple):
    """What the command line asked for."""

    repeats: int | None  # None: each measure's own number
    quick: bool

    def times(self, usual: int, quick: int) -> int:
        """How often to repeat what is usually repeated ``usual`` times."""
        if self.repeats is not None:
            return self.repeats
        return quick if self.quick else usual
