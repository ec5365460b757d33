"""What is left out of a report: secrets always; who and where the user is, where others read it."""

from __future__ import annotations

import os
import pwd
import re

from opkiln.settings import settings

_SECRET = re.compile(
    r"([A-Za-z0-9_]*(?:token|secret|passw(?:or)?d|api_?key|credential)[A-Za-z0-9_]*=)\S+",
    re.IGNORECASE,
)
_LOGIN = re.compile(r"://[^/@\s]+@")
_WITH_SLASH = re.compile(r"[^\s`|()\"'<>]*/[^\s`|()\"'<>]*")


def without_secrets(text: str) -> str:
    """``-DAPI_TOKEN=***``, ``https://***@host``: what looks like a secret is starred out."""
    return _LOGIN.sub("://***@", _SECRET.sub(r"\1***", text))


def without_user(text: str) -> str:
    """Paths without the home directory (``~``) and the user's name (``<user>``)."""
    home, names = _user()
    for each in sorted(home, key=len, reverse=True):
        text = re.sub(rf"{re.escape(each)}(?![\w.-])", "~", text)
    for name in names:
        # In paths only: a user may be called as a word of the report is.
        word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])")
        text = _WITH_SLASH.sub(lambda path, word=word: word.sub("<user>", path[0]), text)  # type: ignore[misc]
    return text


def _user() -> tuple[set[str], set[str]]:
    """(home directories, names) of this user. That it is root tells nobody anything."""
    homes, names = {settings.home or ""}, {os.path.basename(settings.home or "")}
    try:
        known = pwd.getpwuid(os.getuid())
    except KeyError:
        pass  # a container's user without an entry
    else:
        homes.add(known.pw_dir)
        names.add(known.pw_name)
    homes |= {os.path.realpath(home) for home in homes if home}
    return {home for home in homes if len(home) > 1}, names - {"", "root"}
