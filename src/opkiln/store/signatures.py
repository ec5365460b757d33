"""Signatures of bundles, and the keys that are trusted.

A bundle's index has the digest of everything else in it (``store.archive``), so a signature of the
index signs the whole bundle. The signatures are the last member of the bundle, one for each key:

    {"sha256": …, "manifest": {"kind": "signatures", "version": 1,
                               "signatures": [["ed25519:<public key>", "<signature>"], …]}}

The signed message is a line that is used for nothing else, with a version, and the SHA-256 of the
index. The file contains its own digest, so damage is found even if no key is configured.

An artifact of a remote tier has signatures of the same form beside it. They are for its name, its
digest and its size, so they are verified before anything of it is downloaded.

The package ``cryptography`` is optional. It is imported only if ``OPKILN_TRUSTED_KEYS`` is set. If
it is needed and missing, every bundle is refused, signed or not.
"""

from __future__ import annotations

import base64
import binascii
import os
import shlex

from opkiln.base import trust
from opkiln.errors import SettingError, StoreError
from opkiln.settings import settings
from opkiln.store.entry import SCHEMA, parse_manifest, write_manifest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

MEMBER = "opkiln-bundle.sig.json"
LARGEST = 16 << 10  # limit for all signatures of a bundle, in bytes
MOST = 32  # limit for the number of signatures of a bundle
VARIABLE = "OPKILN_TRUSTED_KEYS"

_KIND, _VERSION = "signatures", 1
_ALGORITHM = "ed25519:"
_LARGEST_KEYS = 1 << 20  # limit for a file of keys, in bytes


class Untrusted(StoreError):
    """A bundle without a signature by a trusted key. It may be intact, but it is not used.

    Compare ``OPKILN_TRUSTED_KEYS`` with the key of the bundle's maker, or have the maker sign it:
    `opkiln cache sign FILE --key KEY`.
    """


def message(index_sha256: str) -> bytes:
    """The message that a key signs for a bundle."""
    return f"opkiln bundle signature {_VERSION}\n{index_sha256}\n".encode()


def artifact_message(name: str, sha256: str, size: int) -> bytes:
    """The message that a key signs for an artifact of a remote tier."""
    return f"opkiln artifact signature {_VERSION}\n{name}\n{sha256}\n{size}\n".encode()


def write_key(public: bytes) -> str:
    """A public key as one word, the form in which people see, compare and list keys."""
    return _ALGORITHM + base64.b64encode(public).decode()


def parse_key(text: str) -> bytes:
    """The 32 bytes of a public key. Raises ValueError if ``write_key`` would not write this
    text."""
    try:
        public = base64.b64decode(text.removeprefix(_ALGORITHM), validate=True)
    except (binascii.Error, ValueError):
        public = b""
    if len(public) != 32 or write_key(public) != text:
        raise ValueError(f"{text[:100]!r} is not a public key such as {write_key(bytes(32))}")
    return public


def write(signatures: Mapping[str, bytes]) -> bytes:
    """The member of a bundle that contains these signatures. ``signatures`` maps keys to them."""
    listed = [[key, base64.b64encode(each).decode()] for key, each in sorted(signatures.items())]
    return write_manifest(
        {"schema": SCHEMA, "kind": _KIND, "version": _VERSION, "signatures": listed}
    )


def read(data: bytes) -> dict[str, bytes]:
    """The signatures in a member, by key. Does not verify them. Raises ValueError if ``write``
    would not write this data."""
    body = parse_manifest(data, MEMBER)
    try:
        listed = body["signatures"]
        found = {str(key): base64.b64decode(text, validate=True) for key, text in listed}
    except (KeyError, TypeError, binascii.Error) as error:
        raise ValueError(f"its signatures cannot be read: {error}") from error
    for key, each in found.items():
        parse_key(key)
        if len(each) != 64:
            raise ValueError(f"the signature by {key} has {len(each)} bytes, not 64")
    if not 0 < len(found) <= MOST or write(found) != data:
        raise ValueError("its signatures are not in the form that opkiln writes")
    return found


def keys_to_trust() -> tuple[str, ...] | None:
    """The trusted keys, one of which must have signed each bundle; None if none are configured.
    Raises SettingError for a malformed key. Raises Untrusted if a file of keys cannot be read or is
    writable by others: then no key is known to be trusted."""
    listed = settings.trusted_keys
    if listed is None:
        return None
    keys: list[str] = []
    for word in listed:
        if not word.startswith(_ALGORITHM):
            keys += _keys_in(word)
            continue
        try:
            parse_key(word)
        except ValueError as error:
            raise SettingError(f"{VARIABLE}: {error}", hint=f"unset {VARIABLE}") from None
        keys.append(word)
    return tuple(dict.fromkeys(keys))


def _keys_in(path: str) -> list[str]:
    """The keys in a file, one per line. Text after a key, and a line with ``#``, is a comment."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            reason = trust.fault(path, os.fstat(fd))
            data = file.read(_LARGEST_KEYS + 1)
    except OSError as error:
        raise _no_keys(path, error.strerror or str(error)) from error
    if reason:
        raise _no_keys(path, reason)
    try:
        lines = (line.split() for line in data.decode().splitlines())
        keys = [words[0] for words in lines if words and not words[0].startswith("#")]
        for key in keys:
            parse_key(key)
        if not keys or len(data) > _LARGEST_KEYS:
            raise ValueError("it has no keys" if not keys else "it is too long")
    except ValueError as error:
        raise _no_keys(path, str(error)) from error
    return keys


def _no_keys(path: str, reason: str) -> Untrusted:
    return Untrusted(
        f"the keys in {path}, which {VARIABLE} names, cannot be used: {reason}",
        why="without them no bundle is trusted",
        hint=f"ls -l {shlex.quote(path)}",
    )


_good: set[tuple[bytes, bytes, str]] = set()  # messages, signatures, keys: verified in this process


def require(path: str, signed: bytes, data: bytes) -> str:
    """The trusted key that has signed a message; empty if no keys are configured. ``data`` is the
    result of ``write``, empty if there are no signatures. Raises Untrusted, which names what was
    signed (``path``), its signers and the trusted keys."""
    keys = keys_to_trust()
    if keys is None:
        return ""
    if not data:
        hint = f"opkiln cache sign {shlex.quote(path)} --key FILE"
        raise _refusal(path, "it is not signed", keys, hint)
    try:
        signatures = read(data)
    except ValueError as error:
        raise _refusal(path, str(error), keys) from error
    ours = [key for key in keys if key in signatures]
    if not ours:
        raise _refusal(path, f"it is signed by {', '.join(signatures)}", keys)
    for key in ours:
        checked = (signed, signatures[key], key)
        if checked in _good or _verifies(path, key, signatures[key], signed):
            _good.add(checked)
            return key
    raise _refusal(path, f"its signature by {', '.join(ours)} is for something else", keys)


def _verifies(path: str, key: str, signature: bytes, signed: bytes) -> bool:
    try:
        library = ed25519()
    except StoreError as error:
        what = f"{path} is refused: its signature by {key} cannot be checked"
        raise Untrusted(what, why=error.what, hint=error.hint) from error
    from cryptography.exceptions import InvalidSignature

    try:
        library.Ed25519PublicKey.from_public_bytes(parse_key(key)).verify(signature, signed)
    except InvalidSignature:
        return False
    return True


def ed25519() -> ModuleType:
    """The Ed25519 module of ``cryptography``. Raises StoreError if it is missing or too old."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519 as library
    except ImportError as error:
        raise StoreError(
            f"signatures need the package cryptography: {error}", hint="pip install 'opkiln[sign]'"
        ) from error
    return library


def _refusal(path: str, reason: str, keys: tuple[str, ...], hint: str = "") -> Untrusted:
    return Untrusted(
        f"{path} is refused: {reason}, and {VARIABLE} asks for a signature by {' or '.join(keys)}",
        hint=hint or f"echo ${VARIABLE}    # compare it with the key of the bundle's maker",
    )
