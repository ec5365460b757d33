"""What probes found out, kept until the tool changes.

A record is a JSON file with the signatures of the files it speaks of. It is believed only while
every one of them holds. A lost record costs a probe; a damaged one is not believed.
"""

from __future__ import annotations

import json
import os
from typing import Any

from opkiln.digest import Signature, key

SCHEMA = 1


def recall(directory: str, subject: str) -> dict[str, Any] | None:
    """The record on this subject, if what it describes is unchanged."""
    try:
        with open(_path(directory, subject), "rb") as file:
            record = json.loads(file.read())
        if record["schema"] != SCHEMA or record["subject"] != subject:
            return None
        for path, *fields in record["signatures"]:
            if not Signature(*fields).holds(path):
                return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return dict(record)


def remember(
    directory: str, subject: str, facts: dict[str, Any], files: list[str], asked_at: int
) -> None:
    """Keep facts about a subject, bound to these files. A store that cannot be written is fine.

    ``asked_at`` is the time before the first question: a file that changed since then may not be
    the one that answered, and a signature read that early is not believed for it.
    """
    signatures = [[path, *Signature.of(path)._replace(read_at=asked_at)] for path in files]
    record = {**facts, "schema": SCHEMA, "subject": subject, "signatures": signatures}
    temporary = f"{_path(directory, subject)}.{os.getpid()}-{os.urandom(6).hex()}"
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            json.dump(record, file)
        os.replace(temporary, _path(directory, subject))
    except OSError:
        # A read-only or full store: the next process probes again, which is only slower.
        try:
            os.unlink(temporary)
        except OSError:
            pass


def _path(directory: str, subject: str) -> str:
    return os.path.join(directory, key("memo", subject) + ".json")
