"""The command line without a build: answers, errors, exit codes and what is written where."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import opkiln
from opkiln import errors
from opkiln.cli import main, output, report
from opkiln.loading import loader

if TYPE_CHECKING:
    from collections.abc import Callable

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"
COMMANDS = main._COMMANDS
CACHE_COMMANDS = (
    "path", "key", "list", "size", "verify", "gc", "clear", "export", "import", "keygen", "sign",
    "record", "push", "pull",
)  # fmt: skip
TUNED_COMMANDS = ("list", "clear")


class Ran:
    """What a command did in this process."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def json(self) -> dict:
        return json.loads(self.out)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run the command line in this process."""

    def call(*arguments: str) -> Ran:
        capsys.readouterr()
        code = main._run(list(arguments))
        return Ran(code, *capsys.readouterr())

    return call


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))


def start(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    command = [sys.executable, "-m", "opkiln", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, **options
    )


def test_commands_work_if_the_program_that_starts_them_ignores_sigchld() -> None:
    def ignore() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    done = start("plan", "cpu_adam", preexec_fn=ignore)
    assert (done.returncode, done.stderr) == (0, "")


# Finding one's way


def test_the_version_is_the_packages(run: Callable[..., Ran]) -> None:
    assert run("--version").out == f"opkiln {opkiln.__version__}\n"


@pytest.mark.parametrize(
    "command",
    [
        (),
        *((name,) for name in COMMANDS),
        *(("cache", name) for name in CACHE_COMMANDS),
        *(("tuned", name) for name in TUNED_COMMANDS),
    ],
)
def test_every_command_explains_itself(command: tuple[str, ...], run: Callable[..., Ran]) -> None:
    for option in ("-h", "--help"):
        ran = run(*command, option)
        assert ran.code == 0
        assert ran.out.startswith(f"Usage: opkiln {' '.join(command)}")
        assert len(ran.out.split()) > 15
        assert "-q, --quiet" in ran.out
        assert "-v, --verbose" in ran.out


def test_every_command_is_documented() -> None:
    shown = re.findall(r"^\$ opkiln (\w+)(?: (\w+))?", DOCS.read_text(), re.MULTILINE)
    assert {name for name, _ in shown} == set(COMMANDS)
    assert {second for first, second in shown if first == "cache"} == set(CACHE_COMMANDS)
    assert {second for first, second in shown if first == "tuned"} == set(TUNED_COMMANDS)


def test_every_exit_code_is_documented() -> None:
    classes = [each for each in vars(errors).values() if isinstance(each, type)]
    used = {each.exit_code for each in classes if issubclass(each, errors.OpkilnError)}
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", DOCS.read_text(), re.MULTILINE)}
    assert documented == used | {0, output.FOUND, report.WARNED, output.INTERRUPTED}


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["nonsense"], "hint: opkiln --help"),
        (["build", "--nonsense"], "hint: opkiln build --help"),
        (["build"], "hint: opkiln build --help"),
        (["build", "cpu_adam", "--all"], "hint: opkiln build --help"),
        (["build", "cpu_adam", "-j", "0"], "hint: opkiln build --help"),
        (["plan", "cpu_adam", "--json", "--compile-commands"], "hint: opkiln plan --help"),
        (["check"], "hint: opkiln check --help"),
        (["cache", "gc", "--max-size", "big"], "hint: opkiln cache gc --help"),
        (["plan", "nonsense"], "hint: opkiln report"),
        (["explain", "nonsense"], "hint: opkiln report"),
        (["check", "nonsense"], "hint: opkiln report"),
        (["build", "nonsense"], "hint: opkiln report"),
    ],
)
def test_a_wrong_call_exits_with_2_and_says_what_to_type(
    arguments: list[str], hint: str, run: Callable[..., Ran]
) -> None:
    ran = run(*arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("error: ")
    assert ran.err.rstrip().endswith(hint)


def test_a_setting_without_meaning_exits_with_2(
    run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPKILN_MODE", "perhaps")
    ran = run("report")
    assert ran.code == 2
    assert "OPKILN_MODE='perhaps'" in ran.err
    assert "hint: unset OPKILN_MODE" in ran.err


# Without a compiler


def test_building_without_a_compiler_exits_with_3_and_a_hint(
    run: Callable[..., Ran], no_compiler: None
) -> None:
    for arguments in (["cpu_adam"], ["--all"]):
        ran = run("build", *arguments)
        assert ran.code == 3
        assert ran.out == ""
        assert "g++ (PATH): not on PATH" in ran.err
        assert "hint: apt-get install g++" in ran.err


def test_a_failure_is_part_of_the_json_too(run: Callable[..., Ran], no_compiler: None) -> None:
    ran = run("build", "cpu_adam", "--json")
    assert ran.code == 3
    (row,) = ran.json()["ops"]
    assert (row["op"], row["status"], row["error"]["kind"]) == (
        "cpu_adam", "failed", "ToolchainError",
    )  # fmt: skip


@pytest.mark.parametrize("command", ["build", "plan", "check", "explain"])
def test_commands_ask_whether_a_close_op_was_meant(run: Callable[..., Ran], command: str) -> None:
    ran = run(command, "cpu_adm")
    assert ran.code == 2
    assert "hint: did you mean cpu_adam" in ran.err


def test_building_where_compiling_is_switched_off_says_how_to_switch_it_on(
    run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPKILN_MODE", "cached")
    ran = run("build", "cpu_adam")
    assert ran.code == 7
    assert "hint: OPKILN_MODE=auto opkiln build cpu_adam" in ran.err


def test_a_report_without_a_compiler_says_so_for_each_op(
    run: Callable[..., Ran], no_compiler: None
) -> None:
    found = run("report", "--json").json()
    (row,) = [each for each in found["ops"] if each["op"] == "cpu_adam"]
    here = row["backends"][0]
    assert (here["cached"], here["compatible"]) == (False, False)
    assert "no C++ compiler" in here["reason"]
    assert {each["refused"] for each in found["environment"]["compilers"]} == {"not on PATH"}
    assert "clang++, refused: not on PATH" in run("report").out


# The report


def test_a_report_knows_the_machine_the_store_and_the_settings(
    run: Callable[..., Ran], asked_once: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    found = run("report", "--json").json()
    assert found["schema"] == 1
    assert found["environment"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["environment"]["budget"]["slots"] == len(os.sched_getaffinity(0))
    assert found["store"]["root"] == str(asked_once / "v1")
    settings = {each["variable"]: each for each in found["settings"]}
    assert settings["OPKILN_ACCELERATOR"] == {
        "variable": "OPKILN_ACCELERATOR", "value": "cpu", "origin": "DS_ACCELERATOR",
    }  # fmt: skip
    assert settings["OPKILN_MODE"]["origin"] == "default"
    text = run("report").out
    assert re.search(r"OPKILN_ACCELERATOR +cpu +from DS_ACCELERATOR", text)
    assert re.search(rf"OPKILN_CACHE_DIR +{re.escape(str(asked_once))}", text)
    assert "OPKILN_MODE" not in text


def _provide(where: Path, op: str, value: str) -> None:
    """Install a distribution that offers an op."""
    metadata = where / f"{op}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {op}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[opkiln.ops]\n{op} = {value}\n")


@pytest.mark.usefixtures("asked_once")
def test_a_report_survives_an_op_that_cannot_be_imported(
    run: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _provide(tmp_path / "site", "broken", "no_such_package.op:Builder")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    ran = run("report", "--json")
    assert ran.code == 0
    rows = {each["op"]: each for each in ran.json()["ops"]}
    assert rows["broken"]["backends"] == []
    assert "no_such_package" in rows["broken"]["error"]
    assert "cpu_adam" in rows


@pytest.mark.usefixtures("asked_once")
def test_neither_reporting_nor_looking_imports_torch() -> None:
    code = """
import sys
from opkiln.cli.main import _run
for arguments in (["report"], ["check", "cpu_adam"], ["explain", "cpu_adam"], ["plan", "cpu_adam"],
                  ["cache", "size"]):
    _run(arguments)
sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"hint: opkiln build cpu_adam\n")


# Checking


def test_a_cold_op_would_compile_and_the_hint_builds_it(run: Callable[..., Ran]) -> None:
    ran = run("check", "cpu_adam")
    assert ran.code == 1
    assert re.match(r"cpu_adam +would compile", ran.out)
    assert ran.err == "hint: opkiln build cpu_adam\n"
    assert run("check", "cpu_adam", "--json").json()["would_compile"] == ["cpu_adam"]


@pytest.mark.parametrize(
    ("variable", "value", "status", "reason"),
    [
        ("OPKILN_MODE", "cached", "would fall back", "OPKILN_MODE=cached"),
        ("OPKILN_MODE", "sealed", "would fail", "sealed"),
        ("PATH", "/nonexistent", "would fall back", "no C++ compiler"),
    ],
)
def test_an_op_that_cannot_compile_here_is_not_said_to(
    run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, variable: str, value: str,
    status: str, reason: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(loader.here, "ops", {})  # other tests may have loaded it
    monkeypatch.setenv(variable, value)
    ran = run("check", "cpu_adam")
    assert ran.code == 1
    assert f"cpu_adam  {status}" in ran.out
    assert reason in ran.out
    assert "hint" not in ran.err
    assert run("explain", "cpu_adam").out.startswith(f"cpu_adam: {status}: ")


@pytest.mark.usefixtures("asked_once")
def test_a_misspelt_setting_is_pointed_out(
    run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPKILN_MODEE", "cached")
    ran = run("report")
    assert "unknown setting OPKILN_MODEE; did you mean OPKILN_MODE?" in ran.err
    monkeypatch.setenv("OPKILN_MODE", "eror")
    ran = run("cache", "path")
    assert ran.code == 2
    assert "OPKILN_MODE='eror'" in ran.err


def test_a_cpu_that_is_none_names_the_variable(
    run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPKILN_CPU", "foo")
    ran = run("plan", "cpu_adam")
    assert ran.code == 2
    assert "OPKILN_CPU='foo': 'foo' is not a CPU" in ran.err
    assert "hint: unset OPKILN_CPU" in ran.err


def test_a_file_lists_ops_with_comments(run: Callable[..., Ran], tmp_path: Path) -> None:
    listed = tmp_path / "ops.txt"
    listed.write_text("# for the trainer\n\ncpu_adam  # the optimizer\ncpu_adam\n")
    ran = run("check", str(listed), "--json")
    assert [each["op"] for each in ran.json()["ops"]] == ["cpu_adam"]
    listed.write_text("# nothing\n")
    assert run("check", str(listed)).code == 0
    listed.write_text("nonsense\n")
    assert run("check", str(listed)).code == 2


def test_a_file_that_is_no_list_is_an_error(run: Callable[..., Ran], tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    ran = run("check", str(tmp_path / "binary"))
    assert ran.code == 2
    assert "cannot be read as a list of ops" in ran.err


# The store


def test_an_empty_store_has_a_path_and_nothing_in_it(run: Callable[..., Ran], cache: Path) -> None:
    assert run("cache", "path").out == f"{cache}\n"
    assert run("cache", "list", "--json").json()["entries"] == []
    assert run("cache", "size", "--json").json()["total_bytes"] == 0
    assert run("cache", "verify").code == 0
    assert run("cache", "gc").code == 0
    assert not cache.exists()


def test_clearing_asks_first(cache: Path) -> None:
    precious = cache / "v1" / "logs" / "failed.log"
    precious.parent.mkdir(parents=True, mode=0o700)
    cache.chmod(0o700)
    precious.write_text("why it failed")
    for answer in ("", "n\n"):
        refused = start("cache", "clear", input=answer)
        assert refused.returncode == 1
        assert "Remove everything from" in refused.stderr
        assert refused.stdout == ""
        assert precious.exists()
    assert start("cache", "clear", input="y\n").returncode == 0
    assert not precious.exists()


def test_a_store_that_cannot_be_had_is_warned_of_without_a_traceback(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    environment = {**os.environ, "OPKILN_CACHE_DIR": str(shared), "PATH": str(tmp_path)}
    done = start("build", "cpu_adam", env=environment)
    assert done.returncode == 3
    assert re.search(r"^warning: .*writable by others", done.stderr, re.MULTILINE)
    assert "Traceback" not in done.stderr
    assert ".py:" not in done.stderr


# The terminal


def _on_a_terminal(environment: dict[str, str]) -> str:
    """Standard output of ``opkiln report`` on a pseudo-terminal."""
    ours, theirs = os.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "opkiln", "report"], stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    text = b""
    try:
        while chunk := os.read(ours, 65536):
            text += chunk
    except OSError:
        pass  # how Linux says that the other side is closed
    os.close(ours)
    assert child.wait(timeout=30) == 0
    return text.decode()


@pytest.mark.usefixtures("asked_once")
def test_colour_is_for_terminals_without_no_color(run: Callable[..., Ran]) -> None:
    assert "\x1b" not in run("report").out
    assert "\x1b[1mops" in _on_a_terminal(dict(os.environ))
    assert "\x1b" not in _on_a_terminal({**os.environ, "NO_COLOR": "1"})


@pytest.mark.usefixtures("asked_once")
def test_a_reader_that_goes_away_is_no_error_to_report() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    child = subprocess.Popen(
        [sys.executable, "-m", "opkiln", "report"], stdout=theirs, stderr=subprocess.PIPE, text=True
    )
    os.close(theirs)
    _, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (1, "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_call_opkiln_back(shell: str, run: Callable[..., Ran]) -> None:
    ran = run("completion", shell)
    assert ran.code == 0
    assert f"_OPKILN_COMPLETE={shell}_complete" in ran.out


def test_commands_and_ops_are_completed() -> None:
    def completed(words: str) -> list[str]:
        variables = {
            "_OPKILN_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
        }
        return start(env={**os.environ, **variables}).stdout.split()

    assert completed("opkiln re") == ["plain,report"]
    assert completed("opkiln build cpu_adam") == ["plain,cpu_adam"]
