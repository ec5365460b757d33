"""The signatures of a bundle, public keys, and files of them."""

from __future__ import annotations

from fuzz.manifest import with_digest
from fuzz.scratch import file

from opkiln.settings import override
from opkiln.store import signatures


def one(data: bytes) -> None:
    for text in (data, with_digest(data)):
        try:
            found = signatures.read(text)
        except ValueError:
            continue
        assert signatures.write(found) == text
    try:
        key = data.decode("utf-8", "surrogateescape")
        assert signatures.write_key(signatures.parse_key(key)) == key
    except ValueError:
        pass
    with override(trusted_keys=(file("keys", data),)):
        try:
            assert signatures.keys_to_trust()
        except signatures.Untrusted:
            pass
