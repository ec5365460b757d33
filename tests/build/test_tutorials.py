"""The tutorials are followed as they are written, command by command."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from sample import install, known, transcript

from opkiln.machine.toolchain import host

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
# Its commands need DeepSpeed: tests/build/test_compat_deepspeed_tutorial.py.
ELSEWHERE = {"move-from-deepspeed"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not host.available(), reason="no C++ compiler is installed"),
]


@pytest.fixture
def warm() -> None:
    """Each tutorial has a store of its own."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has opkiln, and into which pip may install."""
    made = install.with_opkiln(tmp_path_factory, "tutorials")
    programs = made.path / "bin"
    import pip

    runner = f'exec "{made.python}" "{pip.__path__[0]}/__pip-runner__.py" "$@"\n'
    for name, text in {
        "pip": runner,
        "pytest": f'exec "{made.python}" -m pytest "$@"\n',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}")
        (programs / name).chmod(0o755)
    return programs


def follow(page: Path, where: Path, programs: Path) -> None:
    """Run a page's commands beside a copy of the examples, in a home of their own."""
    shutil.copytree(ROOT / "examples", where / "work")
    home = where / "home"
    (home / ".cache").mkdir(parents=True)
    known.make_store(home / ".cache" / "opkiln")
    left_out = ("OPKILN_", "XDG_", "PYTHON", "VIRTUAL_ENV", "PYTEST")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
    environment |= {
        "HOME": str(home), "PATH": f"{programs}{os.pathsep}{environment['PATH']}",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }  # fmt: skip
    shown = transcript.commands(page.read_text())
    assert shown, "the page has commands"
    printed = transcript.run(shown, where / "work", environment)
    assert len(printed) == len(shown), printed
    wrong = [
        transcript.differences(each, text, (where / "work", "."), (home, "/home/me"))
        for each, text in zip(shown, printed, strict=True)
    ]
    assert not any(wrong), "\n".join(filter(None, wrong))


# What these do, other tests do in every run: tests/build/test_compat_torch_jit.py, test_new.py and
# test_docs.py, and tests/cluster.
FULL = {"move-from-cpp-extension", "run-on-a-cluster", "ship-a-package", "use-an-op"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(page.stem, marks=pytest.mark.full if page.stem in FULL else ())
        for page in sorted(TUTORIALS.glob("*.md"))
        if page.stem not in ELSEWHERE
    ],
)
def test_a_tutorial_prints_what_it_shows(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if name == "ship-a-package":
        programs = request.getfixturevalue("installed")
    elif name in FULL:
        programs = Path(sys.executable).parent
    else:
        programs = transcript.programs(tmp_path / "bin")
    follow(TUTORIALS / f"{name}.md", tmp_path, programs)


def test_a_transcript_that_differs_is_noticed() -> None:
    (shown,) = transcript.commands("```console\n$ say\nbuilt x in 4.2 s (1 …\n…\nend\n```\n")
    assert shown.command == "say"
    for printed in (
        "built x in 0.1 s (1 compiled)\nend\n0",
        "built x in 12 ms (1 y)\na\nb\nend\n0",
    ):
        assert transcript.differences(shown, printed) == ""
    for printed in (
        "built y in 0.1 s (1 c)\nend\n0",
        "built x in 0.1 s (1 c)\nend\nmore\n0",
        "end\n0",
    ):
        assert transcript.differences(shown, printed)
