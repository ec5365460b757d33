"""What is left out of a report: secrets always; who and where the user is, where others read it."""

from __future__ import annotations

import os
import pwd
import re

from opkiln.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

# A name, and what gives it a value: API_TOKEN=x, "X-Auth-Token: x", --password x.
_GIVEN = re.compile(r"([A-Za-z0-9_-]+)(=|:\s+|\s+)(?=\S)")
# In a name as a whole word, or at the end of one (HFTOKEN); but no MAX_TOKENS, no TOKENIZER.
_WORD = re.compile(r"auth|pwd|.*(token|secrets?|password|passwd|passphrase|credentials?|apikey)")
# What the services that hand them out begin their tokens with.
_SHAPE = re.compile(
    r"(?<![A-Za-z0-9])(?:(?:gh[opsur]_|github_pat_|glpat-)[\w-]{8,}|AKIA[0-9A-Z]{12,}"
    r"|hf_[A-Za-z0-9]{12,}|sk-[\w-]{12,})"
)
_BEARER = re.compile(r"\b(Bearer|Basic)\s+\S+", re.IGNORECASE)
_LOGIN = re.compile(r"://[^/\s]+@")  # to the last @: a password may have one
_WITH_SLASH = re.compile(r"[^\s`|()\"'<>]*/[^\s`|()\"'<>]*")
_BETWEEN = r"\s:;,=|()\[\]{}<>\"'`"  # paths


def without_secrets(text: str) -> str:
    """``-DAPI_TOKEN=***``, ``https://***@host``: what looks like a secret is starred out.

    From a name that is a secret's to the end: where a value with blanks ends, nothing tells.
    """
    for given in _GIVEN.finditer(text):
        name, by = given.groups()
        if (not by.isspace() or name.startswith("--")) and _is_secret(name):
            text = f"{text[: given.end()]}***"
            break
    for pattern, instead in ((_LOGIN, "://***@"), (_BEARER, r"\1 ***"), (_SHAPE, "***")):
        text = pattern.sub(instead, text)
    return text


def words_without_secrets(words: tuple[Any, ...]) -> tuple[Any, ...]:
    """Each word of a command line without secrets; so is the one behind ``--token``."""
    return tuple(_words(words))


def _words(words: tuple[Any, ...]) -> Iterator[Any]:
    before = ""
    for each in words:
        if not isinstance(each, str):
            yield each
        elif before.startswith("--") and "=" not in before and _is_secret(before):
            yield "***"
        else:
            yield without_secrets(each)
        before = each if isinstance(each, str) else ""


def _is_secret(name: str) -> bool:
    """Whether a variable, macro or option of this name holds a secret."""
    spread = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", re.sub(r"^-D", "", name))  # apiKey
    words = [word for word in re.split("[_-]+", spread.lower()) if word]
    return any(map(_WORD.fullmatch, words)) or words[-1:] == ["key"]


def without_user(text: str) -> str:
    """Paths without the home directory (``~``) and the user's name (``<user>``)."""
    home, names = _user()
    for each in sorted(home, key=len, reverse=True):
        # Where a path begins, if need be behind a flag or a scheme (-I/root, file:///root), and not
        # in the midst of one: /data/root is another place than /root.
        begin = rf"(?<![^{_BETWEEN}])((?://)?[^/{_BETWEEN}]*)"
        text = re.sub(rf"{begin}{re.escape(each)}(?![\w.-])", r"\1~", text)
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
