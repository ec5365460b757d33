"""Who made a bundle: keys, signatures, and what is refused where keys are configured."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from fault_rows import whole
from sample import command, layer

from opkiln.base.digest import sha256_file
from opkiln.errors import SettingError, StoreError, UsageError
from opkiln.machine.facts import Hasher
from opkiln.settings import override, settings
from opkiln.store import archive, bundle, sealed, signatures, signing
from opkiln.store.entry import Leaf, Refused


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPKILN_TRUSTED_KEYS", raising=False)
    sealed._kept.clear()
    signatures._good.clear()


def made(directory: Path, op: str = "one") -> Path:
    layer.add(directory / f"layer-{op}", op, b"\x7fELF" + op.encode() * 500)
    file = directory / f"{op}.bundle"
    bundle.write_bundle(str(directory / f"layer-{op}"), str(file))
    return file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return made(tmp_path)


def pair(directory: Path, name: str = "key") -> signing.Pair:
    return signing.generate(str(directory / name))


@pytest.fixture
def ours(tmp_path: Path) -> signing.Pair:
    return pair(tmp_path, "ours")


@pytest.fixture
def theirs(tmp_path: Path) -> signing.Pair:
    return pair(tmp_path, "theirs")


def refusals(file: Path, leaf: str, tmp_path: Path) -> list[str]:
    """Every way in, and what each said. All must refuse."""
    said = []
    for use in (
        lambda: bundle.read_bundle(str(file)),
        lambda: bundle.unpack(str(file), str(tmp_path / "store" / "v1")),
        lambda: archive.leaves(str(file), "somebody", "one"),
        lambda: archive.manifest(leaf),
    ):
        with pytest.raises(StoreError) as caught:
            use()
        said.append(str(caught.value))
    found = archive.examine(leaf, {}, Hasher())
    assert isinstance(found, Refused)
    assert not (tmp_path / "store").exists()
    return [*said, found.reason]


def accepted(file: Path, tmp_path: Path) -> None:
    assert len(bundle.read_bundle(str(file))) == 1
    (leaf,) = archive.leaves(str(file), "somebody", "one")
    assert archive.manifest(leaf)["op"] == "one"
    found = archive.examine(leaf, {}, Hasher())
    assert isinstance(found, Leaf)
    (taken,) = bundle.unpack(str(file), str(tmp_path / "taken" / "v1"))
    assert taken.op == "one"


def leaf_of(file: Path) -> str:
    return archive.leaves(str(file), "somebody", "one")[0]


# What is taken, and what is refused


def test_a_bundle_signed_by_a_trusted_key_is_taken(
    file: Path, ours: signing.Pair, theirs: signing.Pair, tmp_path: Path
) -> None:
    done = signing.sign(str(file), ours.private)
    assert (done.key, done.keys) == (ours.key, (ours.key,))
    assert done.sha256 == sha256_file(str(file))
    with override(trusted_keys=(theirs.key, ours.key)):
        accepted(file, tmp_path)


def test_an_unsigned_bundle_is_refused_where_keys_are_configured(
    file: Path, ours: signing.Pair, tmp_path: Path
) -> None:
    leaf = leaf_of(file)
    with override(trusted_keys=(ours.key,)):
        for text in refusals(file, leaf, tmp_path):
            assert f"{file} is refused: it is not signed" in text
            assert ours.key in text
    accepted(file, tmp_path)  # where none are, it is as before


def test_a_bundle_signed_by_somebody_else_is_refused_with_both_keys(
    file: Path, ours: signing.Pair, theirs: signing.Pair, tmp_path: Path
) -> None:
    leaf = leaf_of(file)
    signing.sign(str(file), theirs.private)
    with override(trusted_keys=(ours.key,)):
        for text in refusals(file, leaf, tmp_path):
            assert f"{file} is refused: it is signed by {theirs.key}" in text
            assert ours.key in text
    accepted(file, tmp_path)


def test_a_signature_of_another_bundle_does_not_serve(
    file: Path, ours: signing.Pair, tmp_path: Path
) -> None:
    """Copied from one that is signed, with digests and headers that are right."""
    other = made(tmp_path, "two")
    signing.sign(str(other), ours.private)
    leaf = leaf_of(file)
    with archive.Bundle(str(other)) as read:
        stolen = read.index.signature
    resign(file, stolen)
    accepted(file, tmp_path)
    with override(trusted_keys=(ours.key,)):
        for text in refusals(file, leaf, tmp_path):
            assert f"its signature by {ours.key} is for something else" in text


def test_a_signature_that_was_made_up_does_not_serve(
    file: Path, ours: signing.Pair, tmp_path: Path
) -> None:
    leaf = leaf_of(file)
    resign(file, signatures.write({ours.key: bytes(64)}))
    with override(trusted_keys=(ours.key,)):
        for text in refusals(file, leaf, tmp_path):
            assert "is for something else" in text


def test_entries_that_were_added_after_signing_are_refused(
    ours: signing.Pair, tmp_path: Path
) -> None:
    """The whole file written anew, every digest right, with the signature of what it was."""
    file = made(tmp_path)
    signing.sign(str(file), ours.private)
    with archive.Bundle(str(file)) as read:
        stolen = read.index.signature
    layer.add(tmp_path / "layer-one", "evil", b"\x7fELFevil")
    bundle.write_bundle(str(tmp_path / "layer-one"), str(file))
    resign(file, stolen)
    assert len(bundle.read_bundle(str(file))) == 2
    with (
        override(trusted_keys=(ours.key,)),
        pytest.raises(signatures.Untrusted, match="is for something else"),
    ):
        bundle.read_bundle(str(file))


def resign(file: Path, data: bytes) -> None:
    """Put signatures into a bundle as ``signing.sign`` would, whatever they are."""
    with archive.Bundle(str(file)) as read:
        read.check()
        listed, end = read.headers, read.index.end
        tail = archive.signed_tail(listed, end, data)
    file.write_bytes(file.read_bytes()[:end] + tail)
    bundle.Bundle(str(file)).check()


def test_a_flip_of_any_byte_of_a_signed_bundle_is_refused_also_without_keys(
    request: pytest.FixtureRequest, file: Path, ours: signing.Pair
) -> None:
    signing.sign(str(file), ours.private)
    good = file.read_bytes()
    assert len(good) > 3000
    for at in range(0, len(good), 1 if whole(request.config) else 11):
        file.write_bytes(good[:at] + bytes([good[at] ^ 0x20]) + good[at + 1 :])
        with pytest.raises(StoreError, match=file.name):
            bundle.read_bundle(str(file))


@pytest.mark.parametrize("more", [b"", b"PK\3\4", b"x" * 500])
def test_what_follows_a_signed_bundle_is_refused(
    more: bytes, file: Path, ours: signing.Pair
) -> None:
    signing.sign(str(file), ours.private)
    data = file.read_bytes()
    file.write_bytes(data + more if more else data[:-1])
    with pytest.raises(StoreError, match="is refused: it has"):
        bundle.read_bundle(str(file))


def test_signing_again_gives_the_same_bytes_and_leaves_the_entries_as_they_are(
    file: Path, ours: signing.Pair
) -> None:
    with zipfile.ZipFile(file) as read:
        before = {name: read.read(name) for name in read.namelist()}
    signing.sign(str(file), ours.private)
    once = file.read_bytes()
    signing.sign(str(file), ours.private)
    assert file.read_bytes() == once
    with zipfile.ZipFile(file) as read:
        assert read.testzip() is None
        assert read.namelist() == [*before, signatures.MEMBER]
        assert {name: read.read(name) for name in before} == before


def test_a_bundle_with_two_signatures_serves_those_who_trust_either(
    file: Path, ours: signing.Pair, theirs: signing.Pair, tmp_path: Path
) -> None:
    """How a key is replaced: for a while, bundles are signed with both."""
    signing.sign(str(file), theirs.private)
    done = signing.sign(str(file), ours.private)
    assert set(done.keys) == {ours.key, theirs.key}
    for key in done.keys:
        with override(trusted_keys=(key,)):
            accepted(file, tmp_path)


def test_what_is_signed_does_not_change() -> None:
    """Bundles that are signed today are checked by the opkiln of tomorrow."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    key = signatures.write_key(private.public_key().public_bytes_raw())
    assert key == "ed25519:A6EHv/POEL4dcN0Y50vAmWfk1jCbpQ1fHdyGZBJVMbg="
    signed = signatures.message("ab" * 32)
    assert signed == b"opkiln bundle signature 1\n" + b"ab" * 32 + b"\n"
    data = signatures.write({key: private.sign(signed)})
    with override(trusted_keys=(key,)):
        assert signatures.require("x", signed, data) == key


def test_a_damaged_bundle_is_not_signed(file: Path, ours: signing.Pair) -> None:
    data = bytearray(file.read_bytes())
    data[data.index(b"oneone")] ^= 1
    file.write_bytes(data)
    with pytest.raises(StoreError, match=r"one\.so has the SHA-256"):
        signing.sign(str(file), ours.private)
    assert file.read_bytes() == data
    assert {each.suffix for each in file.parent.iterdir()} == {"", ".bundle", ".pub"}


# The keys


def test_a_private_key_is_for_its_owner_alone_and_never_overwritten(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        first = pair(tmp_path)
    finally:
        os.umask(old)
    assert os.stat(first.private).st_mode & 0o777 == 0o600
    assert Path(first.public).read_text() == f"{first.key}\n"
    content = Path(first.private).read_bytes()
    assert first.key.encode() not in content
    with pytest.raises(UsageError, match="never overwritten"):
        pair(tmp_path)
    os.unlink(first.public)
    with pytest.raises(UsageError, match="never overwritten"):
        pair(tmp_path)
    assert Path(first.private).read_bytes() == content
    assert not os.path.exists(first.public)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620])
def test_a_private_key_that_others_can_read_is_refused(
    mode: int, file: Path, ours: signing.Pair
) -> None:
    os.chmod(ours.private, mode)
    before = file.read_bytes()
    with pytest.raises(StoreError, match=f"mode {mode:04o}.*\nhint: chmod 600"):
        signing.sign(str(file), ours.private)
    assert file.read_bytes() == before


def test_a_file_that_is_no_key_is_refused_without_quoting_it(file: Path, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    other = ec.generate_private_key(ec.SECP256R1())
    locked = ed25519.Ed25519PrivateKey.generate()
    contents = {
        "garbage": b"my secret",
        "other": other.private_bytes(*form, serialization.NoEncryption()),
        "locked": locked.private_bytes(*form, serialization.BestAvailableEncryption(b"x")),
        "empty": b"",
    }
    for name, content in contents.items():
        path = tmp_path / name
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(StoreError, match=str(path)) as caught:
            signing.sign(str(file), str(path))
        assert "secret" not in str(caught.value)
        assert "keygen" in caught.value.hint
    with pytest.raises(StoreError, match="cannot be read"):
        signing.sign(str(file), str(tmp_path / "absent"))


def test_trusted_keys_may_be_in_files_with_comments(
    file: Path, ours: signing.Pair, theirs: signing.Pair, tmp_path: Path
) -> None:
    listed = tmp_path / "trusted keys"
    listed.write_text(f"# releases\n\n{theirs.key} until 2027\n  {ours.key}\n")
    signing.sign(str(file), ours.private)
    with override(trusted_keys=(str(listed),)):
        assert signatures.keys_to_trust() == (theirs.key, ours.key)
        accepted(file, tmp_path)


def test_blanks_separate_keys_and_quotes_keep_paths_together(
    monkeypatch: pytest.MonkeyPatch, ours: signing.Pair
) -> None:
    monkeypatch.setenv("OPKILN_TRUSTED_KEYS", f"{ours.key} '/etc/my keys' /etc/keys")
    assert settings.trusted_keys == (ours.key, "/etc/my keys", "/etc/keys")


@pytest.mark.parametrize(
    "text", ["", "  ", "ed25519:", "ed25519:short", "ed25519:" + "A" * 44, "'unbalanced"]
)
def test_a_list_without_meaning_is_an_error_and_trusts_nobody(
    text: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPKILN_TRUSTED_KEYS", text)
    with pytest.raises(SettingError, match="OPKILN_TRUSTED_KEYS"):
        bundle.read_bundle(str(file))
    with pytest.raises(SettingError, match="OPKILN_TRUSTED_KEYS"):
        archive.leaves(str(file), "somebody", "one")


def test_a_key_that_can_be_written_in_two_ways_is_refused(ours: signing.Pair) -> None:
    """The last character of base64 has bits that mean nothing."""
    for last in "BCD":
        with pytest.raises(ValueError, match="not a public key"):
            signatures.parse_key("ed25519:" + "A" * 42 + last + "=")
    assert signatures.parse_key("ed25519:" + "A" * 43 + "=") == bytes(32)
    with (
        override(trusted_keys=("ed25519:" + "A" * 42 + "B=",)),
        pytest.raises(SettingError, match="not a public key"),
    ):
        signatures.keys_to_trust()


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        ("{key}\n", 0o666, "writable by others"),
        ("{key}\n", 0o664, "writable by others"),
        ("", 0o600, "it has no keys"),
        ("# nobody\n", 0o600, "it has no keys"),
        ("{key}\nrsa:AAAA\n", 0o600, "not a public key"),
        ("{key}\xff", 0o600, "not a public key"),
        (None, 0, "No such file"),
    ],
)
def test_a_file_of_keys_that_cannot_be_used_means_that_nobody_is_trusted(
    content: str | None, mode: int, reason: str, file: Path, ours: signing.Pair, tmp_path: Path
) -> None:
    leaf = leaf_of(file)
    signing.sign(str(file), ours.private)
    listed = tmp_path / "keys"
    if content is not None:
        listed.write_text(content.format(key=ours.key))
        listed.chmod(mode)
    with override(trusted_keys=(ours.key, str(listed))):
        for text in refusals(file, leaf, tmp_path):
            assert str(listed) in text
            assert reason in text


# Where the library is absent


@pytest.fixture
def without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)


def test_without_the_library_a_signed_bundle_is_refused_with_the_hint(
    file: Path, ours: signing.Pair, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    leaf = leaf_of(file)
    signing.sign(str(file), ours.private)
    request.getfixturevalue("without_the_library")
    accepted(file, tmp_path)  # nobody asks
    with override(trusted_keys=(ours.key,)):
        said = refusals(file, leaf, tmp_path)
    assert all(f"{file} is refused: its signature by {ours.key} cannot be" in text for text in said)
    assert said[0].endswith("hint: pip install 'opkiln[sign]'")


@pytest.mark.usefixtures("without_the_library")
def test_without_the_library_nothing_can_be_signed(file: Path, tmp_path: Path) -> None:
    for use in (
        lambda: signing.generate(str(tmp_path / "key")),
        lambda: signing.sign(str(file), str(tmp_path / "key")),
    ):
        with pytest.raises(StoreError, match=r"hint: pip install 'opkiln\[sign\]'"):
            use()
    assert not (tmp_path / "key.pub").exists()


def test_the_library_is_not_imported_unless_keys_are_configured(
    file: Path, ours: signing.Pair
) -> None:
    signing.sign(str(file), ours.private)
    code = (
        "import sys, opkiln\n"
        "from opkiln.store import archive\n"
        "from opkiln.store.key import Hasher\n"
        "leaf, = archive.leaves(sys.argv[1], 'somebody', 'one')\n"
        "archive.examine(leaf, {}, Hasher()).payload\n"
        "print('cryptography' in sys.modules)\n"
    )

    def imported(**more: str) -> str:
        environment = {**os.environ, **more}
        words = [sys.executable, "-c", code, str(file)]
        return subprocess.run(
            words, env=environment, check=True, capture_output=True, text=True
        ).stdout

    assert imported() == "False\n"
    assert imported(OPKILN_TRUSTED_KEYS=ours.key) == "True\n"


# What people type


def test_keys_and_signatures_by_command(file: Path, tmp_path: Path) -> None:
    key = tmp_path / "release"
    public = command.run("cache", "keygen", str(key)).stdout.strip()
    assert public.startswith("ed25519:")
    assert (tmp_path / "release.pub").read_text().strip() == public
    done = command.run("cache", "sign", str(file), "--key", str(key))
    assert done.stdout == f"{sha256_file(str(file))}  {file}\n"
    assert f"signed by {public}" in done.stderr
    store = {"OPKILN_CACHE_DIR": str(tmp_path / "cache"), "OPKILN_TRUSTED_KEYS": f"{key}.pub"}
    assert "new" in command.run("cache", "import", str(file), **store).stdout


def test_an_unsigned_layer_is_refused_but_not_damaged_when_the_store_is_verified(
    file: Path, ours: signing.Pair, tmp_path: Path
) -> None:
    store = {
        "OPKILN_CACHE_DIR": str(tmp_path / "cache"),
        "OPKILN_STORE_LAYERS": str(file),
        "OPKILN_TRUSTED_KEYS": ours.key,
    }
    done = command.run("cache", "verify", **store)
    assert f"refused  {file}: it is not signed" in done.stdout
    assert "0 damaged" in done.stdout
    refused = command.run("cache", "import", str(file), **store)
    assert (refused.returncode, "it is not signed" in refused.stderr) == (5, True)


def test_the_doctor_says_that_a_listed_bundle_is_not_signed(file: Path, ours: signing.Pair) -> None:
    from opkiln.report.doctor import directories
    from opkiln.report.doctor.terms import Facts

    with override(store_layers=(str(file),), trusted_keys=(ours.key,)):
        told = directories.layers(Facts())
    assert told.verdict == "WARN"
    assert "it is not signed" in told.evidence
