"""``-q`` and ``-v``, which every command takes: what is said beside the data."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest
from sample import command as in_process

from opkiln.cli import main
from opkiln.report.doctor import checks, terms
from opkiln.settings import settings

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__)
# A way to call every command that takes no compiler; tests/build has those that build.
CALLS: dict[str, list[str]] = {
    "run": [sys.executable, "-c", "print(1)"],
    "build": ["--recorded", "{empty}"],
    "plan": ["--help"],
    "explain": ["cpu_adam"],
    "arch": ["8.0"],
    "check": ["cpu_adam"],
    "report": ["--html", "{tmp}/report.html"],
    "doctor": ["--no-build", "--errors-only"],
    "new": ["demo_ops"],
    "demo": ["--help"],
    "completion": ["bash"],
    "lock": ["-o", "{tmp}/ops.lock"],
    "tuned list": [],
    "tuned clear": [],
    "cache key": ["cpu_adam"],
    "cache path": [],
    "cache list": [],
    "cache size": [],
    "cache verify": [],
    "cache gc": [],
    "cache clear": ["--yes"],
    "cache export": ["{tmp}/none.bundle"],
    "cache import": ["{empty}"],
    "cache keygen": ["{tmp}/release.key"],
    "cache sign": ["{empty}", "--key", "{empty}"],
    "cache push": ["--remote", "file://{tmp}/tier"],
    "cache pull": ["--lock", "{empty}", "--remote", "file://{tmp}/tier"],
    "cache record": ["{tmp}/ops.jsonl", "--", sys.executable, "-c", "print(1)"],
}
ITS_OWN_OPTIONS = {"ninja"}  # all that follows is ninja's, a -q and a -v, too
STARTS_A_PROGRAM = ("run", "cache record")  # whose output is that of its own process


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if not isinstance(command, click.Group):
        yield path
        return
    # click keeps a command's help option as the first context has it.
    context = click.Context(command, help_option_names=["-h", "--help"])
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        assert inner is not None
        yield from leaves(inner, (*path, name))


def started(
    *words: str, cwd: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command with a store below its directory, in a process."""
    return subprocess.run(
        [sys.executable, "-m", "opkiln", *words], cwd=cwd, capture_output=True, text=True,
        env={**os.environ, "OPKILN_CACHE_DIR": str(cwd / "cache"), **(environment or {})},
        timeout=120, check=False,
    )  # fmt: skip


def opkiln(
    *words: str, cwd: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command with a store below its directory, in a process only if it starts a program."""
    if " ".join(words[:2]).startswith(STARTS_A_PROGRAM):
        return started(*words, cwd=cwd, environment=environment)
    store = {"OPKILN_CACHE_DIR": str(cwd / "cache")}
    return in_process.run(*words, cwd=cwd, **{**store, **(environment or {})})


@pytest.fixture(autouse=True)
def one_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor has one check, which starts a process."""
    monkeypatch.setattr(
        checks, "CHECKS", {"one": lambda _: terms.warned(str(terms.ask_child("print(1)")))}
    )


def arguments(call: list[str], tmp_path: Path) -> list[str]:
    tmp_path.mkdir(exist_ok=True)
    empty = tmp_path / "empty"
    empty.touch()
    return [word.format(tmp=tmp_path, empty=empty) if "{" in word else word for word in call]


def test_every_command_is_called_below() -> None:
    assert {" ".join(path) for path in leaves(main.cli)} == {*CALLS, *ITS_OWN_OPTIONS}


@pytest.mark.parametrize("command", CALLS)
def test_a_quiet_command_says_nothing_but_data_and_errors_and_a_verbose_one_what_runs(
    command: str, tmp_path: Path, asked_once: Path
) -> None:
    # A misspelt variable has every command say something; a quiet one does not.
    # Of its own: what others have left in the machine's temporary directory is swept once.
    environment = {"OPKILN_MODEE": "error", "OPKILN_TMPDIR": str(tmp_path)}
    if command in ("arch", "check", "explain", "report", "cache key"):
        environment["OPKILN_CACHE_DIR"] = str(asked_once)
    path, call = command.split(), CALLS[command]
    plain, quiet, verbose = (
        opkiln(
            *path, *option, *arguments(call, tmp_path / place),
            cwd=tmp_path / place, environment=environment,
        )
        for place, option in (("a", []), ("b", ["-q"]), ("c", ["-v"]))
    )  # fmt: skip
    assert quiet.returncode == verbose.returncode == plain.returncode
    if call != ["--help"] and command != "doctor":  # which has a line for it among its data
        assert "OPKILN_MODEE" in plain.stderr
    if plain.returncode not in (0, 1, 8):
        assert quiet.stderr.startswith("error: "), "errors are said"
    else:
        assert quiet.stderr == ""
    if call != ["--help"]:
        first, *more = verbose.stderr.splitlines()
        assert first.startswith("opkiln ")
        assert f"Python {sys.version.split()[0]}" in first
        if command in ("doctor", "cache record"):
            started = [line for line in more if line.startswith(f"+ {sys.executable} ")]
            assert started, verbose.stderr
    if command != "cache keygen":  # a key is new each time
        same = plain.stdout.replace(str(tmp_path / "a"), "x")
        assert quiet.stdout.replace(str(tmp_path / "b"), "x") == same
        assert verbose.stdout.replace(str(tmp_path / "c"), "x") == same


@pytest.mark.parametrize(
    "words", [["-q", "cache", "path"], ["cache", "-q", "path"], ["cache", "path", "--quiet"]]
)
def test_quiet_may_be_said_before_and_after_the_command(words: list[str], tmp_path: Path) -> None:
    done = opkiln(*words, cwd=tmp_path, environment={"OPKILN_MODEE": "error"})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == str(tmp_path / "cache")


def test_quiet_and_verbose_together_are_an_error(tmp_path: Path) -> None:
    for words in (["cache", "path", "-q", "-v"], ["-v", "cache", "path", "-q"]):
        done = opkiln(*words, cwd=tmp_path)
        assert done.returncode == 2
        assert "--quiet and --verbose exclude each other" in done.stderr
        assert "hint: opkiln cache path --help" in done.stderr


def test_what_a_command_is_told_ends_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("-q", "-v"):
        assert main._run(["check", "cpu_adam", option]) == 1
        assert settings.progress == "auto"
    capsys.readouterr()
    assert main._run(["check", "cpu_adam"]) == 1
    assert capsys.readouterr().err == "hint: opkiln build cpu_adam\n"


# A command that starts a program


@pytest.mark.parametrize(
    ("option", "progress"), [([], "auto"), (["-q"], "off"), (["-v"], "verbose")]
)
@pytest.mark.parametrize("command", ["run", "cache record", "build"])
def test_a_program_that_a_command_starts_is_told(
    command: str,
    option: list[str],
    progress: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    script = tmp_path / "program.py"
    script.write_text("from opkiln.settings import settings; print('progress', settings.progress)")
    words = {
        "run": ["run", *option, sys.executable, str(script)],
        "cache record": ["cache", "record", *option, "f", "--", sys.executable, str(script)],
        "build": ["build", *option, "--for-script", str(script)],
    }[command]

    def execute(program: str, argv: list[str], env: dict[str, str]) -> None:
        subprocess.run(argv, executable=program, env=env, check=True)

    monkeypatch.setattr(os, "execve", execute)
    path = str(HERE.parents[2] / "src")
    done = in_process.run(*words, cwd=tmp_path, PYTHONPATH=path)
    assert f"progress {progress}\n" in capfd.readouterr().out, done.stderr


def test_run_says_in_one_line_that_it_took_over_and_what_it_builds(tmp_path: Path) -> None:
    words = (sys.executable, "-c", "import sys; print('hello', file=sys.stderr)")
    done = started("run", *words, cwd=tmp_path)
    said, hello = done.stderr.splitlines()
    assert hello == "hello"
    assert said.startswith("opkiln builds the PyTorch extensions and DeepSpeed ops of: ")
    assert said.endswith("hello'\"'\"', file=sys.stderr)'")
    without = started("run", *words, cwd=tmp_path, environment={"OPKILN_DEEPSPEED": "off"})
    assert without.stderr.startswith("opkiln builds the PyTorch extensions of: ")


@pytest.mark.parametrize(
    "environment", [{"OPKILN_PROGRESS": "off"}, {"RANK": "3"}, {"SLURM_PROCID": "1"}]
)
def test_run_is_silent_where_progress_is(environment: dict[str, str], tmp_path: Path) -> None:
    done = started("run", sys.executable, "-c", "", cwd=tmp_path, environment=environment)
    assert (done.returncode, done.stderr) == (0, "")
