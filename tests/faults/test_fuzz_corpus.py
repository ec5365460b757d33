"""What the fuzzers start from, and all that they ever found: no parser is surprised by any of it.

``fuzz/run.py`` looks for more, with atheris; this needs nothing but the files.
"""

from __future__ import annotations

import importlib
import random
import tracemalloc
from pathlib import Path

import pytest

CORPUS = Path(__file__).parent / "fuzz" / "corpus"
FILES = sorted(path for path in CORPUS.rglob("*") if path.is_file())
assert FILES, "parametrized by nothing, the tests below would be skipped"
MOST = 64 << 20  # bytes that reading a small file may take


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_parser_raises_only_what_it_says(path: Path) -> None:
    one = importlib.import_module(f"fuzz.{path.parent.name}").one
    data = path.read_bytes()
    assert len(data) <= 1 << 14
    tracemalloc.start()
    try:
        one(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST


@pytest.mark.parametrize("parser", sorted({path.parent.name for path in FILES}))
def test_a_parser_raises_only_what_it_says_for_files_that_are_nearly_right(parser: str) -> None:
    """A little of what the fuzzers do, without them."""
    one = importlib.import_module(f"fuzz.{parser}").one
    chance = random.Random(parser)
    seeds = [path.read_bytes() for path in FILES if path.parent.name == parser]
    for _ in range(30):
        data = bytearray(chance.choice(seeds))
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(data) + 1)
            cut = chance.choice((0, 1, 1, 8))
            data[at : at + cut] = chance.choice((b"", chance.randbytes(1), chance.randbytes(8)))
        one(bytes(data))


def test_every_fuzzer_has_a_corpus_and_every_corpus_a_fuzzer() -> None:
    others = {"run", "scratch"}
    fuzzers = {path.stem for path in CORPUS.parent.glob("*.py")} - others
    assert fuzzers == {path.parent.name for path in FILES}
