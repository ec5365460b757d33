"""opkiln's errors, also as the exceptions that torch.utils.cpp_extension raises in their place.

Programs catch torch's: ``except RuntimeError`` around a build, ``except ImportError`` around what
cannot be loaded. These are both.
"""

from __future__ import annotations

from contextlib import contextmanager

from opkiln.errors import LoadError, LoadTestError, OpkilnError
from opkiln.model import PYTHON

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


class ExtensionError(OpkilnError, RuntimeError):
    """An extension cannot be built."""


class ExtensionNotLoaded(LoadError, ImportError):
    """An extension module was built and cannot be imported."""


class LibraryNotLoaded(LoadError, OSError):
    """An extension without a module was built and cannot be loaded."""


class ToolkitMissing(OpkilnError, OSError):
    """There is no toolkit that a directory could be named of."""

    exit_code = 3


@contextmanager
def as_torchs(kind: str) -> Iterator[None]:
    """Raise what torch would raise for an extension of this kind, with opkiln's text."""
    try:
        yield
    except OpkilnError as error:
        opened = isinstance(error, LoadError) and isinstance(error.__cause__, OSError | ImportError)
        found: type[OpkilnError] = ExtensionError
        if opened or isinstance(error, LoadTestError):
            found = ExtensionNotLoaded if kind == PYTHON else LibraryNotLoaded
        raised = found(error.what, why=error.why, hint=error.hint)
        raised.exit_code = error.exit_code
        raise raised from error.__cause__
