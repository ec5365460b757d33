"""Keys that never confuse two values, and signatures that never vouch for a changed file."""

from __future__ import annotations

import hashlib
import os
import random
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from opkiln.base import digest
from opkiln.base.digest import (
    KEY_LENGTH,
    LARGEST,
    Signature,
    UnusableFile,
    encode,
    key,
    read_file,
    sha256_file,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_atoms = st.none() | st.booleans() | st.integers() | st.text() | st.binary()
_values = st.recursive(
    _atoms,
    lambda inner: (
        st.lists(inner, max_size=4).map(tuple) | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)


def typed(value: Any) -> Any:
    """A value for comparison: 1, True and b"1" are different, a list and a tuple are not."""
    if isinstance(value, (list, tuple)):
        return ("sequence", tuple(typed(item) for item in value))
    if isinstance(value, dict):
        return ("dict", tuple(sorted((repr(typed(k)), repr(typed(v))) for k, v in value.items())))
    return (type(value).__name__, value)


@settings(max_examples=150, deadline=None)
@given(_values, _values)
@example(("-DA", "-DB"), ("-DA-DB",))
@example(("a", ("b",)), ("a", "b"))
@example(("", "a"), ("a", ""))
@example((1,), (True,))
@example("1", 1)
def test_two_different_values_never_have_the_same_encoding(one: Any, other: Any) -> None:
    assert (encode(one) == encode(other)) == (typed(one) == typed(other))


def test_no_two_of_many_flag_lists_share_a_key() -> None:
    chance = random.Random(13)
    pieces = ("-DA", "-DB", "-DA-DB", "-D", "A", "B", " ", "", "-DA=-DB", "s3:", "(2:")
    names: dict[str, tuple[str, ...]] = {}
    for _ in range(20_000):
        flags = tuple(chance.choices(pieces, k=chance.randrange(9)))
        assert names.setdefault(key("flags", flags), flags) == flags
    assert len(names) > 10_000


def test_the_order_of_a_set_or_a_dict_does_not_matter() -> None:
    assert encode({"a": 1, "b": 2}) == encode({"b": 2, "a": 1})
    assert encode({"x", "y", "z"}) == encode({"z", "y", "x"})


def test_a_value_without_an_encoding_is_refused_and_not_guessed() -> None:
    with pytest.raises(TypeError, match="float cannot be part of a key"):
        key("flags", (1.5,))


def test_the_kind_separates_equal_values_and_the_name_has_a_fixed_length() -> None:
    assert key("intent", "x") != key("build", "x")
    assert len(key("intent", "x")) == KEY_LENGTH


def test_a_name_that_is_not_unicode_can_be_keyed() -> None:
    assert key("path", os.fsdecode(b"\xff.h")) != key("path", os.fsdecode(b"\xfe.h"))


def test_a_file_is_digested_by_path_and_by_descriptor(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(b"x" * (3 << 20))
    expected = hashlib.sha256(file.read_bytes()).hexdigest()
    with file.open("rb") as opened:
        assert sha256_file(str(file)) == sha256_file(opened.fileno()) == expected


def rested(path: Path) -> Signature:
    """The signature that a file would have, had it been read long after it was written."""
    return Signature.of(str(path))._replace(read_at=time.time_ns() + 10_000_000_000)


def test_a_signature_holds_for_an_untouched_file_that_had_come_to_rest(tmp_path: Path) -> None:
    file = tmp_path / "a.h"
    file.write_text("1")
    assert rested(file).holds(str(file))


def test_a_signature_taken_right_after_a_write_is_never_believed(tmp_path: Path) -> None:
    file = tmp_path / "a.h"
    file.write_text("1")
    assert not Signature.of(str(file)).holds(str(file))


def test_a_time_in_the_future_is_never_believed(tmp_path: Path) -> None:
    file = tmp_path / "a.h"
    file.write_text("1")
    ahead = time.time() + 10_000
    os.utime(file, (ahead, ahead))
    assert not rested(file).holds(str(file))


def test_an_edit_under_the_old_times_and_size_shows_in_the_change_time(tmp_path: Path) -> None:
    file = tmp_path / "a.h"
    file.write_text("1")
    before = os.stat(file)
    signature = rested(file)
    file.write_text("2")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(file).st_mtime_ns == before.st_mtime_ns
    assert not signature.holds(str(file))


def test_a_file_swapped_for_another_of_the_same_size_shows(tmp_path: Path) -> None:
    file, other = tmp_path / "a.h", tmp_path / "b.h"
    file.write_text("1")
    other.write_text("2")
    signature = rested(file)
    os.replace(other, file)
    assert not signature.holds(str(file))


def test_a_missing_file_raises_instead_of_holding(tmp_path: Path) -> None:
    file = tmp_path / "a.h"
    file.write_text("1")
    signature = rested(file)
    file.unlink()
    with pytest.raises(FileNotFoundError):
        signature.holds(str(file))


def special(kind: str, path: Path) -> Path:
    """A file that has no end, or whose opening waits."""
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a socket":
        socket.socket(socket.AF_UNIX).bind(str(path))
    else:
        path.symlink_to("/dev/zero")
    return path


@pytest.mark.parametrize("kind", ["a FIFO", "a device", "a socket"])
@pytest.mark.parametrize("read", [sha256_file, read_file])
def test_only_a_regular_file_is_read_and_no_open_waits(
    kind: str, read: Callable[[str], object], tmp_path: Path
) -> None:
    path = special(kind, tmp_path / "header.h")
    with pytest.raises(UnusableFile, match="not a regular file") as caught:
        read(str(path))
    assert caught.value.filename == str(path)
    if kind != "a socket":
        assert f"it is {kind}" in str(caught.value)


@pytest.mark.parametrize("read", [sha256_file, read_file])
def test_a_file_over_the_limit_is_refused_with_both_numbers(
    read: Callable[..., object], tmp_path: Path
) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"x" * 101)
    with pytest.raises(UnusableFile, match="101 bytes, more than the limit of 100"):
        read(str(path), 100)
    assert read(str(path), 101)


def test_a_sparse_file_over_the_default_limit_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    path.touch()
    os.truncate(path, LARGEST + 1)
    with pytest.raises(UnusableFile, match=f"the limit of {LARGEST}"):
        sha256_file(str(path))


def test_a_file_without_a_stated_size_is_read_to_its_end() -> None:
    assert os.stat("/proc/version").st_size == 0
    text = read_file("/proc/version")
    assert text.startswith(b"Linux")
    assert sha256_file("/proc/version") == hashlib.sha256(text).hexdigest()


@pytest.mark.parametrize("size", [0, 1, (1 << 17) - 1, 1 << 17, (1 << 18) + 7])
def test_digest_and_contents_are_those_of_the_whole_file(size: int, tmp_path: Path) -> None:
    data = random.Random(size).randbytes(size)
    path = tmp_path / "data"
    path.write_bytes(data)
    assert read_file(str(path)) == data
    assert sha256_file(str(path)) == hashlib.sha256(data).hexdigest()


def test_a_directory_is_still_called_one(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        sha256_file(str(tmp_path))


def test_nothing_that_tests_import_shortens_the_time_after_which_a_file_is_at_rest() -> None:
    assert digest._SETTLED_NS == 2_000_000_000
