"""Tells a user, once, of a store that cannot be used and of the chosen compilers."""

from __future__ import annotations

from opkiln.errors import StoreWarning, warn_caller

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.build_model import Plan
    from opkiln.store.layers import Store

_told: set[str] = set()


def warn_of_store(store: Store) -> None:
    """Warn once if the store could not be placed where the user asked. Called only after a miss: a
    hit in a read-only store needs no warning."""
    text = "\n".join(store.location.notes)
    if text and text not in _told:
        _told.add(text)
        warn_caller(text, StoreWarning)


def tell_of_compilers(plan: Plan) -> None:
    """Report once what a user should know about the chosen compilers."""
    from opkiln.engine import events
    from opkiln.toolchain import choice

    note = choice.note(plan.target.backend, plan.toolchain)
    if note and note not in _told:
        _told.add(note)
        events.emit(events.NOTE, text=note)
