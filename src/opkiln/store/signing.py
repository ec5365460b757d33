"""Makes keys, and signs bundles with them. ``store.signatures`` checks the signatures.

A private key is a file in OpenSSL's form (PKCS #8, PEM, not encrypted) that only its owner can
read. A public key is a word, ``ed25519:…``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import stat
from typing import TYPE_CHECKING, NamedTuple

from opkiln.base.digest import LARGEST_BUNDLE, sha256_file
from opkiln.errors import StoreError, UsageError
from opkiln.store import publish, signatures
from opkiln.store.archive import Bundle, Damaged, signed_tail
from opkiln.store.bundle import open_bundle, replace_bundle

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_LARGEST_KEY = 64 << 10  # bytes


class Pair(NamedTuple):
    """A new pair of keys."""

    private: str  # the file
    public: str  # the file
    key: str  # the word in that file, which others list


class SignedBundle(NamedTuple):
    """A bundle that was signed."""

    path: str
    sha256: str  # of the signed file
    key: str
    keys: tuple[str, ...]  # of all its signatures


def generate(private: str) -> Pair:
    """Make a pair of keys. The public one is written next to the private one, with ``.pub``. Only
    the owner can read the private one. Never overwrites a file. Raises StoreError, UsageError."""
    made = signatures.ed25519().Ed25519PrivateKey.generate()
    from cryptography.hazmat.primitives import serialization

    pem = made.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
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
        with publish.create(path, mode) as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
    except FileExistsError as error:
        raise UsageError(
            f"{path} exists; keys are never overwritten", hint=f"ls -l {shlex.quote(path)}"
        ) from error
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error


def sign(file: str, key_file: str) -> SignedBundle:
    """Sign a bundle. The signed file replaces it, whole or not at all. Every byte is checked first.
    Signatures by other keys stay. Signing again with the same key gives the same bytes. Raises
    StoreError, UsageError."""
    private = _private(key_file)
    key = _public(private)
    with open_bundle(file, signed=False) as bundle:
        end = bundle.index.end
        found = signatures.read(bundle.index.signature) if bundle.index.signature else {}
        found[key] = private.sign(signatures.message(bundle.index.sha256))
        if len(found) > signatures.MOST:
            raise UsageError(
                f"{file} has {signatures.MOST} signatures, and no more are allowed",
                hint="opkiln cache export FILE    # export it again, unsigned, and sign that",
            )
        data = signatures.write(found)
        with replace_bundle(file, end + len(data)) as out, open(file, "rb") as source:
            shutil.copyfileobj(source, out)
            out.seek(end)
            out.truncate()
            out.write(signed_tail(bundle.headers, end, data))
            out.flush()
            with Bundle(out.name) as written:  # the file may have been replaced since it was opened
                written.check()
                if written.index.sha256 != bundle.index.sha256:
                    raise Damaged("it was replaced while it was signed")
    return SignedBundle(file, sha256_file(file, LARGEST_BUNDLE), key, tuple(sorted(found)))


def sign_artifact(name: str, sha256: str, size: int, key_file: str) -> bytes:
    """The signature of an artifact of a remote tier, in the form of ``store.signatures.write``.
    Raises StoreError."""
    private = _private(key_file)
    signed = private.sign(signatures.artifact_message(name, sha256, size))
    return signatures.write({_public(private): signed})


def _private(path: str) -> Ed25519PrivateKey:
    """The key in a file. Raises StoreError if the file cannot be read, has no such key, or can be
    read by others, who may have copied the key."""
    signatures.ed25519()  # raises an error that says how to install it
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
        # Without the library's own message: it may quote the file.
        raise StoreError(
            f"{path} does not contain a readable private key ({type(error).__name__})",
            why="it must be a PEM file that is not encrypted",
            hint="opkiln cache keygen FILE",
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise StoreError(
            f"the key in {path} is not an Ed25519 key", hint="opkiln cache keygen FILE"
        )
    return key


def _public(private: Ed25519PrivateKey) -> str:
    return signatures.write_key(private.public_key().public_bytes_raw())
