"""Who listens while a load builds: people, and the trace file, unless somebody listens already."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

from opkiln.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_listening: ContextVar[bool] = ContextVar("opkiln_progress", default=False)


@contextmanager
def shown(trace: str | None = None) -> Iterator[None]:
    """Within the block, builds report as ``OPKILN_PROGRESS`` and ``OPKILN_TRACE`` say.

    An outer block covers the inner ones: a command that builds ten ops shows one bar.
    """
    if _listening.get():
        yield
        return
    from opkiln.engine import chrome, events, progress

    token = _listening.set(True)
    try:
        with ExitStack() as stack:
            stack.enter_context(events.listening(progress.for_people()))
            file = trace or settings.trace
            if file:
                stack.enter_context(events.listening(chrome.Trace(file)))
            yield
    finally:
        _listening.reset(token)
