"""What probes found out, kept until the tool changes.

A record is a JSON file with the signatures of the files it speaks of. It is believed only while
every one of them holds. A lost record costs a probe; a damaged one is not believed.
"""

from __future__ import annotations

import json
import os
from typing import Any

from opkiln import evidence
from opkiln.digest import Signature, key
from opkiln.trust import claim, make_private

SCHEMA = 3


def recall(directories: tuple[str, ...], subject: str) -> dict[str, Any] | None:
    """The first record on this subject that describes it as it is."""
    found = (_recall(directory, subject) for directory in directories)
    return next((record for record in found if record is not None), None)


def _recall(directory: str, subject: str) -> dict[str, Any] | None:
    try:
        with open(_path(directory, subject), "rb") as file:
            record = json.loads(file.read())
        if record["schema"] != SCHEMA or record["subject"] != subject:
            return None
        for path, *fields in record["signatures"]:
            if not Signature(*fields).holds(path):
                return None
            evidence.file(path, fields)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return dict(record)


def remember(
    directories: tuple[str, ...],
    subject: str,
    facts: dict[str, Any],
    files: list[str],
    asked_at: int | None = None,
) -> None:
    """Keep facts about a subject, bound to these files, in the first of the directories.

    None, or one that cannot be written, is fine. Nothing is kept where one of the files is gone by
    now: what was asked is not what is there.

    ``asked_at`` is the time before the first question, now if left out: a file that changed since
    may not be the one that answered, so its signature is not to be believed.
    """
    if not directories:
        return
    try:
        signed = [(path, Signature.of(path)) for path in files]
    except OSError:
        return
    signatures = [[path, *sig._replace(read_at=asked_at or sig.read_at)] for path, sig in signed]
    record = {**facts, "schema": SCHEMA, "subject": subject, "signatures": signatures}
    temporary = f"{_path(directories[0], subject)}.{os.getpid()}-{os.urandom(6).hex()}"
    try:
        if claim(os.path.dirname(directories[0])):
            return  # somebody else's: a build would say so
        make_private(directories[0])
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            json.dump(record, file)
        os.replace(temporary, _path(directories[0], subject))
    except OSError:
        # A read-only or full store: the next process probes again, which is only slower.
        try:
            os.unlink(temporary)
        except OSError:
            pass


def _path(directory: str, subject: str) -> str:
    return os.path.join(directory, key("memo", subject) + ".json")
