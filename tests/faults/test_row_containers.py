"""Row 32: whoever a container runs as, and whatever it may write to, the outcome is the stated one.

Each case says where the store comes to be, and what is said of it. A second process always finds
what the first one built.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import mounts
import pytest
from loaders import Answer, Loader, returning, write
from sample import known

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = [
    pytest.mark.row(32),
    pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else"),
]

ANYBODY = 1000910000  # as OpenShift gives them: no passwd entry, the group of root


class Container:
    """An image with sources, a temporary directory and a home, and who runs in it."""

    def __init__(self, public: Path, python: str) -> None:
        self.python = python
        self.public = public
        self.home, self.tmp, self.volume = public / "home", public / "tmp", public / "volume"
        self.home.mkdir(0o700)
        os.chown(self.home, ANYBODY, 0)
        self.tmp.mkdir()
        self.tmp.chmod(0o1777)
        self.volume.mkdir()
        self.source = write(public / "src" / "op.cpp", returning("N", '#include "n.h"'))
        write(public / "src" / "n.h", "#define N 32\n")
        self.user: int | None = ANYBODY
        self.prefix: Sequence[str] = ()
        # The scratch directory is one thing, where the store may come to be another.
        self.env: dict[str, str | None] = {
            "HOME": None, "XDG_CACHE_HOME": None, "OPKILN_CACHE_DIR": None, "OPKILN_TMPDIR": None,
            "TMPDIR": str(self.tmp), "OPKILN_RUNTIME_DIR": None, "PYTHONDONTWRITEBYTECODE": "1",
            "USER": None, "LOGNAME": None,
        }  # fmt: skip

    @property
    def uid(self) -> int:
        return os.getuid() if self.user is None else self.user

    def load(self, **more: str | None) -> Answer:
        with Loader(
            {**self.env, **more}, prefix=self.prefix, python=self.python, user=self.user, group=0
        ) as process:
            return process.load("op", self.source)

    def make_known(self, store: Path) -> Path:
        """The store of an earlier process of the same user, which knows the compilers."""
        store.parent.mkdir(parents=True, exist_ok=True)
        for path in (known.make_store(store), *store.rglob("*")):
            os.chown(path, self.uid, 0)
        return store

    def filled(self) -> Path:
        """A store that root filled, as the build of an image does."""
        user, self.user = self.user, None
        store = self.make_known(self.public / "image")
        assert self.load(OPKILN_CACHE_DIR=str(store)).origin == "built"
        self.user = user
        return store


@pytest.fixture
def container(public: Path, python_of_others: str) -> Container:
    return Container(public, python_of_others)


class Outcome(NamedTuple):
    """Where the store is, and what must have been said."""

    store: Path
    said: str = ""
    first: str = "built"


def no_home_and_no_passwd_entry(here: Container) -> Outcome:
    return Outcome(here.tmp / f"opkiln-{ANYBODY}")


def a_home_that_is_the_root_directory(here: Container) -> Outcome:
    here.env["HOME"] = "/"
    return Outcome(here.tmp / f"opkiln-{ANYBODY}", "/.cache/opkiln cannot be the store")


def a_home_of_somebody_else(here: Container) -> Outcome:
    os.chown(here.home, 4321, 4321)
    here.home.chmod(0o755)
    here.env["HOME"] = str(here.home)
    return Outcome(here.make_known(here.tmp / f"opkiln-{ANYBODY}"), "is read-only")


def a_volume_that_everybody_may_write_to(here: Container) -> Outcome:
    here.volume.chmod(0o777)  # an emptyDir
    here.env |= {"HOME": "/", "OPKILN_CACHE_DIR": str(here.volume)}
    store = here.make_known(here.volume / f"opkiln-{ANYBODY}")
    return Outcome(store, "writable by others (mode 0777)")


def a_read_only_volume_that_is_filled(here: Container) -> Outcome:
    store = here.filled()
    here.env["OPKILN_CACHE_DIR"] = str(store)
    for path in (store, *store.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    return Outcome(store, first="store")


def a_restored_cache_with_other_times_and_another_owner(here: Container) -> Outcome:
    """As CI systems do it: an archive is unpacked, as whoever runs there, with the times of now."""
    store = shutil.copytree(here.filled(), here.home / "restored", copy_function=shutil.copyfile)
    for path in (store, *store.rglob("*")):
        path.chmod(0o700)
        os.chown(path, ANYBODY, 0)
        os.utime(path, (10**9, 10**9))
    here.env["OPKILN_CACHE_DIR"] = str(store)
    return Outcome(store, first="store")


def sources_that_were_checked_out_anew(here: Container) -> Outcome:
    """In another directory, with other times."""
    here.env["HOME"] = str(here.home)
    here.make_known(here.home / ".cache" / "opkiln")
    os.chown(here.home / ".cache", here.uid, 0)
    assert here.load().origin == "built"
    here.source = shutil.copytree(here.source.parent, here.public / "again") / "op.cpp"
    for path in here.source.parent.iterdir():
        os.utime(path, (2**31, 2**31))
    return Outcome(here.home / ".cache" / "opkiln", first="store")


def a_cache_directory_mounted_noexec(here: Container) -> Outcome:
    here.user = None
    here.prefix = mounts.without_execution(here.volume)
    here.env |= {"HOME": str(here.public), "OPKILN_CACHE_DIR": str(here.volume)}
    return Outcome(here.make_known(here.public / ".cache" / "opkiln"), "mounted noexec")


def a_read_only_root_with_a_writable_tmp(here: Container) -> Outcome:
    here.user = None
    here.prefix = mounts.read_only_root(here.tmp)
    here.env |= {"HOME": str(here.home), "OPKILN_CACHE_DIR": str(here.volume)}
    return Outcome(here.make_known(here.tmp / "opkiln-0"), "read-only")


def a_read_only_root_with_a_filled_store(here: Container) -> Outcome:
    here.user = None
    store = here.filled()
    here.prefix = mounts.read_only_root()
    here.env |= {"HOME": str(here.home), "OPKILN_CACHE_DIR": str(store)}
    return Outcome(store, first="store")


CASES = (
    no_home_and_no_passwd_entry, a_home_that_is_the_root_directory, a_home_of_somebody_else,
    a_volume_that_everybody_may_write_to, a_read_only_volume_that_is_filled,
    a_restored_cache_with_other_times_and_another_owner, sources_that_were_checked_out_anew,
    a_cache_directory_mounted_noexec, a_read_only_root_with_a_writable_tmp,
    a_read_only_root_with_a_filled_store,
)  # fmt: skip
# As others here: a default place that cannot be written to, and a filled store that is read alone.
ALIKE = (
    a_home_that_is_the_root_directory, sources_that_were_checked_out_anew,
    a_read_only_root_with_a_filled_store,
)  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.full if case in ALIKE else []) for case in CASES],
    ids=lambda case: case.__name__,
)
def test_the_store_is_where_it_is_said_to_be_and_nothing_is_built_twice(
    case: Callable[[Container], Outcome], container: Container
) -> None:
    expected = case(container)
    answer = container.load()
    assert answer.value == 32, answer
    assert answer.origin == expected.first
    assert answer.path.is_relative_to(expected.store)
    said = " ".join(answer.warnings)
    assert expected.said in said
    assert bool(said) == bool(expected.said)
    if answer.origin == "built" and os.path.exists(expected.store):
        assert expected.store.stat().st_uid == container.uid
    again = container.load()
    assert (again.value, again.origin, again.warnings) == (32, "store", [])


def test_where_nothing_can_be_written_the_error_says_what_to_set(container: Container) -> None:
    container.user = None
    container.prefix = mounts.read_only_root()
    answer = container.load(HOME=str(container.home))
    assert answer.error == "ToolchainError"  # the first that needs a directory is its probe
    assert "Read-only file system" in answer.text
    assert "OPKILN_TMPDIR" in answer.text


def test_a_scratch_directory_mounted_noexec_is_named(container: Container) -> None:
    container.user = None
    container.prefix = mounts.without_execution(container.tmp)
    answer = container.load(HOME=str(container.public))
    assert answer.error == "StoreError"
    assert "noexec" in answer.text
    assert "OPKILN_TMPDIR" in answer.text
