"""No Python that opkiln starts runs a file of the working directory."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "opkiln"

# The functions that name this Python, and why. Everything else asks ``process.python``.
NAMING = {
    ("run/process.py", "python"): "gives every child of ours -P or -I",
    ("cli/run.py", "find"): "the user's own program",
    ("ship/prebuild.py", "run_script"): "the user's own script",
    ("machine/toolchain/toolkits.py", "_pathfinder"): "asks whether there is one",
    ("compat/ninja/front.py", "environment"): "the server, which the library in ninja starts",
    ("report/commands.py", "interpreter"): "for a command to copy",
    ("report/machine.py", "machine"): "shows it",
    ("report/doctor/host.py", "python"): "shows it",
    ("cli/output.py", "run"): "shows it",
}
# The functions that start a program, of whatever kind.
STARTING = {
    ("run/child.py", "start"),
    ("run/process.py", "_start_watchdog"),
    ("cli/run.py", "start_now"),
    ("cli/main.py", "run_command"),
    ("compat/ninja/front.py", "start"),  # it becomes ninja
    ("machine/nvrtc/program.py", "_start"),  # a compiler driver, which is a program of its own
}
STARTS = {"Popen", "check_call", "check_output", "getoutput"}
STARTS_OF_OS = ("exec", "spawn", "posix_spawn", "fork", "system", "popen")
# A source without any of these words is not parsed.
NAMES_ONE = re.compile(r"\bexecutable\b|[\"'/]python")
STARTS_ONE = re.compile(
    rf"\bos\.({'|'.join(STARTS_OF_OS)})|\b({'|'.join(STARTS)}|subprocess|multiprocessing)\b"
)


@functools.cache
def functions(code: str) -> list[tuple[str, ast.AST]]:
    """(name of the innermost function around it, node) of every node."""
    found = []

    def visit(node: ast.AST, name: str) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            name = node.name
        found.append((name, node))
        for child in ast.iter_child_nodes(node):
            visit(child, name)

    visit(ast.parse(code), "")
    return found


def dotted(node: ast.expr) -> str:
    """A name with dots; what is no name in it is a question mark."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def naming(code: str) -> set[str]:
    """The functions that name this Python, or start a list of words with a Python."""
    found = set()
    for name, node in functions(code) if NAMES_ONE.search(code) else ():
        if isinstance(node, ast.Attribute) and dotted(node) == "sys.executable":
            found.add(name)
        if isinstance(node, ast.ImportFrom) and node.module == "sys":
            found |= {name for each in node.names if each.name == "executable"}
        if isinstance(node, (ast.List, ast.Tuple)) and isinstance(node.ctx, ast.Load):
            first = next(iter(node.elts), None)
            word = first.value if isinstance(first, ast.Constant) else None
            # With one word it is a list of names to look for.
            if isinstance(word, str) and os.path.basename(word).startswith("python"):
                rest = [each.value for each in node.elts[1:] if isinstance(each, ast.Constant)]
                if any(str(each).startswith("-") for each in rest):
                    found.add(name)
    return found


def starting(code: str) -> set[str]:
    """The functions that start a program."""
    found = set()
    for name, node in functions(code) if STARTS_ONE.search(code) else ():
        if isinstance(node, ast.Call):
            module, _, called = dotted(node.func).rpartition(".")
            by_os = module == "os" and called.startswith(STARTS_OF_OS)
            by_module = module.startswith(("subprocess", "multiprocessing"))
            if by_os or called in STARTS or (by_module and called != "__new__"):
                found.add(name)
    return found


def everywhere(look: object) -> set[tuple[str, str]]:
    assert callable(look)
    sources = sorted(SOURCE.rglob("*.py"))
    assert len(sources) > 100, "the sources are not where this test looks for them"
    return {
        (str(path.relative_to(SOURCE)), name) for path in sources for name in look(path.read_text())
    }


def test_only_one_function_makes_the_argv_of_a_python_child() -> None:
    assert everywhere(naming) == set(NAMING)


def test_programs_are_started_in_few_places() -> None:
    assert everywhere(starting) == STARTING


@pytest.mark.parametrize(
    "code",
    [
        "def f(): run((sys.executable, '-m', 'x'))",
        "def f(): run(['python3', '-c', 'x'])",
        "def f(): run(('/usr/bin/python', '-m', 'x'))",
        "def f():\n from sys import executable",
    ],
)
def test_a_python_that_is_started_otherwise_would_be_found(code: str) -> None:
    assert naming(code) == {"f"}


@pytest.mark.parametrize(
    "code",
    ["subprocess.run(x)", "subprocess.Popen(x)", "Popen(x)", "os.posix_spawn(x)", "os.execv(x)",
     "os.system(x)", "multiprocessing.Process(x)"],
)  # fmt: skip
def test_a_program_that_is_started_elsewhere_would_be_found(code: str) -> None:
    assert starting(f"def f(): {code}") == {"f"}


# With real files


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory in which every name that a child could import is a file that tells."""
    where = tmp_path / "work"
    for name in (
        "opkiln.py", "torch.py", "sitecustomize.py", "usercustomize.py", "json.py", "ctypes.py",
        "hashlib.py", "time.py", "cuda/__init__.py", "cuda/pathfinder/__init__.py",
    ):  # fmt: skip
        file = where / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"print({name!r}, file=open({str(tmp_path / 'ran')!r}, 'a'))\n")
    monkeypatch.chdir(where)
    return tmp_path / "ran"


def test_the_planted_files_would_be_run_by_a_python_that_is_started_carelessly(
    planted: Path,
) -> None:
    subprocess.run([sys.executable, "-c", "import opkiln, cuda"], check=True)
    assert planted.read_text().split() == ["opkiln.py", "cuda/__init__.py"]


@pytest.mark.parametrize(
    "command",
    [["demo"], ["doctor", "--no-build"], ["report"], ["check"]],
    ids=" ".join,
)
def test_a_command_runs_nothing_of_the_working_directory(command: list[str], planted: Path) -> None:
    # With no g++, for there is nothing to see in what it does. PYTHONPATH holds for children, too.
    env = {**os.environ, "PYTHONPATH": str(SOURCE.parent), "PATH": os.path.dirname(sys.executable)}
    argv = [sys.executable, "-P", "-m", "opkiln", *command]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert "Traceback" not in done.stderr
    assert not planted.exists(), planted.read_text()


def test_the_question_for_a_toolkit_runs_nothing_of_the_working_directory(planted: Path) -> None:
    from opkiln.machine.toolchain import toolkits

    toolkits._pathfinder()
    assert not planted.exists(), planted.read_text()


def test_a_python_child_that_imports_opkiln_gets_this_one(planted: Path) -> None:
    from opkiln.run import process

    code = """
import opkiln, json
from importlib.util import find_spec
print(opkiln.__file__, sys.argv[1:])
print(find_spec("torch").origin)"""
    done = process.run(process.python_code(code, "a", "b c"))
    said, torch = done.output.splitlines()
    assert said == f"{SOURCE / '__init__.py'} ['a', 'b c']"
    assert not Path(torch).is_relative_to(os.getcwd())
    assert not planted.exists(), planted.read_text()
