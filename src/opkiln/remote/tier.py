"""The interface of every kind of remote tier, and the ways in which one fails.

A tier has blobs, which are found by their SHA-256, and names. A blob is a bundle of one entry
(``store.archive``). A name leads to the blob that was published under it last. Nothing that a tier
says is believed. A blob is hashed, and only a signature or a lock file makes it trusted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any, NamedTuple, Protocol

from opkiln.errors import visible
from opkiln.remote.patience import Deadline

LARGEST_RECORD = 1 << 20  # bytes of a name's record, or of a manifest
CHUNK = 1 << 18
_LONGEST = 500  # characters of what is said of a failure


class Failure(Exception):
    """A tier did not answer a request. ``what`` is one line without control characters, whatever
    the tier sent. ``hint`` may say what helps."""

    def __init__(self, reason: str, hint: str = "") -> None:
        text = " ".join(reason[: 2 * _LONGEST].split())
        self.what = visible(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…")
        self.hint = hint
        super().__init__(self.what)


class Absent(Failure):
    """The tier answered, and does not have it."""


class Unusable(Failure):
    """The tier answered with something that is refused. Its other answers may be good."""


class Forbidden(Failure):
    """The tier answered that this login may not do this. Its other answers may be good: to a login
    that may not list it, a bucket says the same of a missing object."""


class Unreachable(Failure):
    """The tier gave no usable answer."""


# The errors of the standard library, and of our parsing, for malformed data.
_MALFORMED = (
    ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError,
    HTTPException,
)  # fmt: skip


@contextmanager
def refuse_malformed(what: str, kind: type[Failure] = Unreachable) -> Iterator[None]:
    """For a block that parses data of others: any error in the data is raised as ``kind``."""
    try:
        yield
    except OSError:
        raise  # some of them are ValueErrors, too
    except _MALFORMED as error:
        said = f"{what} cannot be understood: {type(error).__name__}: {error}"
        raise kind(said) from error


class Publication(NamedTuple):
    """The blob that a name leads to."""

    sha256: str
    size: int
    signatures: str  # as ``store.signatures.write`` gives them; "" if there are none
    labels: Mapping[str, str]  # for people: op, package, target


def read_small(pieces: Iterator[tuple[int, bytes]]) -> bytes:
    """A record that comes in pieces. Raises Unusable if it is too long for one."""
    data = bytearray()
    for _, piece in pieces:
        data += piece
        if len(data) > LARGEST_RECORD:
            raise Unusable(f"its record is longer than {LARGEST_RECORD} bytes")
    return bytes(data)


def parse_publication(sha256: Any, size: Any, signatures: Any, labels: Any) -> Publication:
    """The parts of a record, each checked for its type. Raises ValueError."""
    if type(size) is not int or not (sha256 + signatures).isascii():
        raise ValueError("its digest, its size or its signatures are of another type")
    return Publication(
        sha256, size, signatures, {str(name): str(text) for name, text in labels.items()}
    )


class Tier(Protocol):
    """One remote tier. Every method may raise Forbidden, Unreachable and OSError, and what
    ``refuse_malformed`` refuses."""

    def look_up(self, name: str, deadline: Deadline) -> Publication | None:
        """The blob that a name leads to; None if nothing was published under it. Raises
        Unusable."""

    def read(self, sha256: str, start: int, deadline: Deadline) -> Iterator[tuple[int, bytes]]:
        """A blob in pieces, each with its offset. They may begin before ``start``, at 0. Raises
        Absent."""

    def write(self, name: str, file: str, what: Publication, deadline: Deadline) -> None:
        """Publish a file under a name. The name leads to it only when all of it is there. Others
        may publish the same at the same time."""
