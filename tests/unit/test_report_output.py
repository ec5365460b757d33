"""Where a report goes, and what happens when it cannot get there."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from opkiln.builder.registry import ALL_OPS
from opkiln.cli import main, output
from opkiln.errors import SpecError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("asked_once")
STORE = 5  # the exit code of what cannot be read or written


def shell(redirection: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `opkiln` with its output redirected as a shell does it."""
    command = f'exec "$@" {redirection}'
    words = [sys.executable, "-m", "opkiln", *arguments]
    return subprocess.run(
        ["sh", "-c", command, "sh", *words], capture_output=True, text=True, timeout=60, check=False
    )


# Output that fails


@pytest.mark.parametrize("arguments", [("report",), ("cache", "path")])
@pytest.mark.parametrize(
    ("redirection", "reason"),
    [
        (">&-", "standard output is closed"),
        (">/dev/full", "standard output cannot be written: No space left on device"),
    ],
)
def test_output_that_fails_is_one_line_of_error(
    redirection: str, reason: str, arguments: tuple[str, ...]
) -> None:
    done = shell(redirection, *arguments)
    assert (done.returncode, done.stderr) == (STORE, f"error: {reason}\n")


def test_help_that_cannot_be_written_is_one_line_of_error() -> None:
    done = shell(">/dev/full", "--help")
    assert (done.returncode, done.stderr) == (STORE, "error: No space left on device\n")


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_words_that_nobody_hears_change_nothing(redirection: str) -> None:
    assert shell(redirection, "nonsense").returncode == 2


def test_a_page_needs_no_standard_output(tmp_path: Path) -> None:
    done = shell(">&-", "report", "--hide-ops", "--html", str(tmp_path / "page.html"))
    assert (done.returncode, done.stderr) == (0, f"wrote {tmp_path}/page.html\n")
    assert (tmp_path / "page.html").read_text().endswith("</html>\n")


# The page's file


def test_a_dash_is_standard_output(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main._run(["report", "--hide-ops", "--html", "-"]) == 0
    out, err = capfdbinary.readouterr()
    assert out.startswith(b"<!DOCTYPE html>")
    assert out.endswith(b"</html>\n")
    assert err == b""


def test_paths_that_are_no_text_are_spelt_out_in_every_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    strange = tmp_path / os.fsdecode(b"caf\xe9\x1b")
    monkeypatch.setenv("OPKILN_CACHE_DIR", str(strange))
    page = tmp_path / "page.html"
    assert main._run(["report", "--hide-ops", "--html", str(page)]) == 0
    assert r"caf\udce9" in page.read_text(encoding="utf-8")
    for form in ((), ("--markdown",), ("--json",)):
        assert main._run(["report", "--hide-ops", *form]) == 0
        assert r"udce9" in capfd.readouterr().out


def test_a_page_replaces_the_last_one_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    page, link = tmp_path / "page.html", tmp_path / "latest.html"
    page.write_text("old")
    page.chmod(0o640)
    link.symlink_to(page)
    with page.open() as held:
        assert main._run(["report", "--hide-ops", "--html", str(link)]) == 0
        assert held.read() == "old"  # whoever reads it has the one or the other
    assert link.is_symlink()
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert stat.S_IMODE(page.stat().st_mode) == 0o640
    assert sorted(each.name for each in tmp_path.iterdir()) == ["latest.html", "page.html"]


def test_what_is_no_file_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        assert main._run(["report", "--hide-ops", "--html", str(pipe)]) == 0
        assert reader.communicate(timeout=30)[0].endswith(b"</html>\n")
    assert pipe.is_fifo()


# The terminal


def test_a_terminal_gets_our_colours_and_nothing_else_that_it_would_obey() -> None:
    ours, theirs = os.openpty()
    with open(theirs, "w", encoding="utf-8") as terminal:
        said = output._fit("\x1b[31merror:\x1b[0m \x1b[2J\x1b]0;x\x07\r\n\ta", terminal)
    os.close(ours)
    assert said == "\x1b[31merror:\x1b[0m \\x1b[2J\\x1b]0;x\\x07\\r\n\ta"


def test_what_goes_to_a_file_is_as_it_is(tmp_path: Path) -> None:
    with (tmp_path / "script").open("w", encoding="utf-8") as file:
        assert output._fit("g++ -DX='\x1b'", file) == "g++ -DX='\x1b'"


# What others install


def _install(where: Path, name: str, group: str, value: str) -> None:
    metadata = where / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")


@pytest.fixture
def quitter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An installed op whose module ends the process that imports it."""
    _install(tmp_path, "quitter", "opkiln.ops", "quitting_op:Builder")
    (tmp_path / "quitting_op.py").write_text("raise SystemExit(7)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "quitter"


def test_an_op_whose_import_ends_the_process_is_a_row(
    quitter: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main._run(["report"]) == 0
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "quitter - no no no SystemExit: 7" in said
    assert any(line.startswith("cpu_adam cpu") for line in said)


def test_an_accelerator_of_others_that_fails_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _install(tmp_path, "odd", "opkiln.accelerators", "odd_accelerator:Odd")
    (tmp_path / "odd_accelerator.py").write_text(
        "from opkiln.accelerator.interface import Answer\n"
        "class Odd:\n"
        "    @classmethod\n"
        "    def look(cls, root, *, asked): return Answer('odd', True, 'it says so')\n"
        "    def __init__(self): raise RuntimeError('not today')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("OPKILN_ACCELERATOR", "odd")
    assert main._run(["report", "--errors-only", "--hide-ops"]) == 0
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith("accelerator ") and "not today" in line for line in said)
    assert "hint: unset OPKILN_ACCELERATOR" in said


def test_to_ask_for_an_op_whose_import_ends_the_process_is_an_error(quitter: str) -> None:
    with pytest.raises(SpecError, match="cannot be imported") as raised:
        ALL_OPS[quitter]
    assert raised.value.why == "SystemExit: 7"
