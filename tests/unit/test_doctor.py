"""The doctor without a compiler: its loop, its words, its exit codes; toolkits made of scripts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click import unstyle
from sample.child import SOURCE, run
from sample.doctor import Patient, torch_stand_in
from test_toolkits import FakeToolkit, a_compiler

from opkiln.cli import main, output, report
from opkiln.errors import SettingError, StoreError
from opkiln.report import commands
from opkiln.report.doctor import checks, terms
from opkiln.report.doctor.terms import (
    FAIL,
    PASS,
    SKIP,
    WARN,
    Diagnosis,
    Facts,
    copyable_command,
    failed,
    passed,
    skipped,
    warned,
)

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "checks.md"


# The loop


def _raising(error: Exception) -> Callable[[Facts], Diagnosis]:
    def check(here: Facts) -> Diagnosis:
        raise error

    return check


def test_a_check_that_raises_is_a_failure_with_the_exception() -> None:
    found = terms.run_check(_raising(RuntimeError("what nobody thought of")), Facts())
    assert found == failed("RuntimeError: what nobody thought of")


def test_an_error_of_opkilns_own_brings_its_reason_and_hint() -> None:
    error = StoreError(
        "it is full", why="no space\nleft", hint="opkiln cache gc    (or buy a disk)"
    )
    found = terms.run_check(_raising(error), Facts())
    assert found == failed("it is full; no space; left", "opkiln cache gc")


def test_a_setting_without_meaning_is_one_failure_and_not_one_of_each_check() -> None:
    found = terms.run_check(_raising(SettingError("OPKILN_MODE='maybe' is no value")), Facts())
    assert found == skipped("not possible while OPKILN_MODE='maybe' is no value")


def test_a_torch_that_cannot_be_read_crashes_nothing(tmp_path: Path) -> None:
    site = torch_stand_in(tmp_path / "site", "2.13.0")
    (site / "torch" / "version.py").unlink()
    patient = Patient({"PYTHONPATH": f"{site}{os.pathsep}{SOURCE}", "PATH": "/usr/bin:/bin"})
    argv = (sys.executable, "-m", "opkiln", "doctor", "--no-build", "--json")
    done = patient.shell('exec "$@"', *argv)
    findings = {each["check"]: each for each in json.loads(done.stdout)["findings"]}
    assert done.returncode == output.FOUND
    assert list(findings) == list(checks.CHECKS)
    assert findings["torch"]["verdict"] == FAIL
    assert "FileNotFoundError" in findings["torch"]["evidence"]
    assert findings["tmpdir"]["verdict"] == PASS


def test_torch_is_never_imported_by_who_asks(asked_once: Path) -> None:
    # Its children, and asking a hipcc what it is, take seconds.
    code = (
        "import sys\n"
        "from subprocess import CompletedProcess\n"
        "from opkiln.report.doctor import checks, terms\n"
        "terms.capture = lambda argv, **how: CompletedProcess(argv, 1, '', '')\n"
        "found = list(checks.examine(build=False))\n"
        "assert len(found) == len(checks.CHECKS)\n"
        "print('torch' in sys.modules)\n"
    )
    env = {"ROCM_HOME": str(asked_once / "none")}
    assert run(code, bare=False, forked=False, env=env) == "False\n"


def test_the_worst_is_a_failure_then_a_warning_and_never_a_skip() -> None:
    assert checks.worst([PASS, WARN, FAIL, SKIP]) == FAIL
    assert checks.worst([WARN, SKIP, PASS]) == WARN
    assert checks.worst([SKIP, PASS]) == checks.worst([SKIP]) == PASS


# The command


@pytest.fixture
def planted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs the command with these outcomes in place of the checks: (code, what it prints)."""

    def call(*arguments: str, **outcomes: Diagnosis) -> tuple[int, str]:
        made = {name: (lambda here, found=found: found) for name, found in outcomes.items()}
        monkeypatch.setattr(checks, "CHECKS", made)
        monkeypatch.setattr(checks, "BUILDS", {"build": lambda here: passed("built")})
        code = main._run(["doctor", *arguments])
        return code, capsys.readouterr().out

    return call


def test_the_exit_code_says_the_worst(planted: Callable[..., tuple[int, str]]) -> None:
    good, odd, bad, none = passed("a"), warned("b"), failed("c"), skipped("d")
    assert planted(one=good, two=none)[0] == 0
    assert planted(one=good, two=odd)[0] == report.WARNED == 8
    assert planted(one=odd, two=bad, three=good)[0] == output.FOUND == 1


def test_each_finding_is_a_line_with_the_command_below(
    planted: Callable[..., tuple[int, str]],
) -> None:
    _, shown = planted("--no-build", good=passed("fine"), crooked=warned("bent", "unset BEND"))
    assert shown.splitlines() == [
        "PASS  good     fine",
        "WARN  crooked  bent",
        "               fix: unset BEND",
        "0 failures, 1 warning, 1 passed, 0 skipped",
    ]


def test_evidence_is_folded_to_a_terminal_and_a_command_is_not() -> None:
    found = warned("one two three four five six seven", "unset A_LONG_NAME ANOTHER")
    shown = unstyle(checks.line("crooked", found, ["crooked"], width=40))
    assert shown.splitlines() == [
        "WARN  crooked  one two three four five",
        "               six seven",
        "               fix: unset A_LONG_NAME ANOTHER",
    ]


def test_only_what_is_wrong_is_shown_where_that_is_asked_for(
    planted: Callable[..., tuple[int, str]],
) -> None:
    _, shown = planted("--errors-only", good=passed("fine"), none=skipped("no"), bad=failed("no!"))
    assert shown.splitlines() == [
        "FAIL  bad    no!",
        "1 failure, 0 warnings, 2 passed, 1 skipped",
    ]


def test_json_has_every_finding_and_the_worst(planted: Callable[..., tuple[int, str]]) -> None:
    code, shown = planted("--json", bad=failed("broken", "mend it"))
    assert code == 1
    assert json.loads(shown) == {
        "schema": 1,
        "worst": "FAIL",
        "findings": [
            {"check": "bad", "verdict": "FAIL", "evidence": "broken", "command": "mend it"},
            {"check": "build", "verdict": "PASS", "evidence": "built", "command": ""},
        ],
    }


def test_json_too_has_only_what_is_wrong_where_that_is_asked_for(
    planted: Callable[..., tuple[int, str]],
) -> None:
    outcomes = {"good": passed("fine"), "odd": warned("bent"), "none": skipped("no")}
    code, shown = planted("--json", "--errors-only", **outcomes)
    answer = json.loads(shown)
    assert (code, answer["worst"]) == (report.WARNED, WARN)
    assert [each["check"] for each in answer["findings"]] == ["odd"]


def test_every_check_is_documented_and_no_other() -> None:
    documented = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert documented == [*checks.CHECKS, *checks.BUILDS]


# Commands to copy


@pytest.mark.parametrize(
    ("hint", "command"),
    [
        ("unset CXX", "unset CXX"),
        ("apt-get install g++    (or set CXX to a compiler)", "apt-get install g++"),
        ("NVCC_CCBIN=/usr/bin/g++-12", "export NVCC_CCBIN=/usr/bin/g++-12"),
        ("set OPKILN_CUDA_HOME to an older toolkit", ""),
        ("add the directory of a.h to include_paths(), or set CPATH", ""),
        ("c++filt _Z1f    # then link the library that defines it", "c++filt _Z1f"),
        ("OPKILN_MODE=auto opkiln build x", "OPKILN_MODE=auto opkiln build x"),
        ("A=1 B='2 3'", "export A=1 B='2 3'"),
        ("/opt/bin/nvcc --version", "/opt/bin/nvcc --version"),
        ("ls -ld '/a b'", "ls -ld '/a b'"),
        ("restart the process", ""),
        ("save the file and try again", ""),
        ("x.to_dense()", ""),
        ("rename f to g in a.py", ""),
        ("it doesn't matter", ""),
        ("", ""),
    ],
)
def test_a_hint_becomes_what_a_shell_takes(hint: str, command: str) -> None:
    assert copyable_command(hint) == command


@pytest.mark.parametrize(
    ("os_release", "command"),
    [
        ("ID=debian\n", "apt-get install -y g++"),
        ('ID=linuxmint\nID_LIKE="ubuntu debian"\n', "apt-get install -y g++"),
        ('ID="rocky"\nID_LIKE="rhel centos fedora"\n', "dnf install -y gcc-c++"),
        ("ID=alpine\n", "apk add g++"),
        ("ID=arch\n", "pacman -S --noconfirm gcc"),
        ('ID="opensuse-leap"\nID_LIKE="suse opensuse"\n', "zypper install -y gcc-c++"),
    ],
)
def test_what_installs_a_compiler_depends_on_the_system(
    os_release: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "os-release").write_text(os_release)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert commands.install_command("g++", str(tmp_path / "os-release")) == command
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert commands.install_command("g++", str(tmp_path / "os-release")) == f"sudo {command}"


def test_missing_python_headers_are_a_warning(tmp_path: Path) -> None:
    stand_in = (
        "from opkiln.machine.toolchain import torch_sdk\n"
        f"torch_sdk.python_include = lambda: {str(tmp_path)!r}\n"
    )
    patient = Patient({}, stand_ins=stand_in)
    found = patient.check("python headers")
    assert (found.verdict, found.command) == (WARN, commands.install_command("python3-dev"))
    (tmp_path / "Python.h").write_text("")
    assert patient.check("python headers").verdict == PASS


def test_another_kernel_is_a_failure() -> None:
    stand_in = "from opkiln.machine import uname; uname.system = lambda: 'darwin'"
    found = Patient({}, stand_ins=stand_in).check("system")
    assert found.verdict == FAIL
    assert "darwin" in found.evidence


# torch, of files


def _with_torch(site: Path, **env: str) -> Patient:
    return Patient({"PYTHONPATH": f"{site}{os.pathsep}{SOURCE}", **env})


def test_a_torch_that_is_too_old_is_found(tmp_path: Path) -> None:
    patient = _with_torch(torch_stand_in(tmp_path, "2.9.1+cu128", "12.8"))
    found = patient.check("torch")
    assert found.verdict == FAIL
    assert found.evidence.startswith("2.9.1+cu128, CUDA 12.8, ")
    assert "lacks the stable ABI of torch 2.10" in found.evidence
    assert found.command.endswith("-m pip install --upgrade 'torch>=2.10'")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.10.0'\n")
    assert patient.check("torch").verdict == PASS


def test_a_missing_torch_is_found_and_what_rests_on_it_is_skipped() -> None:
    without = "from opkiln.machine.toolchain import torch_sdk; torch_sdk.locate = lambda: None"
    patient = Patient({}, stand_ins=without)
    assert patient.check("torch").verdict == FAIL
    assert patient.check("torch").command.endswith("-m pip install torch")
    for name in ("torch libraries", "torch c++ abi", "openmp"):
        assert patient.check(name).verdict == SKIP


def test_a_torch_of_the_old_cpp_abi_is_a_warning(tmp_path: Path) -> None:
    site = torch_stand_in(tmp_path, "2.10.0")
    config = site / "torch" / "share" / "cmake" / "Torch" / "TorchConfig.cmake"
    config.parent.mkdir(parents=True)
    config.write_text('set(TORCH_CXX_FLAGS "-D_GLIBCXX_USE_CXX11_ABI=0")\n')
    found = _with_torch(site).check("torch c++ abi")
    assert found.verdict == WARN
    assert "_GLIBCXX_USE_CXX11_ABI=0" in found.evidence


# What programs get: an accelerator, and ops


@pytest.mark.parametrize("variable", ["OPKILN_ACCELERATOR", "DS_ACCELERATOR"])
def test_an_accelerator_that_cannot_serve_is_found(variable: str) -> None:
    patient = Patient({variable: "npu"})
    found = patient.check("accelerator")
    assert (found.verdict, found.command) == (FAIL, f"unset {variable}")
    assert found.evidence.startswith(f"{variable}=npu cannot be used: ")
    assert "cpu can: " in found.evidence
    assert patient.check("accelerator", after=found.command).verdict == PASS


def test_the_accelerator_that_was_asked_for_is_named() -> None:
    found = Patient({"OPKILN_ACCELERATOR": "cpu"}).check("accelerator")
    assert found.verdict == PASS
    assert found.evidence.startswith("cpu, set by OPKILN_ACCELERATOR; ")


def _with_ops(site: Path, **modules: str) -> Patient:
    """An installed package that declares an op of each name, with these modules."""
    (site / "theirs-1.0.dist-info").mkdir(parents=True)
    (site / "theirs-1.0.dist-info" / "METADATA").write_text("Name: theirs\nVersion: 1.0\n")
    lines = ["[opkiln.ops]", *(f"{name} = {name}_module:Builder" for name in modules)]
    (site / "theirs-1.0.dist-info" / "entry_points.txt").write_text("\n".join(lines))
    for name, code in modules.items():
        (site / f"{name}_module.py").write_text(code)
    (site / "op.cpp").write_text("")
    return Patient({"PYTHONPATH": f"{site}{os.pathsep}{SOURCE}"})


_GOOD = """
from opkiln import OpBuilder
class Builder(OpBuilder):
    NAME = 'good'
    def sources(self):
        return ['op.cpp']
"""


def test_each_op_that_cannot_be_imported_is_found(tmp_path: Path) -> None:
    modules = {
        "lost": "import no_such_module",
        "told": "raise SystemExit('not on this machine')",
        "left": "raise SystemExit(0)",
        "gone": "import os; os._exit(0)",
        "dead": "import os; os.abort()",
    }
    found = _with_ops(tmp_path, good=_GOOD, **modules).check("ops")
    assert found.verdict == WARN
    said = dict(each.removeprefix("op ").split(": ", 1) for each in found.evidence.split("; op "))
    assert list(said) == list(modules)
    assert "ModuleNotFoundError: No module named 'no_such_module'" in said["lost"]
    assert "not on this machine" in said["told"]
    assert said["gone"] == "the child ended with 0"
    assert said["dead"] == "the child died of SIGABRT"
    typed = [each.rpartition(" -c ")[2] for each in found.command.split("; ")]
    assert typed == [f"'import {name}_module'" for name in modules]


_MISSPELLED = """
import opkiln
class Builder(opkiln.OpBuilder):
    NAME = 'bad'
    def sources(self):
        return ['op.cpp']
@opkiln.library(Builder).op(mutates='y')
def scaled_add(x: 'int') -> None:
    pass
"""


def test_an_op_with_a_wrong_declaration_or_without_its_sources_is_found(tmp_path: Path) -> None:
    lost = _GOOD.replace("op.cpp", "lost.cpp").replace("'good'", "'lost'")
    found = _with_ops(tmp_path, good=_GOOD, bad=_MISSPELLED, lost=lost).check("ops")
    assert found.verdict == WARN
    assert "op scaled_add: mutates= names y" in found.evidence
    assert "op lost: the source lost.cpp does not exist" in found.evidence
    assert "good" not in found.evidence


def test_two_ops_with_one_name_pass_and_the_check_says_how_to_name_each(tmp_path: Path) -> None:
    patient = _with_ops(tmp_path, good=_GOOD)
    found = patient.check("ops")
    assert found.verdict == PASS
    assert found.evidence.endswith("; 1 of other packages")
    info = tmp_path / "second-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: second\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[opkiln.ops]\ngood = good_module:Builder\ncpu_adam = good_module:Builder\n"
    )
    found = patient.check("ops")
    assert found.verdict == PASS
    assert "cpu_adam is the op of opkiln; that of second is second:cpu_adam" in found.evidence
    assert "good is the op of theirs; that of second is second:good" in found.evidence


# An image that only runs ops


def _in_an_image(tmp_path: Path, **variables: str) -> tuple[int, dict[str, Diagnosis]]:
    """(exit code, findings) of `opkiln doctor` where no compiler and no Python.h are installed."""
    env = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(SOURCE), **variables}
    code = (
        "import sys\n"
        "from opkiln.machine.toolchain import torch_sdk\n"
        f"torch_sdk.python_include = lambda: {str(tmp_path)!r}\n"
        "from opkiln.cli.main import _run\n"
        "sys.exit(_run(['doctor', '--json']))\n"
    )
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300, check=False)
    rows = json.loads(done.stdout)["findings"]
    found = {each["check"]: Diagnosis(each["verdict"], each["evidence"], "") for each in rows}
    return done.returncode, found


def test_an_image_without_a_compiler_fails_while_ops_are_to_be_compiled(tmp_path: Path) -> None:
    status, found = _in_an_image(tmp_path)
    assert status == output.FOUND
    assert found["compiler"].verdict == FAIL
    assert found["python headers"].verdict == WARN


@pytest.mark.parametrize("mode", ["cached", pytest.param("sealed", marks=pytest.mark.full)])
def test_an_image_without_a_compiler_passes_where_nothing_is_compiled(
    tmp_path: Path, mode: str
) -> None:
    status, found = _in_an_image(tmp_path, OPKILN_MODE=mode)
    assert {name for name, each in found.items() if each.verdict == FAIL} == set()
    for name in ("compiler", "python headers"):
        assert found[name].verdict == PASS
        assert "not needed: " in found[name].evidence
    assert "no C++ compiler can be used here" in found["compiler"].evidence
    others = {each.verdict for each in found.values()}
    assert status == (report.WARNED if WARN in others else 0)


def test_a_missing_launcher_is_no_failure_where_nothing_is_compiled() -> None:
    patient = Patient({"CXX": "no_such_ccache g++", "OPKILN_MODE": "cached"})
    assert patient.check("launcher").verdict == PASS
    assert patient.check("launcher", after="unset OPKILN_MODE").verdict == FAIL


def test_a_missing_toolkit_is_no_failure_where_nothing_is_compiled(tmp_path: Path) -> None:
    site = torch_stand_in(tmp_path / "site", "2.13.0", cuda="13.0")
    (tmp_path / "bin").mkdir()
    path = f"{a_compiler(tmp_path / 'bin' / 'g++').parent}{os.pathsep}/usr/bin{os.pathsep}/bin"
    env = {"PYTHONPATH": f"{site}{os.pathsep}{SOURCE}", "PATH": path}
    for more, verdict in (({}, FAIL), ({"OPKILN_MODE": "cached"}, PASS)):
        found = Patient({**env, **more}, stand_ins=_ALONE).check("cuda toolkit")
        assert found.verdict == verdict, found
    assert "not needed: OPKILN_MODE=cached: nothing is compiled here" in found.evidence


# CUDA, of scripts

_ALONE = """
from opkiln.machine.toolchain import toolkits
toolkits.DIRECTORIES = ()
toolkits.site_directories = list
"""
_GPU = """
from opkiln.machine.devices import nvidia
gpu = nvidia.NvidiaGPU(0, 'GPU-0', 'NVIDIA stand-in', '9.0', 1 << 30)
nvidia._known['/'] = nvidia.NvidiaDevices((gpu,), '550.54.14', {cuda!r}, 'nvml')
"""


class Toolkits:
    """A machine whose compilers are scripts, and whose torch is a version."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bin = root / "bin"
        a_compiler(self.bin / "g++")

    def add(self, version: str) -> str:
        (self.root / "logs").mkdir(exist_ok=True)
        home = self.root / f"cuda-{version}"
        FakeToolkit(home, version, self.root / "logs" / version)
        return str(home)

    def patient(self, torch_cuda: str | None, *, driver: str = "", **env: str) -> Patient:
        site = torch_stand_in(self.root / f"site-{torch_cuda}", "2.13.0", torch_cuda)
        path = f"{self.bin}{os.pathsep}/usr/bin{os.pathsep}/bin"
        stand_ins = _ALONE + (_GPU.format(cuda=driver) if driver else "")
        env = {"PYTHONPATH": f"{site}{os.pathsep}{SOURCE}", "PATH": path, **env}
        return Patient(env, stand_ins=stand_ins)


@pytest.fixture
def toolkits(tmp_path: Path) -> Toolkits:
    return Toolkits(tmp_path)


def test_a_toolkit_of_another_major_is_found_and_left_for_one_that_fits(toolkits: Toolkits) -> None:
    old, new = toolkits.add("12.4"), toolkits.add("13.0")
    patient = toolkits.patient("13.0", OPKILN_CUDA_HOME=old, CUDA_HOME=new)
    found = patient.check("cuda toolkit")
    assert found.verdict == FAIL
    assert "no CUDA toolkit here fits torch, which was built with CUDA 13.0" in found.evidence
    assert f"{old} (OPKILN_CUDA_HOME): CUDA 12.4" in found.evidence
    assert found.command == "unset OPKILN_CUDA_HOME"
    mended = patient.check("cuda toolkit", after=found.command)
    assert mended.verdict == PASS
    assert mended.evidence.startswith(f"CUDA 13.0 in {new}; torch has 13.0")


def test_toolkits_that_were_refused_are_named_beside_the_one_that_is_taken(
    toolkits: Toolkits,
) -> None:
    old, new = toolkits.add("12.4"), toolkits.add("13.1")
    found = toolkits.patient("13.0", CUDA_PATH=old, CUDA_HOME=new).check("cuda toolkit")
    assert found.verdict == PASS
    assert "versions of one major are compatible" in found.evidence
    assert f"{old} not taken: CUDA 12.4; torch was built with 13.0" in found.evidence


def test_a_mismatch_that_was_allowed_is_a_warning(toolkits: Toolkits) -> None:
    patient = toolkits.patient("13.0", CUDA_HOME=toolkits.add("12.4"), DS_SKIP_CUDA_CHECK="1")
    found = patient.check("cuda toolkit")
    assert (found.verdict, found.command) == (WARN, "unset DS_SKIP_CUDA_CHECK")
    assert "another major version, because DS_SKIP_CUDA_CHECK is set" in found.evidence


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_a_variable_that_names_a_place_without_nvcc_is_a_warning(
    variable: str, toolkits: Toolkits
) -> None:
    gone = str(toolkits.root / "cuda-gone")
    good = next(name for name in ("CUDA_HOME", "CUDA_PATH") if name != variable)
    patient = toolkits.patient(None, **{variable: gone, good: toolkits.add("13.0")})
    for after, mended in (("", PASS), (f"unset {good}", SKIP)):  # with another toolkit, and without
        found = patient.check("cuda toolkit", after=after)
        assert (found.verdict, found.command) == (WARN, f"unset {variable}")
        assert f"{variable}: there is no {gone}/bin/nvcc" in found.evidence
        assert found.evidence.count(gone) == 1
        typed = f"{after}\n{found.command}"
        assert patient.check("cuda toolkit", after=typed).verdict == mended


def test_a_torch_with_cuda_and_no_toolkit_is_found(toolkits: Toolkits) -> None:
    found = toolkits.patient("13.0").check("cuda toolkit")
    assert found.verdict == FAIL
    assert "no CUDA toolkit is installed; PATH: no nvcc" in found.evidence
    assert found.command.endswith("-m pip install 'opkiln[cuda]'")
    assert toolkits.patient(None).check("cuda toolkit").verdict == SKIP


def test_a_host_compiler_outside_nvccs_range_is_found_and_another_is_named(
    toolkits: Toolkits,
) -> None:
    a_compiler(toolkits.bin / "g++-99")
    older = a_compiler(toolkits.bin / "g++-13")
    cxx = str(toolkits.bin / "g++-99")
    patient = toolkits.patient("13.0", CUDA_HOME=toolkits.add("13.0"), CXX=cxx)
    found = patient.check("nvcc host compiler")
    assert found.verdict == FAIL
    assert "unsupported GNU version! gcc versions later than 15" in found.evidence
    assert patient.check("cuda toolkit").verdict == SKIP
    mended = patient.check("nvcc host compiler", after=found.command)
    assert mended.verdict == PASS
    assert str(older) in found.command
    assert str(older) in mended.evidence


def test_a_driver_older_than_torch_is_found(toolkits: Toolkits) -> None:
    patient = toolkits.patient("13.0", driver="12.4", CUDA_HOME=toolkits.add("13.0"))
    found = patient.check("cuda driver")
    assert found.verdict == FAIL
    assert found.evidence == "driver 550.54.14 supports CUDA up to 12.4; torch needs 13.0"
    assert found.command == commands.install_command("cuda-drivers")


def test_a_driver_of_an_older_major_than_the_toolkit_is_found(toolkits: Toolkits) -> None:
    patient = toolkits.patient(None, driver="12.4", CUDA_HOME=toolkits.add("13.0"))
    found = patient.check("cuda driver")
    assert found.verdict == FAIL
    assert "supports CUDA up to 12.4; the toolkit is CUDA 13.0" in found.evidence
    assert found.command == "conda install -c nvidia cuda-toolkit=12.4"


def test_a_driver_of_an_older_minor_runs_binaries_and_no_ptx(toolkits: Toolkits) -> None:
    patient = toolkits.patient("13.1", driver="13.0", CUDA_HOME=toolkits.add("13.1"))
    found = patient.check("cuda driver")
    assert found.verdict == WARN
    assert "the toolkit is CUDA 13.1: its binaries run, but its PTX does not" in found.evidence
    assert "cuda-toolkit[nvcc,cccl,cudart]==13.0.*" in found.command


def test_a_gpu_that_torch_was_not_built_for_is_found(toolkits: Toolkits) -> None:
    found = toolkits.patient(None, driver="13.0").check("torch devices")
    assert found.verdict == WARN
    assert "torch 2.13.0 has neither CUDA nor HIP: it cannot use NVIDIA stand-in" in found.evidence
    assert found.command.endswith("-m pip install --force-reinstall torch")
    assert toolkits.patient("13.0", driver="13.0").check("torch devices").verdict == PASS


def test_a_driver_that_is_new_enough_passes(toolkits: Toolkits) -> None:
    patient = toolkits.patient("13.0", driver="13.2", CUDA_HOME=toolkits.add("13.0"))
    assert patient.check("cuda driver").verdict == PASS


# ROCm and SYCL

_AMD = """
from opkiln.machine.devices import amd
gpu = amd.AmdGPU(0, 'gfx1100', 32, 'stand-in', 1 << 30)
amd.devices = lambda root='/': amd.AmdDevices((gpu,))
"""


def test_an_amd_gpu_that_the_list_leaves_out_is_found() -> None:
    patient = Patient({"PYTORCH_ROCM_ARCH": "gfx90a"}, stand_ins=_AMD)
    found = patient.check("rocm gpus")
    assert found.verdict == FAIL
    assert "nothing in PYTORCH_ROCM_ARCH=gfx90a runs on gfx1100" in found.evidence
    assert patient.check("rocm gpus", after=found.command).verdict == PASS


def test_a_rocm_list_that_means_nothing_is_found() -> None:
    patient = Patient({"PYTORCH_ROCM_ARCH": "gfx90a;hopper"})
    found = patient.check("rocm gpus")
    assert (found.verdict, found.command) == (FAIL, "unset PYTORCH_ROCM_ARCH")
    assert "hopper" in found.evidence


def test_a_torch_for_rocm_without_hipcc_is_found(toolkits: Toolkits) -> None:
    patient = toolkits.patient(None, ROCM_HOME=str(toolkits.root / "no-rocm"))
    version = toolkits.root / "site-None" / "torch" / "version.py"
    version.write_text("__version__ = '2.13.0'\nhip: Optional[str] = '6.2.41133'\n")
    found = patient.check("rocm")
    assert (found.verdict, found.command) == (FAIL, "unset ROCM_HOME")


def test_a_torch_for_xpu_without_a_sycl_compiler_is_found(toolkits: Toolkits) -> None:
    patient = toolkits.patient(None)
    imports = "from opkiln.machine.toolchain import libsycl\n"
    patient.stand_ins += f"{imports}libsycl.installed = lambda: None\n"
    libraries = toolkits.root / "site-None" / "torch" / "lib"
    libraries.mkdir()
    (libraries / "libtorch_xpu.so").write_text("")
    found = patient.check("sycl")
    assert found.verdict == FAIL
    assert "no SYCL compiler can be used here" in found.evidence
    assert "-m pip install" in found.command
    (libraries / "libtorch_xpu.so").unlink()
    assert patient.check("sycl").verdict == SKIP
