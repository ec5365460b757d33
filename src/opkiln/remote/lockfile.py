"""Lock files: which artifacts may serve, by their digests.

`opkiln lock` writes one from the store, for a repository. Whoever has the file takes exactly these
artifacts from any tier, and needs no signature: the file's reviewers vouch for them.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from typing import Any, NamedTuple

from opkiln.base.digest import open_regular, read_opened
from opkiln.base.trust import fault
from opkiln.errors import StoreError

_VERSION = 1
_LARGEST = 16 << 20
_HEAD = """\
# Compiled ops by digest, for `opkiln cache pull --lock` and OPKILN_LOCK.
# `opkiln lock` writes this file; do not edit it.
version = 1
"""


class LockRow(NamedTuple):
    """One artifact: an op for a target. The order is that of the file."""

    package: str
    op: str
    backend: str
    archs: tuple[str, ...]
    machine: str
    cpu: str
    cpu_features: tuple[str, ...]
    abi: str
    name: str  # under which it is published
    sha256: str
    size: int

    @property
    def target(self) -> str:
        """What it was made for, for people."""
        made = "+".join((self.cpu, *self.cpu_features))
        return f"{self.backend} {';'.join(self.archs)}, {made}" if self.archs else made


def write(found: Iterable[LockRow]) -> str:
    """The text of a lock file. The same artifacts give the same text."""
    parts = [_HEAD]
    for each in sorted(set(found)):
        rows = each._asdict().items()
        # TOML's numbers, lists and texts are written as JSON's.
        lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in rows]
        parts.append("\n[[artifact]]\n" + "\n".join(lines) + "\n")
    return "".join(parts)


def read(path: str) -> tuple[LockRow, ...]:
    """The artifacts of a lock file. Raises StoreError if it cannot be read, or if everybody could
    have written it."""
    import tomllib

    try:
        with open_regular(path, _LARGEST) as (fd, found):
            if reason := fault(path, found, listed=True):
                raise StoreError(f"the lock file {reason}", hint=f"chmod o-w {shlex.quote(path)}")
            body = tomllib.loads(read_opened(fd, found, _LARGEST, path).decode())
        if body.get("version") != _VERSION:
            raise ValueError(f"it has the version {body.get('version')!r}, not {_VERSION}")
        return tuple(_parse_row(each) for each in body.get("artifact", []))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        told = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise StoreError(
            f"the lock file {path} cannot be used: {told}", hint="opkiln lock    # writes ops.lock"
        ) from error


def _parse_row(row: dict[str, Any]) -> LockRow:
    values: list[Any] = []
    for name in LockRow._fields:
        value: Any = row[name]
        kind: Any = {"size": int, "archs": list, "cpu_features": list}.get(name, str)
        if type(value) is not kind:
            raise ValueError(f"{name} is {value!r}")
        values.append(tuple(str(each) for each in value) if kind is list else value)
    return LockRow(*values)
