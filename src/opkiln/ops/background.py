"""A step that is made in a thread of its own, and the handle to wait for it."""

from __future__ import annotations

import threading

from opkiln.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType


class StepHandle:
    """A step that is under way. Parameters, states and copies are not to be touched until it is
    done; ``wait()`` says when.

    A handle that is closed has let go of the step: asking it for anything raises UsageError. As a
    context manager it waits and closes at the end.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._told = False  # the error was raised by wait()
        self._closed = False

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        # A thread for each step: it needs no end of its own, and none survives a fork. What it
        # costs, torch's threads under it included, is far less than a step that is worth it.
        self._thread = threading.Thread(target=run, name="opkiln-step")
        self._thread.start()

    def done(self) -> bool:
        """Whether the step is made, or has failed."""
        self._check_open()
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        """Return when the step is made; raise what it raised, at every call.

        Raises TimeoutError when that takes longer than ``timeout`` seconds; the step goes on.
        """
        self._check_open()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the step is not made after {timeout} s")
        self._told = True
        if self._error is not None:
            raise self._error

    def raise_untold(self) -> None:
        """Raise what a finished step raised, where nobody has waited to be told."""
        if not self._told and self._error is not None:
            self._told = True
            raise self._error

    def close(self) -> None:
        """Wait, then let go of the step. To close a second time does nothing."""
        if not self._closed:
            try:
                self.wait()
            finally:
                self._closed = True

    @property
    def in_flight(self) -> bool:
        """Whether the step is still being made; may be asked of a closed handle, too."""
        return self._thread.is_alive()

    def __enter__(self) -> StepHandle:
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(
                "this handle of a step is closed",
                why="it was closed by close() or at the end of its with block",
                hint="handle = optimizer.step_in_background()",
            )
