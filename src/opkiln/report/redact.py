"""Removes secrets from reports, and from those for others also the user's name and home."""

from __future__ import annotations

import os
import pwd
import re
from typing import Any

from opkiln.settings import settings

# A name that is followed by a value: API_TOKEN=x, "X-Auth-Token: x", --password x.
_GIVEN = re.compile(r"([A-Za-z0-9_-]+)(=|:\s+|\s+)(?=\S)")
# A whole word of the name, or the end of one (HFTOKEN); not MAX_TOKENS, not TOKENIZER.
_WORD = re.compile(r"auth|pwd|.*(token|secrets?|password|passwd|passphrase|credentials?|apikey)")
# The prefixes by which services mark their tokens.
_SHAPE = re.compile(
    r"(?<![A-Za-z0-9])(?:(?:gh[opsur]_|github_pat_|glpat-)[\w-]{8,}|AKIA[0-9A-Z]{12,}"
    r"|hf_[A-Za-z0-9]{12,}|sk-[\w-]{12,})"
)
_BEARER = re.compile(r"\b(Bearer|Basic)\s+\S+", re.IGNORECASE)
_LOGIN = re.compile(r"://[^/\s]+@")  # to the last @: a password may contain one
_WITH_SLASH = re.compile(r"[^\s`|()\"'<>]*/[^\s`|()\"'<>]*")
_BETWEEN = r"\s:;,=|()\[\]{}<>\"'`"  # paths


def hide_secrets(text: str) -> str:
    """``-DAPI_TOKEN=***``, ``https://***@host``: replaces what looks like a secret by stars.

    After the name of a secret, all the rest is replaced: a value may contain spaces.
    """
    for given in _GIVEN.finditer(text):
        name, by = given.groups()
        if (not by.isspace() or name.startswith("--")) and is_secret(name):
            text = f"{text[: given.end()]}***"
            break
    for pattern, instead in ((_LOGIN, "://***@"), (_BEARER, r"\1 ***"), (_SHAPE, "***")):
        text = pattern.sub(instead, text)
    return text


def hide_secrets_in_words(words: tuple[Any, ...]) -> tuple[Any, ...]:
    """The words of a command line without secrets, such as the word after ``--token``."""
    found, before = [], ""
    for each in words:
        if isinstance(each, str):
            secret = before.startswith("--") and "=" not in before and is_secret(before)
            found.append("***" if secret else hide_secrets(each))
        else:
            found.append(each)
        before = each if isinstance(each, str) else ""
    return tuple(found)


def is_secret(name: str) -> bool:
    """Whether a variable, macro or option of this name holds a secret."""
    spread = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", re.sub(r"^-D", "", name))  # apiKey
    words = [word for word in re.split("[_-]+", spread.lower()) if word]
    return any(map(_WORD.fullmatch, words)) or words[-1:] == ["key"]


def hide_user(text: str) -> str:
    """Paths without the home directory (``~``) and the user's name (``<user>``)."""
    home, names = _user()
    for each in sorted(home, key=len, reverse=True):
        # Only at the beginning of a path, perhaps after a flag or a scheme (-I/root, file:///root).
        # In the middle it is another path: /data/root.
        begin = rf"(?<![^{_BETWEEN}])((?://)?[^/{_BETWEEN}]*)"
        text = re.sub(rf"{begin}{re.escape(each)}(?![\w.-])", r"\1~", text)
    for name in names:
        # In paths only: the name may also be an ordinary word.
        word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])")
        text = _WITH_SLASH.sub(lambda path, word=word: word.sub("<user>", path[0]), text)  # type: ignore[misc]
    return text


def _user() -> tuple[set[str], set[str]]:
    """(home directories, names) of this user. The name root reveals nothing, so it stays."""
    homes, names = {settings.home or ""}, {os.path.basename(settings.home or "")}
    try:
        known = pwd.getpwuid(os.getuid())
    except KeyError:
        pass  # the user of a container may have no entry
    else:
        homes.add(known.pw_dir)
        names.add(known.pw_name)
    homes |= {os.path.realpath(home) for home in homes if home}
    return {home for home in homes if len(home) > 1}, names - {"", "root"}
