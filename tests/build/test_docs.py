"""Every example in the docs is run, and every page says what the code does now."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from opkiln.report import settings_page

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_FILE = re.compile(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", re.DOTALL)
_SHELL = re.compile(r"```sh\n(.*?)```", re.DOTALL)
_CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)
_LINK = re.compile(r"\]\(([^)#:]+)\)")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("docs-cache"))


def _run(argv: list[str], cache: str, **changes: str) -> subprocess.CompletedProcess[str]:
    bin_directory = os.path.dirname(sys.executable)
    environment = {
        **os.environ,
        "OPKILN_CACHE_DIR": cache,
        "PATH": f"{bin_directory}{os.pathsep}{os.environ['PATH']}",
        **changes,
    }
    return subprocess.run(
        argv, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


def test_the_settings_page_is_what_the_table_says() -> None:
    assert (ROOT / "docs" / "settings.md").read_text() == settings_page.markdown(), (
        "run `make docs`"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_shown_on_a_page_is_the_file_it_names(page: Path) -> None:
    for name, shown in _FILE.findall(page.read_text()):
        assert (ROOT / name).read_text() == shown, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    prose = _CODE.sub("", page.read_text())
    for target in _LINK.findall(prose):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("example", ["first_op/use.py", "one_call.py", "train.py"])
def test_an_example_runs_cold_and_warm(example: str, cache: str) -> None:
    argv = [sys.executable, str(ROOT / "examples" / example)]
    cold = _run(argv, cache)
    assert cold.returncode == 0, cold.stderr
    warm = _run(argv, cache, OPKILN_JIT="off", OPKILN_FALLBACK="error")
    assert warm.returncode == 0, warm.stderr


@pytest.mark.parametrize("name", ["README.md", "docs/using.md", "docs/authoring.md"])
def test_commands_on_a_page_run(name: str, cache: str) -> None:
    for block in _SHELL.findall((ROOT / name).read_text()):
        for line in block.splitlines():
            command = shlex.split(line, comments=True)
            if command and command[0] == "opkiln":
                done = _run([sys.executable, "-m", *command], cache)
                assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
