"""What every kind of remote tier can do, and how it fails.

A tier has blobs, which are found by their SHA-256, and names. A blob is a bundle of one entry
(``store.archive``). A name leads to the blob that was published under it last. Nothing that a tier
says is believed: a blob is hashed, and only a signature or a lock file makes it trusted.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Pulse = Callable[[], None]  # called after each sign of life of the other side

LARGEST_RECORD = 1 << 20  # bytes of a name's record, or of a manifest
CHUNK = 1 << 18


class Published(NamedTuple):
    """What a name leads to."""

    sha256: str
    size: int
    signatures: str  # as ``store.signatures.write`` gives them; "" if there are none
    labels: Mapping[str, str]  # what people see of it: op, package, target


class Absent(Exception):
    """The tier answered, and does not have it."""


class Unusable(Exception):
    """The tier answered with something that is refused. Its other answers may be good."""


class Forbidden(Exception):
    """The tier answered that this login may not do this. Its other answers may be good: a bucket
    also says so of an object that is not there, to those who may not list it."""


class Unreachable(Exception):
    """The tier gave no usable answer. ``hint`` is what may help."""

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.hint = hint


class Tier(Protocol):
    """One place. Every method may raise Forbidden, Unreachable, OSError, and http.client's
    errors."""

    url: str

    def published(self, name: str, pulse: Pulse) -> Published | None:
        """What a name leads to; None if nothing was published under it. Raises Unusable."""

    def read(self, sha256: str, start: int, pulse: Pulse) -> Iterator[tuple[int, bytes]]:
        """A blob in pieces, each with its offset. They may begin before ``start``, at 0. Raises
        Absent."""

    def write(self, name: str, file: str, what: Published, pulse: Pulse) -> None:
        """Publish a file under a name. The name leads to it only when all of it is there. Anybody
        may do the same at the same time."""
