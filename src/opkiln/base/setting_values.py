"""Parsers for the texts of variables. Each raises a ValueError that says what was expected.
``settings.py`` has the table that uses them."""

from __future__ import annotations

import os
from collections.abc import Callable


def choice(*values: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in values:
            raise ValueError("expected " + " or ".join(values))
        return text.lower()

    return parse


def switch(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("1", "on", "true", "yes"):
        return True
    if lowered in ("0", "off", "false", "no"):
        return False
    raise ValueError("expected 1 or 0, on or off")


def switch_or_path(text: str) -> str | None:
    """None for off, "" for on, or a path."""
    try:
        return "" if switch(text) else None
    except ValueError:
        return text


def positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError("expected a whole number of at least 1")
    return int(text)


def _number(text: str) -> float:
    """A number; -1, which is in no range, for a text that is not one."""
    try:
        return float(text)
    except ValueError:
        return -1.0


def seconds(text: str) -> float:
    value = _number(text)
    if not 0 < value < 1e9:
        raise ValueError("expected a positive number of seconds")
    return value


_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_size(text: str) -> int:
    """Bytes from ``512M``, ``4GiB``, ``1048576``. Raises ValueError."""
    lowered = text.strip().lower().removesuffix("ib").removesuffix("b")
    unit = lowered[-1:] if lowered[-1:] in ("k", "m", "g", "t") else ""
    number = _number(lowered.removesuffix(unit) if unit else lowered)
    if not 0 < number < 1e18:
        raise ValueError("expected a size such as 512M or 4G")
    return int(number * _UNITS[unit])


def words(text: str) -> tuple[str, ...]:
    import shlex

    return tuple(shlex.split(text))


def command(text: str) -> tuple[str, ...]:
    """A program, or a launcher and a program: ``g++``, ``/opt/my gcc/g++``, ``ccache g++``."""
    return (text,) if os.access(text, os.X_OK) else words(text)


def paths(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(os.pathsep) if part)


def directories(text: str) -> tuple[str, ...]:
    # A compiler runs in a directory of its own; these paths are relative to the user's.
    return tuple(os.path.abspath(part) for part in paths(text))


def keys(text: str) -> tuple[str, ...]:
    # Empty is refused: `OPKILN_TRUSTED_KEYS=$KEY` must not trust everybody if KEY is unset.
    if not (found := words(text)):
        raise ValueError("it has no key")
    import re

    for word in found:
        if word.startswith("ed25519:") and not re.fullmatch("ed25519:[A-Za-z0-9+/]{43}=", word):
            raise ValueError(f"{word} is not a public key: 43 characters and =")
    return found


_SCHEMES = ("oci", "oci+http", "https", "http", "s3", "gs", "file")


def urls(text: str) -> tuple[str, ...]:
    from urllib.parse import urlsplit

    found = words(text)
    for word in found:
        scheme, mark, rest = word.partition("://")
        if not mark or scheme not in _SCHEMES or not rest:
            raise ValueError(f"{word!r} is not a URL that begins with {'://, '.join(_SCHEMES)}://")
        if "@" in rest.partition("/")[0]:
            raise ValueError("a URL must not have a login in it; see docs/remotes.md")
        parts = urlsplit(word)
        _ = parts.port  # raises ValueError for a host or a port that cannot be
        if parts.query and scheme in ("oci", "oci+http") and not parts.query.startswith("tokens="):
            raise ValueError(f"{word!r} may only end with ?tokens=HOST")
    return found


def deepspeed(text: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The resorts of each of DeepSpeed's ops. The key "" has those of ops that are not named."""
    general: list[str] = []
    named: dict[str, tuple[str, ...]] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        op, equals, resort = word.rpartition("=")
        if resort not in ("ops", "engine", "off") or (equals and not op.isidentifier()):
            raise ValueError(f"{word!r} is not ops, engine, off or OP=one of these")
        if equals:
            named[op] = () if resort == "off" else (resort,)
        else:
            general.append(resort)
    if "off" in general and len(general) > 1:
        raise ValueError("off cannot be combined with another")
    chosen = tuple(each for each in ("ops", "engine") if each in general)
    return (("", chosen if general else ("ops", "engine")), *named.items())


def ops(text: str) -> tuple[str, ...]:
    """Names of ops; "1" stands for those in a recorded file."""
    try:
        return ("1",) if switch(text) else ()
    except ValueError:
        return tuple(text.replace(",", " ").split())


def gfx_version(text: str) -> tuple[int, ...]:
    words = text.split(".")
    if len(words) != 3 or not all(word.isascii() and word.isdigit() for word in words):
        raise ValueError("expected a version such as 10.3.0")
    return tuple(map(int, words))
