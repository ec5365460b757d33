"""Row 14: an edit during a build ends in another build, never under the key of another text."""

from __future__ import annotations

import ctypes
import hashlib
import random
import shutil
import threading
import time
from typing import TYPE_CHECKING

import pytest
from loaders import Loader, learn, leaves, let_rest, write

from opkiln.store.entry import parse_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fault_rows import Cases

pytestmark = [pytest.mark.row(14), pytest.mark.timed]

HEADER = "#pragma once\n#define NUMBER {0:06d}.0\n"
FIRST = '#include "number.h"\nextern "C" int first() {{ return int(NUMBER + 0 * {0:06d}.0); }}\n'
SECOND = (
    '#include "number.h"\nextern "C" int first();\n'
    'extern "C" int value() {{ return first() * 1000 + int(NUMBER) + 1000000 * int({0:06d}.0); }}\n'
)


class Sources:
    """Two sources and a header, the number in each, and which number each text had."""

    def __init__(self, directory: Path) -> None:
        self.paths = [directory / name for name in ("number.h", "first.cpp", "second.cpp")]
        self.texts = [HEADER, FIRST, SECOND]
        self.numbers = [0, 0, 0]
        self.known: dict[str, int] = {}
        for which in range(3):
            self.edit(which, 0)

    def edit(self, which: int, number: int) -> None:
        """Other contents of the same size, in place."""
        text = self.texts[which].format(number)
        self.known[hashlib.sha256(text.encode()).hexdigest()] = number
        self.numbers[which] = number
        if not self.paths[which].exists():
            write(self.paths[which], text)
        # In one go: half a text is another one, and what a compiler says of it is true of it.
        with self.paths[which].open("r+b", buffering=0) as file:
            file.write(text.encode())

    def value(self, numbers: list[int] | None = None) -> int:
        header, _, second = self.numbers if numbers is None else numbers
        return header * 1001 + 1000000 * second


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A compiler that takes its time before it reads a source, and after; what is known of it."""
    script = write(
        tmp_path_factory.mktemp("slow") / "g++",
        '#!/bin/sh\npause=0\nfor each; do [ "$each" = -c ] && pause=0.15; done\n'
        f'sleep $pause\n{shutil.which("g++")} "$@"\nended=$?\nsleep $pause\nexit $ended\n',
    )
    script.chmod(0o755)
    let_rest()
    return script, learn(script)


@pytest.fixture
def slow(script: tuple[Path, Path], use: Callable[[Path, Path], None]) -> None:
    """The compiler that takes its time is the test's."""
    use(*script)


def published(cache: Path, sources: Sources) -> Iterator[tuple[int, int]]:
    """For each entry, what its library says, and what the sources that it names would."""
    for leaf in leaves(cache):
        manifest = parse_manifest((leaf / "manifest.json").read_bytes())
        own = {dep[1]: sources.known[dep[2]] for dep in manifest["deps"]["own"]}
        named = [own[path.name] for path in sources.paths]
        yield ctypes.CDLL(str(leaf / "op.so")).value(), sources.value(named)


def test_an_edit_at_any_moment_of_a_build_is_never_published_as_another_text(
    tmp_path: Path, cache: Path, slow: None, cases: Cases
) -> None:
    chance = random.Random(14)
    sources = Sources(tmp_path / "src")
    with Loader() as process:
        assert process.load("op", sources.paths[1:]).value == 0
        for number in cases(50, one_in=25):
            sources.edit(0, 2 * number + 1)
            before = sources.value()
            process.ask("op", sources.paths[1:])
            time.sleep(chance.uniform(0, 0.9))
            sources.edit(chance.choice((0, 0, 1, 2)), 2 * number + 2)
            # The load was asked for before the edit: either is right, and nothing between.
            assert process.answer().value in (before, sources.value())
            again = process.load("op", sources.paths[1:])
            assert again.value == sources.value(), again
            sources.edit(2, 0)
    found = list(published(cache, sources))
    assert len(found) > cases.number
    assert [pair for pair in found if pair[0] != pair[1]] == []


def test_sources_that_never_come_to_rest_are_an_error_and_publish_nothing_wrong(
    tmp_path: Path, cache: Path, slow: None
) -> None:
    sources = Sources(tmp_path / "src")
    begun, stop = threading.Event(), threading.Event()

    def edit() -> None:
        number = 0
        while not stop.wait(0.05):
            number += 1
            sources.edit(0, number)
            begun.set()

    editor = threading.Thread(target=edit)
    with Loader() as process:
        assert process.load("op", sources.paths[1:]).value == 0
        editor.start()
        try:
            assert begun.wait(60)  # before that, what was built is right
            process.ask("op", sources.paths[1:])
            answer = process.answer()
        finally:
            stop.set()
            editor.join()
        assert answer.error == "SourcesChanging", answer
        assert process.load("op", sources.paths[1:]).value == sources.value()
    assert [pair for pair in published(cache, sources) if pair[0] != pair[1]] == []
