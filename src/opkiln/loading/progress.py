"""Who listens while a load builds: people, the logger and the trace file, each once."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

from opkiln.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_listening: ContextVar[bool] = ContextVar("opkiln_progress", default=False)


@contextmanager
def shown(trace: str | None = None) -> Iterator[None]:
    """Within the block, builds report as ``OPKILN_PROGRESS``, ``OPKILN_TRACE`` and the logger say.

    An outer block covers the inner ones: a command that builds ten ops shows one bar.
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
