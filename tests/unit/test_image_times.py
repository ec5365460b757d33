"""Whose times say nothing, and what takes their place."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from opkiln.base import digest
from opkiln.base.digest import Signature

if TYPE_CHECKING:
    from pathlib import Path

DISK, ANONYMOUS = os.makedev(7, 0), os.makedev(0, 45)
WHOLE = 1_600_000_000_000_000_000  # a second
KERNELS = WHOLE + 123_456_789
MOUNT = digest._FIRST - 5


def _change(
    monkeypatch: pytest.MonkeyPatch,
    mount: tuple[str, bool, int],
    *,
    device: int,
    changed: int,
    modified: int,
    fine: bool = False,
) -> int | None:
    found = SimpleNamespace(st_ctime_ns=changed, st_mtime_ns=modified, st_dev=device)
    digest.forget_mounts()
    monkeypatch.setattr(digest, "_mount", lambda path: mount)
    monkeypatch.setattr(digest, "_mark", lambda path, device: MOUNT)
    monkeypatch.setattr(digest, "_has_fractions", lambda path, device: fine)
    try:
        return digest.change_mark("file", cast("os.stat_result", found))
    finally:
        digest.forget_mounts()


BY_MOUNT = {
    "squashfs": (("squashfs", True, DISK), DISK, WHOLE, WHOLE),
    "erofs with the time of its file": (("erofs", True, DISK), DISK, KERNELS, KERNELS),
    "erofs without a disk": (("erofs", True, ANONYMOUS), ANONYMOUS, KERNELS, KERNELS),
    "a disk image that is mounted read-only": (("ext4", True, DISK), DISK, WHOLE, WHOLE + 1),
    "btrfs, mounted read-only": (("btrfs", True, ANONYMOUS), ANONYMOUS, WHOLE, WHOLE),
    "a lower layer": (("overlay", False, ANONYMOUS), ANONYMOUS + 1, KERNELS, KERNELS),
    "a lower layer on the same disk": (("overlay", False, ANONYMOUS), ANONYMOUS, WHOLE, WHOLE),
    "an overlay that is read-only": (("overlay", True, ANONYMOUS), ANONYMOUS, KERNELS, KERNELS),
    "squashfuse": (("fuse.squashfuse", True, ANONYMOUS), ANONYMOUS, WHOLE, WHOLE),
}


@pytest.mark.parametrize("name", BY_MOUNT)
def test_the_mount_stands_for_a_time_that_somebody_chose(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount, device, changed, modified = BY_MOUNT[name]
    found = _change(monkeypatch, mount, device=device, changed=changed, modified=modified)
    assert found == MOUNT
    assert digest.is_mount(MOUNT)


BY_TIME = {
    "a checkout": (("ext4", False, DISK), DISK, KERNELS, KERNELS),
    "a disk that was made by a tool, mounted writable": (("ext4", False, DISK), DISK, WHOLE, WHOLE),
    "where /proc is not mounted": (("", False, 0), ANONYMOUS, KERNELS, KERNELS),
    "a file that was written in a container": (
        ("overlay", False, ANONYMOUS), ANONYMOUS, KERNELS, KERNELS,
    ),
    "a container's file, unpacked on a disk": (
        ("overlay", False, ANONYMOUS), ANONYMOUS + 1, KERNELS, WHOLE,
    ),
    "a disk that was written by a kernel, mounted read-only": (
        ("ext4", True, DISK), DISK, KERNELS, WHOLE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_TIME)
def test_a_time_that_a_kernel_wrote_is_believed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mount, device, changed, modified = BY_TIME[name]
    found = _change(
        monkeypatch, mount, device=device, changed=changed, modified=modified, fine=True
    )
    assert found == changed


BY_CONTENTS = {
    "a writable file system with whole seconds": (("vfat", False, DISK), DISK, WHOLE, WHOLE + 1),
    "a network file system with whole seconds": (
        ("lustre", False, ANONYMOUS), ANONYMOUS, WHOLE, WHOLE,
    ),
    "FUSE that can be written": (("fuse.sshfs", False, ANONYMOUS), ANONYMOUS, KERNELS, WHOLE),
    "whole seconds where /proc is not mounted": (("", False, 0), ANONYMOUS, WHOLE, WHOLE),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_CONTENTS)
def test_where_a_file_may_change_under_its_times_its_contents_decide(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount, device, changed, modified = BY_CONTENTS[name]
    found = _change(monkeypatch, mount, device=device, changed=changed, modified=modified)
    assert found is None


def test_what_a_file_system_counts_in_is_told_by_the_directories_above_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file's own time may be by whoever made the disk's image."""
    times = {"/": (1, KERNELS), "/mnt": (7, WHOLE), "/mnt/a": (7, KERNELS), "/mnt/b": (7, WHOLE)}

    def status(path: str) -> SimpleNamespace:
        device, changed = times[path]
        return SimpleNamespace(st_dev=device, st_ctime_ns=changed)

    monkeypatch.setattr(os.path, "realpath", str)
    monkeypatch.setattr(os, "stat", status)
    for path, fine in (("/mnt/a/file", True), ("/mnt/b/file", False), ("/mnt/file", False)):
        assert digest._has_fractions(path, 7) is fine


def test_a_file_system_is_asked_once_until_it_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def mount(path: str) -> tuple[str, bool, int]:
        asked.append(path)
        return "ext4", False, DISK

    monkeypatch.setattr(digest, "_mount", mount)
    found = cast("os.stat_result", SimpleNamespace(st_ctime_ns=1, st_mtime_ns=1, st_dev=DISK))
    digest.forget_mounts()
    for path in ("a", "b"):
        assert digest.change_mark(path, found) == 1
    digest.forget_mounts()
    assert digest.change_mark("c", found) == 1
    digest.forget_mounts()
    assert asked == ["a", "c"]


def test_a_file_of_a_mount_without_a_number_is_never_taken_for_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("1")
    monkeypatch.setattr(digest, "change_mark", lambda path, found: None)
    signature = Signature.of(str(path))
    assert signature.known_by_contents
    assert not signature.settled
    assert not signature.holds(str(path))


def test_what_is_mounted_is_asked_of_the_system() -> None:
    kind, read_only, device = digest._mount("/proc/self/status")
    assert (kind, read_only, device) == ("proc", False, os.stat("/proc").st_dev)


def test_a_mount_has_one_number_in_all_processes() -> None:
    code = "import os, sys; from opkiln.base import digest; "
    code += "print(digest._mark('/proc', os.stat('/proc').st_dev))"
    command = [sys.executable, "-c", code]
    numbers = {subprocess.run(command, check=True, capture_output=True).stdout for _ in range(2)}
    assert len(numbers) == 1
    if numbers == {b"0\n"}:
        pytest.skip("this kernel gives mounts no numbers (Linux before 6.8)")
    assert digest.is_mount(int(numbers.pop()))
