"""Reports the progress of builds: to people, to the logger and to the trace file."""

from __future__ import annotations

import sys
import warnings
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

from opkiln.errors import StoreWarning
from opkiln.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from opkiln.build_model import Plan
    from opkiln.store.layers import Store

_told: set[str] = set()
_listening: ContextVar[bool] = ContextVar("opkiln_progress", default=False)


@contextmanager
def shown(trace: str | None = None) -> Iterator[None]:
    """Within the block, builds report as ``OPKILN_PROGRESS``, ``OPKILN_TRACE`` and the logger ask.

    Blocks inside another have no effect, so a command that builds ten ops shows one bar.
    """
    if _listening.get():
        yield
        return
    from opkiln import process
    from opkiln.engine import chrome, events, progress

    token = _listening.set(True)
    try:
        with ExitStack() as stack:
            stack.enter_context(events.listening(progress.for_people()))
            if settings.progress == "verbose" and sys.stderr is not None and not process.told():
                stack.enter_context(process.telling(progress.Commands(sys.stderr)))
            log = progress.for_logging()
            if log is not None:
                stack.enter_context(events.listening(log))
                stack.enter_context(process.telling(log.command))
            file = trace or settings.trace
            if file:
                stack.enter_context(events.listening(chrome.Trace(file)))
            yield
    finally:
        _listening.reset(token)


def warn_of_store(store: Store) -> None:
    """Warn once if the store could not be placed where the user asked. Called only after a miss: a
    hit in a read-only store needs no warning."""
    text = "\n".join(store.location.notes)
    if text and text not in _told:
        _told.add(text)
        warnings.warn(text, StoreWarning, stacklevel=7)


def tell_of_compilers(plan: Plan) -> None:
    """Report once what a user should know about the chosen compilers."""
    from opkiln.engine import events
    from opkiln.toolchain import choice

    note = choice.note(plan.target.backend, plan.toolchain)
    if note and note not in _told:
        _told.add(note)
        events.emit(events.NOTE, text=note)
