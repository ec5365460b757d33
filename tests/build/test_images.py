"""Files of images whose times say nothing: their contents decide, once for each mount."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sample.mounting import held
from sample.op_tree import Tree

if TYPE_CHECKING:
    from collections.abc import Callable

HEADER = "#define N VALUE\n"
ANSWER = 'extern "C" int answer() { return N; }\n'
USES_N = '#include "n.h"\nextern "C" int answer() { return N; }\n'


def _run(*command: str, **variables: str) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **variables}
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


def _squashfs(source: Path, image: Path) -> None:
    times = ("-all-time", "0", "-mkfs-time", "0")
    _run("mksquashfs", str(source), str(image), "-noappend", "-no-progress", *times)


def _erofs(source: Path, image: Path) -> None:
    uuid = "00000000-0000-0000-0000-000000000001"
    _run("mkfs.erofs", "-T0", f"-U{uuid}", str(image), str(source))


def _ext4(source: Path, image: Path) -> None:
    uuid = "00000000-0000-0000-0000-000000000001"
    _run("mkfs.ext4", "-q", "-d", str(source), "-U", uuid, str(image), "1M")
    for field in ("atime", "mtime", "ctime", "crtime"):
        for name in ("/", "/n.h"):
            _run("debugfs", "-w", "-R", f"set_inode_field {name} {field} @0x0", str(image))


MAKERS: dict[str, tuple[str, Callable[[Path, Path], None]]] = {
    "squashfs": ("mksquashfs", _squashfs),
    "erofs": ("mkfs.erofs", _erofs),
    "ext4": ("mkfs.ext4", _ext4),
}
MOUNT = 'mount -o loop,ro "$1" "$2"'
LAYERED = (
    'mkdir -p "$2.low" "$2.top" && mount -t tmpfs none "$2.top" && mkdir "$2.top/u" "$2.top/w" && '
    'mount -o loop,ro "$1" "$2.low" && mount -t overlay '
    '-o "lowerdir=$2.low,upperdir=$2.top/u,workdir=$2.top/w" none "$2"'
)
WAYS = {**dict.fromkeys(MAKERS, MOUNT), "overlay": LAYERED}


def _mounted(mount: str, image: Path, place: Path) -> list[str]:
    """What to put before a command so that it sees the image at a place."""
    script = f'{mount} && shift 2 && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, "sh", str(image), str(place)]


class Images:
    """An op that uses a file of an image, and images for every value of ``N``."""

    def __init__(self, base: Path, kind: str, file: str = "n.h", text: str = HEADER) -> None:
        tool, self._make = MAKERS.get(kind, MAKERS["squashfs"])
        if os.getuid() != 0 or shutil.which("nsenter") is None or shutil.which(tool) is None:
            pytest.skip(f"needs root, nsenter and {tool}")
        self._base, self._mount = base, WAYS[kind]
        self._file, self._text = file, text
        self.tree = Tree(base / "tree")
        self.place = base / "inc"
        self.place.mkdir()
        self.tree.write("pkg/a.cpp", USES_N if file == "n.h" else ANSWER)
        self.tree.declare(sources=["a.cpp"], include_paths=[str(self.place)])
        self.tree.settle()
        if subprocess.run([*self.at(1), "true"], capture_output=True, check=False).returncode != 0:
            pytest.skip(f"{kind} cannot be mounted here")

    def image(self, value: int) -> Path:
        """The image with this value."""
        image = self._base / f"{value}.image"
        if not image.exists():
            source = self._base / str(value)
            source.mkdir()
            (source / self._file).write_text(self._text.replace("VALUE", str(value)))
            (source / self._file).chmod(0o755)
            self._make(source, image)
        return image

    def at(self, value: int) -> list[str]:
        """What to put before a command so that it sees the image of this value."""
        return _mounted(self._mount, self.image(value), self.place)

    def answer(self, value: int, cache: str) -> int:
        """What a process gets that sees the image of this value."""
        return self.tree.answer(cache, prefix=self.at(value))[0]

    def run(self, code: str, prefix: list[str]) -> str:
        """The output of a few lines in a fresh process with the op."""
        return self.tree.run(code, "warm", prefix)

    def signature(self, value: int) -> str:
        """Everything that ``stat`` says of the file."""
        command = [*self.at(value), "stat", "-c", "%d %i %s %.Y %.Z", str(self.place / self._file)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "kind",
    [pytest.param(each, marks=[pytest.mark.full] * (each in ("erofs", "ext4"))) for each in WAYS],
)
def test_an_image_that_is_exchanged_for_one_with_equal_times(kind: str, tmp_path: Path) -> None:
    images = Images(tmp_path, kind)
    assert images.signature(1) == images.signature(2)
    assert images.answer(1, "warm") == 1
    assert images.answer(1, "warm") == 1
    assert images.answer(2, "warm") == 2
    assert images.answer(1, "warm") == 1


def test_a_compiler_in_an_image_that_is_exchanged(tmp_path: Path) -> None:
    """What is remembered of a compiler ends with its image."""
    images = Images(tmp_path, "squashfs", "g++", '#!/bin/sh\nexec g++ -DN=VALUE "$@"\n')
    images.tree.environment["CXX"] = str(images.place / "g++")
    assert images.signature(1) == images.signature(2)
    assert images.answer(1, "warm") == 1
    assert images.answer(2, "warm") == 2
    assert images.answer(1, "warm") == 1


LOAD = """
    from opkiln.base import digest
    from opkiln.decision import receipt
    from opkiln.loading import loader
    from opkiln.decision.terms import BUILD, Request
    from opkiln.run.process import run
    from pkg.op import Builder
    hashed = []
    real = digest.sha256_file
    digest.sha256_file = receipt.sha256_file = lambda path, *rest: hashed.append(path) or real(path)
    recalled = receipt.recall(Request(Builder().op())) is not None
    print(recalled, len(hashed), end=" ")
    made, _ = loader.obtain(Request(Builder().op(), BUILD))
    print(made.origin, made.compiled)
"""


def test_a_hit_in_an_image_stays_fast_while_it_is_mounted(tmp_path: Path) -> None:
    images = Images(tmp_path, "squashfs")
    with held(images.at(1)) as prefix:
        assert images.run(LOAD, prefix).split() == ["False", "0", "built", "1"]
        # By receipt, and only the library is hashed.
        assert images.run(LOAD, prefix).split() == ["True", "1", "store", "0"]
    with held(images.at(1)) as prefix:
        # The same image, mounted again: the contents tell once, and nothing is compiled.
        assert images.run(LOAD, prefix).split() == ["False", "0", "store", "0"]
        assert images.run(LOAD, prefix).split() == ["True", "1", "store", "0"]


def test_an_image_is_known_by_its_contents_where_a_kernel_gives_mounts_no_numbers(
    tmp_path: Path,
) -> None:
    images = Images(tmp_path, "squashfs")
    old = "    from opkiln.base import digest\n    digest._mark = lambda *given: 0\n"
    with held(images.at(1)) as prefix:
        assert images.run(old + LOAD, prefix).split() == ["False", "0", "built", "1"]
        # The header, and the library.
        assert images.run(old + LOAD, prefix).split() == ["True", "2", "store", "0"]
    assert images.run(old + LOAD, images.at(2)).split()[2:] == ["built", "1"]


EXCHANGED = """
    import subprocess, sys
    from opkiln.decision import receipt
    from opkiln.loading import loader
    from opkiln.decision.terms import BUILD, Request
    from pkg.op import Builder
    place, *images = sys.argv[1:]
    for image in images:
        subprocess.run(["mount", "-o", "loop,ro", image, place], check=True)
        request = Request(Builder().op(), BUILD)
        print(receipt.recall(request) is not None, loader.obtain(request)[0].origin)
        subprocess.run(["umount", place], check=True)
"""


def test_an_image_that_is_exchanged_under_a_running_process(tmp_path: Path) -> None:
    images = Images(tmp_path, "squashfs")
    files = [str(images.image(value)) for value in (1, 2, 1)]
    code = EXCHANGED.replace("sys.argv[1:]", repr([str(images.place), *files]))
    out = images.run(code, ["unshare", "--mount"])
    assert out.split() == ["False", "built", "False", "built", "False", "store"]
