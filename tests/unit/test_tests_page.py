"""tests/README.md: what it shows is what the tests are."""

from __future__ import annotations

import re
from pathlib import Path

from sample import command

TESTS = Path(__file__).parents[1]
PAGE = (TESTS / "README.md").read_text()


def test_a_mistyped_command_ends_with_2_and_says_what_was_meant() -> None:
    done = command.run("biuld")
    assert done.returncode == 2
    assert "hint: opkiln build" in done.stderr


def test_each_example_stands_in_a_test_file() -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    files = [TESTS / name for name in re.findall(r"`((?:unit|build)/test_\w+\.py)`", PAGE)]
    texts = [file.read_text() for file in files]
    assert len(examples) == 4
    assert [each for each in examples if not any(each in text for text in texts)] == []


def test_each_folder_of_tests_is_in_the_table() -> None:
    folders = {path.name for path in TESTS.iterdir() if path.is_dir() and path.name[0] not in "._"}
    assert {name for name in folders if f"`{name}`" not in PAGE} == set()
