"""Keys, and signing bundles with them. ``store.signatures`` has the form, and checks.

A private key is a file as OpenSSL writes it (PKCS #8, PEM, not encrypted), for its owner alone; a
public one is a word, ``ed25519:…``.
"""

from __future__ import annotations

import os
import shlex
import stat
from typing import NamedTuple

from opkiln.digest import sha256_file
from opkiln.errors import StoreError, UsageError
from opkiln.ship.bundle import opened, replacing
from opkiln.store import signatures
from opkiln.store.archive import Bundle, Damaged, signed_tail

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_CHUNK = 1 << 20
_LARGEST_KEY = 64 << 10  # bytes


class Pair(NamedTuple):
    """A new pair of keys."""

    private: str  # the file
    public: str  # the file
    key: str  # what is in it: the word that others list


class Signed(NamedTuple):
    """A bundle that was signed."""

    path: str
    sha256: str  # of the file as it is now
    key: str
    keys: tuple[str, ...]  # all that have signed it


def generate(private: str) -> Pair:
    """Make a pair of keys: the private one in a new file that its owner alone can read, the public
    one beside it, with ``.pub``. Never overwrites a file. Raises StoreError, UsageError."""
    made = signatures.ed25519().Ed25519PrivateKey.generate()
    from cryptography.hazmat.primitives import serialization

    pem = made.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    key = _public(made)
    public = f"{private}.pub"
    _new_file(public, f"{key}\n".encode(), 0o644)
    try:
        _new_file(private, pem, 0o600)
    except BaseException:
        os.unlink(public)
        raise
    return Pair(private, public, key)


def _new_file(path: str, data: bytes, mode: int) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(fd, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(fd)
    except FileExistsError as error:
        raise UsageError(
            f"{path} exists, and a key is not overwritten", hint=f"ls -l {shlex.quote(path)}"
        ) from error
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error


def sign(file: str, key_file: str) -> Signed:
    """Sign a bundle. It is replaced by the signed one, whole or not at all.

    Every byte of it is checked first. Signatures by other keys stay; one by the same key is made
    anew, and is the same. Raises StoreError, UsageError.
    """
    private = _private(key_file)
    key = _public(private)
    with opened(file, to_use=False) as bundle:
        listed, end = bundle.check(), bundle.index.end
        found = signatures.read(bundle.index.signature) if bundle.index.signature else {}
        found[key] = private.sign(signatures.message(bundle.index.sha256))
        if len(found) > signatures.MOST:
            raise UsageError(
                f"{file} has {signatures.MOST} signatures, which is the most",
                hint="opkiln cache export FILE    # an unsigned one, and sign that",
            )
        data = signatures.write(found)
        with replacing(file, end + len(data)) as out, open(file, "rb") as source:
            left = end
            while left and (chunk := source.read(min(left, _CHUNK))):
                out.write(chunk)
                left -= len(chunk)
            out.write(signed_tail(listed, end, data))
            out.flush()
            with Bundle(out.name) as written:  # the file may have been replaced since it was opened
                written.check()
                if written.index.sha256 != bundle.index.sha256:
                    raise Damaged("it was replaced while it was signed")
    return Signed(file, sha256_file(file), key, tuple(sorted(found)))


def _private(path: str) -> Ed25519PrivateKey:
    """Raises StoreError for a file that cannot be read or holds no such key, and for one that
    others can read: then the key may be theirs already."""
    signatures.ed25519()  # or the error that says how to get it
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            mode = stat.S_IMODE(os.fstat(fd).st_mode)
            pem = file.read(_LARGEST_KEY)
    except OSError as error:
        raise StoreError(
            f"the key {path} cannot be read: {error.strerror or error}",
            hint="opkiln cache keygen FILE",
        ) from error
    if mode & 0o077:
        raise StoreError(
            f"the private key {path} can be read or changed by others (mode {mode:04o})",
            hint=f"chmod 600 {shlex.quote(path)}",
        )
    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        # Not the library's text: it may quote what is in the file.
        raise StoreError(
            f"{path} holds no private key that can be read ({type(error).__name__})",
            why="it must be a PEM file that is not encrypted",
            hint="opkiln cache keygen FILE",
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise StoreError(
            f"{path} holds a key of another kind than Ed25519", hint="opkiln cache keygen FILE"
        )
    return key


def _public(private: Ed25519PrivateKey) -> str:
    return signatures.write_key(private.public_key().public_bytes_raw())
