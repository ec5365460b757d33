"""``opkiln run``: programs that know nothing of opkiln, with their extensions built by it."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from sample import child

if TYPE_CHECKING:
    from collections.abc import Mapping

WHOSE = "import torch.utils.cpp_extension as e; print(e.load.__module__)"
TORCHS = "torch.utils.cpp_extension"


def execute(
    *command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """A command as a shell starts it, with none of this process's own paths."""
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, capture_output=True, text=True, env={**given, **(env or {})}, cwd=cwd, timeout=120,
        check=False,
    )  # fmt: skip


def run(*command: str, **more: object) -> subprocess.CompletedProcess[str]:
    return execute(sys.executable, "-m", "opkiln", "run", *command, **more)  # type: ignore[arg-type]


def patched(code: str) -> str:
    """What a program with torch prints in the environment that ``opkiln run`` gives it."""
    return child.run(code, bare=False, env={"OPKILN_PATCH_TORCH": "1"})


def test_a_program_and_its_processes_get_opkilns_functions_in_the_place_of_torchs() -> None:
    asked = "from opkiln.compat import hook; print(hook.is_installed())"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {asked!r}], check=True)"
    done = run(sys.executable, "-c", f"{code}; {WHOSE}")
    child_has_it, whose = done.stdout.splitlines()
    assert child_has_it == "True", done.stderr
    assert whose.startswith("opkiln."), done.stderr


def test_without_it_torch_is_as_it_was() -> None:
    code = f"{WHOSE}; import sys; print([f for f in sys.meta_path if 'opkiln' in repr(f)])"
    assert child.run(code, bare=False).splitlines() == [TORCHS, "[]"]


def test_functions_of_a_module_imported_before_are_replaced_and_put_back() -> None:
    code = """
import sys, torch.utils.cpp_extension as e
from opkiln.compat import hook
before = dict(vars(e))
hook.install()
hook.install()
assert e.load.__module__.startswith("opkiln."), e.load
assert hook.is_installed()
hook.remove()
after = dict(vars(e))
assert all(after[name] is before[name] for name in before)
# torch has this one made when it is first asked for.
assert set(after) - set(before) <= {"BuildExtension"}, set(after) - set(before)
assert not [each for each in sys.meta_path if "opkiln" in repr(each)]
"""
    child.run(code, bare=False)


def test_a_module_keeps_its_own_loader_and_its_source() -> None:
    code = """
import inspect, torch.utils.cpp_extension as e
assert "opkiln" not in repr(e.__loader__) + repr(e.__spec__.loader)
assert "def load(" in inspect.getsource(e)
"""
    patched(code)


def test_torchs_module_is_executed_when_something_of_its_own_is_used() -> None:
    code = """
import sys, torch
had = "setuptools" in sys.modules
import torch.utils.cpp_extension as e
from torch.utils.cpp_extension import load, load_inline, CppExtension
assert e.is_ninja_available()
assert ("setuptools" in sys.modules) == had, "executing it imports setuptools"
assert e.COMMON_NVCC_FLAGS and "setuptools" in sys.modules
assert e.load is load and load.__module__.startswith("opkiln.")
assert not [name for name in e.__all__ if not hasattr(e, name)]
"""
    patched(code)


USES = {
    "an assignment": "e.MINIMUM_GCC_VERSION = 7; assert e.MINIMUM_GCC_VERSION == 7",
    "a deletion": "del e.IS_LINUX; assert not hasattr(e, 'IS_LINUX')",
    "vars": "assert vars(e)['load'].__module__.startswith('opkiln.') and vars(e)['IS_LINUX']",
    "dir": "assert {'load', 'IS_LINUX'} <= set(dir(e))",
    "a star import": "from torch.utils.cpp_extension import *; get_default_build_root, load",
    "a reload": "import importlib; importlib.reload(e); assert e.IS_LINUX is not None",
    "its class": "assert issubclass(e.BuildExtension, __import__('setuptools').Command)",
    "an unknown name": "assert not hasattr(e, 'no_such_name')",
    "threads": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "names = ['IS_LINUX', 'load', 'COMMON_NVCC_FLAGS', 'CUDA_HOME', 'load_inline'] * 8\n"
        "with ThreadPoolExecutor(len(names)) as pool:\n"
        "    assert all(list(pool.map(lambda name: hasattr(e, name), names)))"
    ),
    "a pickle": "import pickle; assert pickle.loads(pickle.dumps(e.load)) is e.load",
}


def test_a_module_that_is_not_executed_yet_behaves_like_one_that_is() -> None:
    code = f"""
import os, setuptools, torch
for name, use in {USES!r}.items():
    if (pid := os.fork()) == 0:
        import torch.utils.cpp_extension as e
        exec(use)
        assert e.load.__module__.startswith("opkiln."), e.load
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, name
"""
    patched(code)


def test_a_module_that_is_not_executed_yet_gets_its_own_functions_back() -> None:
    code = """
import sys, torch.utils.cpp_extension as e
from opkiln.compat import hook
hook.remove()
assert e.load.__module__ == "torch.utils.cpp_extension" and type(e) is type(sys)
hook.install()
assert e.load.__module__.startswith("opkiln.")
"""
    patched(code)


def test_a_module_that_cannot_be_executed_says_why_and_still_serves_opkilns_functions() -> None:
    code = """
import sys, torch
sys.modules["setuptools"] = None  # as if it were not installed
import torch.utils.cpp_extension as e
for _ in range(2):
    try:
        e.COMMON_NVCC_FLAGS
    except ModuleNotFoundError as error:
        assert "setuptools" in str(error)
    else:
        raise AssertionError
assert e.load.__module__.startswith("opkiln.")
"""
    patched(code)


def test_a_python_without_opkiln_is_brought_this_one_and_nothing_beside_it(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    python = str(tmp_path / "bare" / "bin" / "python")
    code = "import opkiln.compat.hook as p, sys; print(p.is_installed()); import click"
    done = run(python, "-c", code)
    assert done.stdout.strip() == "True", done.stderr
    assert "No module named 'click'" in done.stderr


def test_a_sitecustomize_of_the_users_runs_as_before(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.hello = 'from the user'\n")
    code = "import sys, sitecustomize; print(sys.hello, sitecustomize.__file__)"
    done = run(sys.executable, "-c", code, env={"PYTHONPATH": str(tmp_path)})
    assert done.stdout.strip() == f"from the user {tmp_path / 'sitecustomize.py'}", done.stderr


def test_a_script_is_run_by_this_python_and_gets_its_arguments(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.executable, sys.argv[1:]); sys.exit(7)\n")
    done = run(str(script), "--flag", "-x")
    assert done.stdout.strip() == f"{sys.executable} ['--flag', '-x']"
    assert done.returncode == 7


def test_an_unknown_program_is_an_error_with_its_name() -> None:
    done = run("no-such-program-here")
    assert done.returncode == 2
    assert "there is no program 'no-such-program-here'" in done.stderr
    assert "hint:" in done.stderr


SOURCE = """
#include <Python.h>
static PyMethodDef methods[] = {{nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "tiny", "tiny, by hand", -1, methods};
PyMODINIT_FUNC PyInit_tiny() { return PyModule_Create(&module); }
"""


def files(directory: str) -> dict[str, tuple[int, int]]:
    found = {}
    for where, _, names in os.walk(directory):
        for name in names:
            status = os.lstat(os.path.join(where, name))
            found[os.path.join(where, name)] = (status.st_size, status.st_mtime_ns)
    return found


def test_an_unmodified_script_is_cold_once_and_torchs_files_stay_as_they_are(
    tmp_path: Path,
) -> None:
    (tmp_path / "tiny.cpp").write_text(SOURCE)
    script = tmp_path / "train.py"
    script.write_text(
        "from torch.utils.cpp_extension import load\n"
        "module = load(name='tiny', sources=['tiny.cpp'])\n"  # which torch builds in silence
        "print(module.__doc__)\n"
    )
    package = os.path.join(os.path.dirname(torch.__file__), "utils")
    before = files(package)
    env = {
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "torchs"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    cold = run(str(script), env=env, cwd=tmp_path)
    assert cold.stdout.strip().endswith("tiny, by hand"), cold.stderr
    took_over = f"opkiln builds the PyTorch extensions and DeepSpeed ops of: {script}"
    said = cold.stderr.splitlines()
    assert said[:2] == [took_over, "building tiny (2 steps)"]
    assert said[2].startswith("built tiny in ")
    warm = run(str(script), env=env, cwd=tmp_path)
    assert warm.stdout.strip().endswith("tiny, by hand"), warm.stderr
    assert warm.stderr.splitlines() == [took_over]
    assert not (tmp_path / "torchs").exists()
    assert files(package) == before


@pytest.mark.parametrize("value", ["0", "maybe"])
def test_the_variable_switches_it_off_or_is_refused_by_name(value: str) -> None:
    done = child.finish(child.start(WHOSE, bare=False, env={"OPKILN_PATCH_TORCH": value}))
    if value == "0":
        assert done.stdout.strip() == TORCHS, done.stderr
    else:
        assert "OPKILN_PATCH_TORCH='maybe' is not a valid value" in done.stderr


def test_run_starts_a_program_without_importing_the_command_line() -> None:
    command = (sys.executable, "-X", "importtime", "-m", "opkiln", "run")
    at_once = execute(*command, "true")
    assert at_once.returncode == 0
    assert " click" not in at_once.stderr, at_once.stderr
    with_option = execute(*command, "-q", "true")
    assert " click" in with_option.stderr, "this test would not notice click"


@pytest.mark.parametrize("option", [(), ("-v",)])  # with an option, click parses the command
def test_run_gives_the_program_its_arguments_and_environment(
    option: tuple[str, ...], tmp_path: Path
) -> None:
    code = "import os, sys; print(sys.argv[1:], os.environ['ANSWER'], os.environ['PYTHONPATH'])"
    words = (*option, sys.executable, "-c", code, "-q", "--", "two words", "ü")
    done = run(*words, env={"ANSWER": "42", "PYTHONPATH": "/nowhere"}, cwd=tmp_path)
    assert done.stdout.startswith("['-q', '--', 'two words', 'ü'] 42 "), done.stderr
    first, *others = done.stdout.split()[-1].split(os.pathsep)
    assert first.endswith("startup")
    assert others == ["/nowhere"]


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"OPKILN_MODE": "nonsense"}, "error: OPKILN_MODE='nonsense' is not a valid value"),
        ({"OPKILN_MDE": "auto"}, "warning: unknown setting OPKILN_MDE; did you mean OPKILN_MODE?"),
    ],
)
def test_run_reports_settings_as_every_command_does(environment: dict[str, str], told: str) -> None:
    assert told in run("true", env=environment).stderr
