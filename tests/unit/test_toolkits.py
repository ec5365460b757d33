"""The choice among CUDA toolkits, made of scripts that answer as nvcc does."""

from __future__ import annotations

import os
import sys
import time
import tomllib
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from sample import at_rest
from sample.evidence_of import broken, recalled

import opkiln.compat.torch as cpp_extension
from opkiln import extension
from opkiln.base import digest
from opkiln.base.build_model import Toolchain, TorchSDK
from opkiln.base.model import CUDA, Op, OpSpec
from opkiln.building.asking import plan_here
from opkiln.decision.terms import BUILD, Request
from opkiln.errors import (
    CUDAMismatchException,
    MissingCUDAException,
    ToolchainError,
)
from opkiln.machine import uname
from opkiln.machine.toolchain import (
    choice,
    cuda_version,
    find,
    host,
    nvcc,
    toolkits,
    torch_sdk,
)
from opkiln.run import process
from opkiln.run.child import Completed
from opkiln.settings import override, settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.timed

_NVCC = r"""#!/bin/sh
echo "$*" >> '{log}'
here=$(dirname "$0")
case "$*" in
  *--version*)
    echo 'nvcc: NVIDIA (R) Cuda compiler driver'
    echo 'Cuda compilation tools, release {version}, V{version}.1'; exit {status} ;;
  *--list-gpu-arch*) printf 'compute_80\ncompute_100\ncompute_90\n'; exit 0 ;;
  *--dryrun*)
    case "$*" in {unknown}) echo "nvcc fatal   : Unknown option" >&2; exit 1 ;; esac
    echo "#\$ _HERE_=$here" >&2
    echo "#\$ TOP=$here/.." >&2
    echo "#\$ INCLUDES=\"-I$here/../include\"" >&2
    echo "#\$ LIBRARIES=  \"-L$here/../lib64/stubs\" \"-L$here/../lib64\"" >&2
    echo "#\$ NVVMIR_LIBRARY_DIR=$here/../nvvm/libdevice" >&2
    echo "#\$ gcc -E something=else" >&2
    exit 0 ;;
esac
case "$*" in *g++-99*)
  echo 'host_config.h:137:2: error: #error -- unsupported GNU version! gcc versions later than 15' \
       'are not supported! The nvcc flag X can be used to override this' >&2
  exit 1 ;;
esac
for output; do :; done
{compile}
: > "$output"
"""


class FakeToolkit:
    """A directory laid out as a toolkit, whose nvcc is a script that keeps a log."""

    def __init__(self, home: Path, version: str, log: Path) -> None:
        self.home = home
        self.version = version
        self.nvcc = home / "bin" / "nvcc"
        self._log = log  # outside, so that to ask a toolkit changes nothing about it
        for name in ("bin/nvcc.profile", "bin/ptxas", "include/cuda_runtime_api.h",
                     "lib/libcudart_static.a", "nvvm/bin/cicc"):  # fmt: skip
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(f"{name} of {version}")
        self.write()

    def write(
        self, *, status: int = 0, unknown: str = "*-std=c++99*|*80a*", compiling: str = ":"
    ) -> None:
        self.nvcc.write_text(
            _NVCC.format(
                log=self._log,
                version=self.version,
                status=status,
                unknown=unknown,
                compile=compiling,
            )
        )
        self.nvcc.chmod(0o755)

    def asked(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []


def program(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def a_compiler(path: Path) -> Path:
    """A script that answers as a host compiler does."""
    target = f"{uname.architecture()}-linux-gnu"
    return program(
        path, f'case "$*" in *--version*) echo "g++ 12";; *) echo "Target: {target}";; esac'
    )


@pytest.fixture(autouse=True)
def at_rest_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    at_rest.shorten(monkeypatch)


class Machine:
    """A machine whose every place for a toolkit is below one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.memory = (str(root / "memory"),)
        self.bin = root / "bin"
        self.cxx = a_compiler(self.bin / "g++")

    def toolkit(self, version: str, where: str = "") -> FakeToolkit:
        home = self.root / (where or f"usr/cuda-{version}")
        (self.root / "logs").mkdir(exist_ok=True)
        return FakeToolkit(home, version, self.root / "logs" / home.name)

    @property
    def host(self) -> Toolchain:
        return host.choose(self.memory)

    def choose(self, torch_cuda: str | None = None) -> nvcc.DeviceCompiler:
        return find.choose(nvcc, self.memory, torch_cuda, self.host)

    def recall(self, torch_cuda: str | None = None) -> nvcc.DeviceCompiler | None:
        return find.recall(nvcc, self.memory, torch_cuda, self.host)

    def candidates(self, torch_cuda: str | None = None) -> dict[str, tuple[str, str, str]]:
        """label -> (origin, version, refused)."""
        found = find.candidates(nvcc, self.memory, torch_cuda, self.host)
        return {
            os.path.relpath(each.path, self.root): (each.origin, each.version, each.refused)
            for each in found
        }


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A machine with a host compiler and no toolkit."""
    (tmp_path / "usr").mkdir()
    (tmp_path / "site").mkdir()
    monkeypatch.setattr(
        toolkits, "DIRECTORIES", (str(tmp_path / "usr/cuda"), str(tmp_path / "usr/cuda-*"))
    )
    monkeypatch.setattr(toolkits, "site_directories", lambda: [str(tmp_path / "site")])
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    made = Machine(tmp_path)
    with override(path=(str(made.bin), "/usr/bin", "/bin"), cxx=(str(made.cxx),)):
        if toolkits.find_nvcc():
            pytest.skip("nvcc is in /usr/bin")
        yield made


# The version rule


@pytest.mark.parametrize("version", ["13.0", "13.4"])
def test_a_toolkit_of_torchs_major_is_taken(here: Machine, version: str) -> None:
    made = here.toolkit(version)
    taken = here.choose("13.0")
    assert (taken.family, taken.path, taken.home) == ("nvcc", str(made.nvcc), str(made.home))
    assert taken.version == version


def test_another_minor_is_noted_and_the_same_is_not(here: Machine) -> None:
    here.toolkit("13.4")
    taken = here.choose("13.0")
    note = nvcc.mismatch_note(taken, "13.0")
    assert "CUDA 13.4" in note
    assert "CUDA 13.0" in note
    assert nvcc.mismatch_note(taken, "13.4") == ""
    assert nvcc.mismatch_note(taken, None) == ""


def test_another_major_is_refused_with_the_command_that_fixes_it(here: Machine) -> None:
    here.toolkit("12.9")
    with pytest.raises(CUDAMismatchException) as caught:
        here.choose("13.0")
    assert "torch, which was built with CUDA 13.0" in caught.value.what
    assert "cuda-12.9" in caught.value.why
    assert "pip install 'cuda-toolkit[nvcc,cccl,cudart]==13.0.*'" in caught.value.hint
    assert "DS_SKIP_CUDA_CHECK=1" in caught.value.hint
    assert here.recall("13.0") is None


def test_the_wheels_are_not_named_for_a_cuda_that_has_no_nvcc_there(here: Machine) -> None:
    here.toolkit("13.0")
    with pytest.raises(CUDAMismatchException) as caught:
        here.choose("12.8")
    assert "conda install -c nvidia cuda-toolkit=12.8" in caught.value.hint


def test_the_check_can_be_skipped_and_the_note_says_so(here: Machine) -> None:
    here.toolkit("12.9")
    with override(skip_cuda_check=True):
        taken = here.choose("13.0")
        assert taken.version == "12.9"
        assert "another major version" in nvcc.mismatch_note(taken, "13.0")


def test_without_the_check_the_nearest_major_is_taken(here: Machine) -> None:
    for version in ("11.8", "12.1", "12.9"):
        here.toolkit(version)
    with override(skip_cuda_check=True):
        assert here.choose("13.0").version == "12.9"


def test_the_best_fit_is_taken_and_the_others_say_why_not(here: Machine) -> None:
    for version in ("11.8", "12.9", "13.0", "13.2", "13.4"):
        here.toolkit(version)
    assert here.choose("13.2").version == "13.2"
    found = here.candidates("13.2")
    taken = [label for label, (_, _, refused) in found.items() if not refused]
    assert taken == ["usr/cuda-13.2"]
    assert found["usr/cuda-12.9"][2] == (
        "CUDA 12.9; torch was built with 13.2, another major version"
    )
    assert "is nearer to torch's 13.2" in found["usr/cuda-13.0"][2]
    assert [version for _, version, _ in found.values()] == ["13.4", "13.2", "13.0", "12.9", "11.8"]


@pytest.mark.parametrize(
    ("torch_cuda", "taken"),
    [("13.1", "13.2"), ("13.3", "13.4"), ("13.9", "13.4"), ("13.0", "13.0"), ("11.2", "11.8")],
)
def test_a_newer_minor_is_nearer_than_an_older_one(
    here: Machine, torch_cuda: str, taken: str
) -> None:
    for version in ("11.8", "13.0", "13.2", "13.4"):
        here.toolkit(version)
    assert here.choose(torch_cuda).version == taken


def test_for_a_torch_without_cuda_the_first_toolkit_is_taken(here: Machine) -> None:
    here.toolkit("13.4")
    mine = here.toolkit("12.9", "mine")
    with override(system_cuda_home=str(mine.home)):
        assert here.choose(None).version == "12.9"
        assert here.candidates(None)["usr/cuda-13.4"][2] == f"found after {mine.home}"


def test_a_toolkit_that_does_not_work_is_passed_over_for_the_next(here: Machine) -> None:
    here.toolkit("13.0").write(
        compiling="echo 'ptxas fatal   : Unsupported .version 9.4' >&2; exit 1"
    )
    here.toolkit("13.2")
    assert here.choose("13.0").version == "13.2"
    assert here.candidates("13.0")["usr/cuda-13.0"][2].endswith(
        "ptxas fatal   : Unsupported .version 9.4"
    )


def test_where_none_works_the_error_says_what_each_said(here: Machine) -> None:
    here.toolkit("13.0").write(
        compiling="echo 'ptxas fatal   : Unsupported .version 9.4' >&2; exit 1"
    )
    here.toolkit("13.2").write(status=3)
    with pytest.raises(ToolchainError) as caught:
        here.choose("13.0")
    assert "Unsupported .version 9.4" in caught.value.why
    assert "--version exits with 3" in caught.value.why
    assert "'cuda-toolkit[nvcc,cccl,cudart]==13.0.*'" in caught.value.hint


# Where toolkits are looked for


def test_without_any_toolkit_the_error_says_where_it_was_looked(
    here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(here.root / "gone"))
    assert not nvcc.available()
    with pytest.raises(MissingCUDAException) as caught:
        here.choose("13.0")
    for place in (f"CUDA_HOME: no {here.root}/gone/bin/nvcc", "PATH", "usr/cuda-*", "site/nvidia"):
        assert place in caught.value.why
    assert caught.value.hint == "pip install 'opkiln[cuda]'"
    assert here.recall("13.0") is None


def test_a_named_toolkit_is_refused_and_not_replaced(here: Machine) -> None:
    here.toolkit("13.0")
    old = here.toolkit("12.9", "old")
    with override(cuda_home=str(old.home)):
        with pytest.raises(CUDAMismatchException) as caught:
            here.choose("13.0")
        assert list(here.candidates("13.0")) == ["old"]
    assert caught.value.hint.startswith("unset ")
    with override(cuda_home=str(here.root / "gone")), pytest.raises(MissingCUDAException) as caught:
        here.choose("13.0")
    assert f"{here.root}/gone has no CUDA toolkit" in caught.value.what
    assert here.choose("13.0").version == "13.0"


def test_variables_come_before_path_and_path_before_directories(here: Machine) -> None:
    here.toolkit("13.0")
    homes = {name: here.toolkit("13.0", name) for name in ("home", "path", "on_path")}
    with override(
        system_cuda_home=str(homes["home"].home),
        cuda_path=str(homes["path"].home),
        path=(str(homes["on_path"].home / "bin"), str(here.bin)),
    ):
        found = here.candidates("13.0")
    assert list(found) == ["home", "path", "on_path", "usr/cuda-13.0"]
    assert found["home"][2] == ""
    assert [origin for origin, _, _ in found.values()][2:] == ["PATH", f"{here.root}/usr/cuda-*"]


def test_every_nvcc_on_path_is_a_candidate(here: Machine) -> None:
    one, two = here.toolkit("12.9", "one"), here.toolkit("13.0", "two")
    with override(path=(str(one.home / "bin"), str(two.home / "bin"), str(here.bin))):
        assert here.choose("13.0").home == str(two.home)
        assert list(here.candidates("13.0")) == ["one", "two"]


def test_a_toolkit_that_is_found_twice_is_asked_once(
    here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "_SETTLED_NS", 60_000_000_000)  # nothing is remembered yet
    made = here.toolkit("13.0")
    (here.root / "usr/cuda").symlink_to(made.home)
    (here.bin / "nvcc").symlink_to(made.nvcc)
    with override(system_cuda_home=str(here.root / "usr/cuda")):
        assert here.choose("13.0").path == str(made.nvcc)
        assert list(here.candidates("13.0").values()) == [("call", "13.0", "")]
    assert sum("--version" in line for line in made.asked()) == 2  # by each of two searches


def test_a_script_on_path_leads_to_the_toolkit_that_it_runs(here: Machine) -> None:
    made = here.toolkit("13.0", "hidden")
    program(here.bin / "nvcc", f"exec '{made.nvcc}' \"$@\"")
    taken = here.choose("13.0")
    assert (taken.path, taken.home) == (str(made.nvcc), str(made.home))
    assert here.candidates("13.0") == {"hidden": ("PATH", "13.0", "")}


@pytest.mark.parametrize("torch_cuda", [None, "13.0"])
def test_a_program_of_that_name_that_is_no_nvcc_is_refused(
    here: Machine, torch_cuda: str | None
) -> None:
    program(here.bin / "nvcc", "echo 'shim: not installed' >&2; exit 127")
    with pytest.raises(ToolchainError) as caught:
        here.choose(torch_cuda)
    assert type(caught.value) is ToolchainError  # it says nothing of a version
    assert "--version exits with 127: shim: not installed" in caught.value.why
    assert "pip install " in caught.value.hint


def test_a_script_that_led_nowhere_is_asked_again_when_a_toolkit_is_installed(
    here: Machine,
) -> None:
    target = here.root / "usr/other-13.0"
    program(here.bin / "nvcc", f"exec '{target}/bin/nvcc' \"$@\"")
    at_rest.wait(here.root)
    for _ in range(2):
        with pytest.raises(ToolchainError, match="--version exits with 127"):
            here.choose("13.0")
    here.toolkit("13.0", "usr/other-13.0")
    assert here.choose("13.0").home == str(target)


def test_a_link_that_a_script_goes_through_is_followed_when_it_is_turned(here: Machine) -> None:
    one, two = here.toolkit("13.0", "one"), here.toolkit("13.0", "two")
    current = here.root / "current"
    current.symlink_to(one.home)
    program(here.bin / "nvcc", f"exec '{current}/bin/nvcc' \"$@\"")
    at_rest.wait(here.root)
    chain = here.host
    taken = find.choose(nvcc, here.memory, _torch_cuda(), chain)
    assert taken.home == str(one.home)
    _, read = recalled(nvcc, here.memory, _torch_cuda(), chain)
    assert broken(read) == set()
    current.unlink()
    current.symlink_to(two.home)
    assert broken(read) == {f"{current}/bin"}
    assert find.recall(nvcc, here.memory, _torch_cuda(), chain) is None
    assert find.choose(nvcc, here.memory, _torch_cuda(), chain).home == str(two.home)


def test_an_nvcc_that_cannot_be_started_does_not_hide_the_others(here: Machine) -> None:
    interpreter = here.root / "gone" / "sh"
    (here.bin / "nvcc").write_text(f"#!{interpreter} -e\n")
    (here.bin / "nvcc").chmod(0o755)
    made = here.toolkit("13.0")
    at_rest.wait(here.root)
    chain = here.host
    taken = find.choose(nvcc, here.memory, _torch_cuda(), chain)
    assert taken.home == str(made.home)
    assert "loader that it names does not" in here.candidates("13.0")["bin/nvcc"][2]
    again, read = recalled(nvcc, here.memory, _torch_cuda(), chain)
    assert again == taken
    assert str(interpreter) in read.absent
    # Once it can be started, it is asked again.
    program(interpreter, f"shift 2; exec '{here.toolkit('13.0', 'late').nvcc}' \"$@\"")
    assert find.recall(nvcc, here.memory, None, chain) is None
    assert find.choose(nvcc, here.memory, None, chain).home == str(here.root / "late")


def test_an_nvcc_that_does_not_answer_does_not_hide_the_others(
    here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = program(here.bin / "nvcc", f"echo asked >> '{here.root}/log'; exec sleep 60")
    made = here.toolkit("13.0")
    at_rest.wait(here.root)
    chain, run = here.host, process.run

    def impatient(argv: tuple[str, ...], **how: Any) -> Completed:
        return run(argv, **{**how, "timeout": 0.2 if argv[0] == str(stuck) else how["timeout"]})

    monkeypatch.setattr(process, "run", impatient)
    for _ in range(2):
        assert find.choose(nvcc, here.memory, _torch_cuda(), chain).home == str(made.home)
    assert "did not end within 0.2 s" in here.candidates("13.0")["bin/nvcc"][2]
    assert (here.root / "log").read_text() == "asked\n"  # it is left alone for a while
    taken, read = recalled(nvcc, here.memory, _torch_cuda(), chain)
    assert taken is not None
    assert not read.complete  # that time has passed is nothing that a stat could show
    later = time.time() + 4000
    monkeypatch.setattr(time, "time", lambda: later)
    assert find.recall(nvcc, here.memory, _torch_cuda(), chain) is None


def test_a_toolkit_that_goes_while_it_is_asked_is_passed_over(here: Machine) -> None:
    program(here.bin / "nvcc", 'rm -f "$0"; exit 1')
    made = here.toolkit("13.0")
    assert here.choose("13.0").home == str(made.home)
    made.write(compiling=f"rm '{made.home}/bin/ptxas'")  # read before, or after
    last = here.toolkit("13.2")
    assert here.choose("13.0").home in (str(made.home), str(last.home))


def test_a_toolkit_with_a_part_that_cannot_be_read_is_passed_over(here: Machine) -> None:
    made, next_best = here.toolkit("13.0"), here.toolkit("13.2")
    (made.home / "bin/ptxas").unlink()
    (made.home / "bin/ptxas").mkdir()
    assert here.choose("13.0").home == str(next_best.home)
    assert "cannot be run: [Errno 21]" in here.candidates("13.0")["usr/cuda-13.0"][2]


def test_an_nvcc_that_fails_with_one_host_compiler_is_asked_again_with_another(
    here: Machine,
) -> None:
    here.toolkit("13.0").write(unknown=f"*{here.cxx}' '*")
    other = a_compiler(here.bin / "g++-12")
    at_rest.wait(here.root)
    chain = here.host
    for _ in range(2):
        with pytest.raises(ToolchainError, match="does not say where its toolkit is"):
            find.choose(nvcc, here.memory, "13.0", chain)
    with override(ccbin=str(other)):
        assert find.choose(nvcc, here.memory, "13.0", chain).host == str(other)


@pytest.mark.parametrize("where", ["site/nvidia/cu13", "site/nvidia/cuda_nvcc"])
def test_the_wheels_of_this_interpreter_are_found(here: Machine, where: str) -> None:
    made = here.toolkit("13.0", where)
    (here.root / "site/nvidia/curand/bin").mkdir(parents=True)
    taken = here.choose("13.0")
    assert taken.home == str(made.home)
    assert taken.library_dirs == (str(made.home / "lib"),)  # which is not the one its profile names
    assert here.candidates("13.0")[where][0] == "PyPI"


def test_a_conda_environment_is_looked_at(here: Machine) -> None:
    (here.root / "prefix/conda-meta").mkdir(parents=True)
    here.toolkit("13.0", "prefix")
    assert here.choose("13.0").home == str(here.root / "prefix")
    assert here.candidates("13.0")["prefix"][0] == "conda"


def test_a_toolkit_made_of_links_into_a_cache_is_used_where_it_lies(here: Machine) -> None:
    made = here.toolkit("13.0", "site/nvidia/cu13")
    (here.root / "cache").mkdir()
    made.nvcc.rename(here.root / "cache/nvcc")
    made.nvcc.symlink_to(here.root / "cache/nvcc")
    assert here.choose("13.0").path == str(made.nvcc)


def test_cuda_pathfinder_is_asked_where_nothing_else_is_found(
    here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = here.toolkit("13.0", "site/elsewhere")
    log = here.root / "asked"
    python = program(here.root / "python", f"echo asked >> '{log}'; cat '{here.root}/answer'")
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(MissingCUDAException):
        here.choose("13.0")
    assert not log.exists()  # it is not installed
    (here.root / "site/cuda/pathfinder").mkdir(parents=True)
    (here.root / "answer").write_text("\n")
    at_rest.wait(here.root / "site")
    for _ in range(2):
        with pytest.raises(MissingCUDAException):
            here.choose("13.0")
    assert log.read_text() == "asked\n"  # that there is none is remembered
    (here.root / "answer").write_text(f"{made.nvcc}\n")
    (here.root / "site/something-1.0.dist-info").mkdir()  # until something is installed
    assert here.choose("13.0").home == str(made.home)
    assert here.candidates("13.0")["site/elsewhere"][0] == "cuda-pathfinder"


def test_a_variable_that_names_nothing_is_noted_with_what_is_used(
    here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = here.toolkit("13.0")
    chain = here.host._replace(device=here.choose(None))
    assert choice.note(CUDA, chain) == nvcc.mismatch_note(here.choose(None), _torch_cuda())
    monkeypatch.setenv("CUDA_HOME", str(here.root / "gone"))
    assert choice.note(CUDA, chain).startswith(
        f"CUDA_HOME: there is no {here.root}/gone/bin/nvcc; {made.home} is used"
    )


# What the drop-in for torch.utils.cpp_extension names


class Planned(Exception):
    """The toolkit of a plan that was made and not carried out."""


class DropIn:
    """A torch with CUDA 13.0 whose own search takes the first nvcc on PATH, of CUDA 12.9."""

    def __init__(self, here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        sdk = TorchSDK(str(here.root / "torch"), "2.13.0", "id", "13.0", None, True)
        monkeypatch.setattr(torch_sdk, "find", lambda: sdk)
        monkeypatch.setattr(torch_sdk, "locate", lambda: sdk.path)
        self.old, self.fitting = here.toolkit("12.9", "old"), here.toolkit("13.0")
        self.torchs: Any = ModuleType("torch.utils.cpp_extension")
        self.torchs.CUDA_HOME = str(self.old.home)
        monkeypatch.setitem(sys.modules, self.torchs.__name__, self.torchs)
        monkeypatch.setattr(extension, "serve", self._plan)
        self._source = here.root / "kernel.cu"
        self._source.write_text("")

    def compiles_with(self) -> str:
        """The toolkit of the plan that ``load`` makes for a CUDA source."""
        with pytest.raises(Planned) as caught:
            cpp_extension.load("kernel", [str(self._source)])
        return str(caught.value)

    @staticmethod
    def _plan(spec: OpSpec, asked: str, verbose: bool) -> Any:
        op = Op(spec, asked=asked or "9.0")
        plan = plan_here(Request(op, BUILD))
        (program,) = {step.argv[0] for step in plan.steps if step.kind == "compile"}
        raise Planned(os.path.dirname(os.path.dirname(program)))


@pytest.fixture
def drop_in(here: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[DropIn]:
    made = DropIn(here, monkeypatch)
    with override(path=(str(made.old.home / "bin"), *settings.path)):
        yield made


def test_cuda_home_is_the_toolkit_of_the_plan_and_not_the_first_on_path(drop_in: DropIn) -> None:
    assert drop_in.compiles_with() == str(drop_in.fitting.home)
    assert str(drop_in.fitting.home) == cpp_extension.CUDA_HOME
    assert cpp_extension.include_paths("cuda")[-1] == str(drop_in.fitting.home / "include")


def test_cuda_home_is_the_toolkit_of_the_plan_where_a_variable_names_another(
    drop_in: DropIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(drop_in.old.home))
    assert drop_in.compiles_with() == cpp_extension.CUDA_HOME == str(drop_in.fitting.home)


def test_torchs_own_cuda_home_is_the_toolkit_of_the_plan_under_the_hook(drop_in: DropIn) -> None:
    drop_in.torchs.__class__ = cpp_extension.Module
    assert drop_in.compiles_with() == drop_in.torchs.CUDA_HOME == str(drop_in.fitting.home)


@pytest.mark.parametrize("where", ["torchs", "opkilns", "torchs under the hook"])
def test_an_assigned_cuda_home_is_the_toolkit_of_the_plan(
    drop_in: DropIn, here: Machine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    chosen = str(here.toolkit("13.4", "chosen").home)
    if where == "torchs under the hook":
        drop_in.torchs.__class__ = cpp_extension.Module
    if where == "opkilns":
        monkeypatch.setitem(vars(cpp_extension), "CUDA_HOME", chosen)
    else:
        drop_in.torchs.CUDA_HOME = chosen
        assert chosen == drop_in.torchs.CUDA_HOME
    assert drop_in.compiles_with() == cpp_extension.CUDA_HOME == chosen


def test_an_assigned_cuda_home_that_does_not_fit_is_an_error_and_not_replaced(
    drop_in: DropIn, here: Machine
) -> None:
    for home, what in ((here.toolkit("12.4", "misfit").home, "no CUDA toolkit here fits torch"),
                       (here.root / "gone", f"CUDA_HOME={here.root}/gone has no")):  # fmt: skip
        drop_in.torchs.CUDA_HOME = str(home)
        assert str(home) == cpp_extension.CUDA_HOME
        with pytest.raises(RuntimeError, match=what) as caught:
            drop_in.compiles_with()
        assert "call" not in str(caught.value)
        assert "do not assign torch.utils.cpp_extension.CUDA_HOME" in str(caught.value)


def test_cuda_home_names_what_torch_found_where_no_toolkit_can_be_used(drop_in: DropIn) -> None:
    drop_in.fitting.write(status=3)
    assert cpp_extension.CUDA_HOME is None
    drop_in.torchs.__class__ = cpp_extension.Module
    assert str(drop_in.old.home) == drop_in.torchs.CUDA_HOME, "so that a build says what is wrong"


# What is known of a compiler


def test_a_compiler_is_described_by_what_it_says(here: Machine) -> None:
    made = here.toolkit("13.0")
    made.write(unknown="*compress-mode*|*80a*|*80f*|*90f*")
    taken = here.choose("13.0")
    assert taken.archs == ("8.0", "9.0", "10.0")
    assert taken.accepts == {
        "-std=c++17", "-std=c++20", "--threads", "--objdir-as-tempdir", "90a", "100a", "100f",
    }  # fmt: skip
    assert taken.include_dirs == (str(made.home / "include"),)
    assert taken.host == ""
    (compile_line,) = [line for line in made.asked() if "probe.cu" in line]
    assert "--compress-mode" not in compile_line
    assert f"-ccbin {here.cxx}" in compile_line


def test_the_identity_is_of_the_files_and_not_of_their_place(here: Machine) -> None:
    one, two = here.toolkit("13.0", "a/toolkit"), here.toolkit("13.0", "b/toolkit")
    two.nvcc.write_text(one.nvcc.read_text())

    def identity(made: FakeToolkit) -> str:
        with override(cuda_home=str(made.home)):
            return here.choose("13.0").identity

    assert identity(one) == identity(two)
    for part in (
        "bin/ptxas",
        "nvvm/bin/cicc",
        "lib/libcudart_static.a",
        "include/cuda_runtime_api.h",
    ):
        before = identity(two)
        (two.home / part).write_text("upgraded")
        assert identity(two) != before


def test_what_is_remembered_needs_no_question(here: Machine) -> None:
    made = here.toolkit("13.0")
    program(here.bin / "nvcc", f"exec '{made.nvcc}' \"$@\"")
    at_rest.wait(here.root)
    chain = here.host
    assert find.recall(nvcc, here.memory, "13.0", chain) is None
    taken = find.choose(nvcc, here.memory, "13.0", chain)
    asked = made.asked()
    assert find.recall(nvcc, here.memory, "13.0", chain) == taken
    assert find.choose(nvcc, here.memory, "13.0", chain) == taken
    assert made.asked() == asked
    with override(ccbin=str(a_compiler(here.bin / "g++-12"))):
        assert find.recall(nvcc, here.memory, "13.0", chain) is None

    # An edit, a newcomer and a loss are all noticed.
    (made.home / "bin/ptxas").write_text("another")
    assert find.recall(nvcc, here.memory, "13.0", chain) is None
    assert find.choose(nvcc, here.memory, "13.0", chain).identity != taken.identity
    newcomer = here.toolkit("13.4")
    assert find.recall(nvcc, here.memory, "13.4", chain) is None
    assert find.choose(nvcc, here.memory, "13.4", chain).home == str(newcomer.home)
    made.nvcc.unlink()
    assert find.choose(nvcc, here.memory, "13.0", chain).home == str(newcomer.home)


def test_a_refusal_is_remembered_until_the_missing_part_is_there(here: Machine) -> None:
    made = here.toolkit("13.0")
    header = made.home / "include/cuda_runtime.h"
    made.write(
        compiling=f"test -e '{header}' || {{ echo 'fatal error: no cuda_runtime.h'; exit 1; }}"
    )
    at_rest.wait(here.root)
    for _ in range(2):
        with pytest.raises(ToolchainError, match=r"no cuda_runtime\.h"):
            here.choose("13.0")
    assert sum("probe.cu" in line for line in made.asked()) == 1
    header.write_text("")
    assert here.choose("13.0").home == str(made.home)


def _torch_cuda() -> str | None:
    """That of the torch in use, which evidence speaks of; the toolkits below are of 13.0."""
    sdk = torch_sdk.find()
    if sdk is not None and sdk.cuda is not None and not sdk.cuda.startswith("13."):
        pytest.skip(f"torch's CUDA is {sdk.cuda}")
    return None if sdk is None else sdk.cuda


def test_the_evidence_of_a_choice_ends_with_what_it_rests_on(here: Machine) -> None:
    made, other = here.toolkit("13.0", "mine"), here.toolkit("13.0")
    (here.bin / "nvcc").symlink_to(made.nvcc)
    at_rest.wait(here.root)
    taken = find.choose(nvcc, here.memory, _torch_cuda(), here.host)
    assert taken.home == str(made.home)
    _, read = recalled(nvcc, here.memory, _torch_cuda(), here.host)
    assert broken(read) == set()
    for newcomer, shows in (
        ("usr/cuda/bin/nvcc", "usr/cuda/bin/nvcc"),
        ("usr/cuda-13.9/bin/nvcc", "usr"),  # a directory that is listed
        ("site/nvidia/cu13/bin/nvcc", "site/nvidia"),
    ):
        program(here.root / newcomer, "exit 1")
        assert str(here.root / shows) in broken(read)
    (made.home / "bin/ptxas").write_text("another")
    assert str(made.home / "bin/ptxas") in broken(read)
    (here.bin / "nvcc").unlink()
    (here.bin / "nvcc").symlink_to(other.nvcc)
    assert str(here.bin / "nvcc") in broken(read)


# The host compiler


def test_a_host_compiler_out_of_range_is_named_with_the_range_and_what_works(
    here: Machine,
) -> None:
    here.toolkit("13.0")
    old = a_compiler(here.bin / "g++-14")
    with override(cxx=(str(a_compiler(here.bin / "g++-99")),), path=(str(here.bin), "/usr/bin")):
        with pytest.raises(ToolchainError) as caught:
            here.choose("13.0")
        assert "g++-99" in caught.value.what
        assert "unsupported GNU version! gcc versions later than 15" in caught.value.why
        assert "The nvcc flag" not in caught.value.why
        assert caught.value.hint == f"NVCC_CCBIN={old}"
        with override(ccbin="g++-14"):
            taken = here.choose("13.0")
    assert taken.host == str(old)
    assert taken.identity != here.choose("13.0").identity


def test_a_ccbin_that_is_absent_is_an_error_and_not_replaced(here: Machine) -> None:
    here.toolkit("13.0")
    with override(ccbin="g++-77"), pytest.raises(ToolchainError) as caught:
        here.choose("13.0")
    assert "g++-77" in caught.value.what
    assert "no such program" in caught.value.why


def test_a_ccbin_that_is_absent_is_told_by_the_name_of_its_variable(
    here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.toolkit("13.0")
    monkeypatch.setenv("CUDAHOSTCXX", "g++-77")
    with pytest.raises(ToolchainError) as caught:
        here.choose("13.0")
    assert caught.value.why == "g++-77 (CUDAHOSTCXX): no such program"
    assert caught.value.hint == "unset CUDAHOSTCXX"


@pytest.mark.parametrize("name", ["g++-14", "g++"])  # another compiler, and the toolchain's own
def test_a_ccbin_that_comes_first_on_path_ends_the_evidence(here: Machine, name: str) -> None:
    here.toolkit("13.0")
    a_compiler(here.bin / name)
    earlier = here.root / "earlier"
    at_rest.wait(here.root)
    with override(ccbin=name, path=(str(earlier), str(here.bin), "/usr/bin", "/bin")):
        taken = find.choose(nvcc, here.memory, _torch_cuda(), here.host)
        again, read = recalled(nvcc, here.memory, _torch_cuda(), here.host)
        assert again == taken
        assert read.programs[name] == [str(here.bin / name)]
        newcomer = a_compiler(earlier / name)
        assert find.find_program(name) == str(newcomer) != read.programs[name][0]
        assert find.choose(nvcc, here.memory, _torch_cuda(), here.host).host == str(newcomer)


# The names that DeepSpeed's builders know


@pytest.fixture
def torch_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    def pretend(cuda: str | None) -> None:
        sdk = torch_sdk.TorchSDK("/torch", "2.13.0", "id", cuda, None, True)
        monkeypatch.setattr(torch_sdk, "find", lambda: sdk)

    return pretend


def test_the_installed_version_is_that_of_the_best_fit(
    here: Machine, torch_with: Callable[[str | None], None]
) -> None:
    torch_with("13.2")
    with pytest.raises(MissingCUDAException, match="op fused_adam: no CUDA toolkit"):
        cuda_version.installed_cuda_version("fused_adam")
    here.toolkit("12.9")
    assert cuda_version.installed_cuda_version() == (12, 9)
    with pytest.raises(CUDAMismatchException, match="op fused_adam: ") as caught:
        cuda_version.assert_no_cuda_mismatch("fused_adam")
    assert "==13.2.*" in caught.value.hint
    with override(skip_cuda_check=True):
        assert cuda_version.assert_no_cuda_mismatch("fused_adam") is True
    here.toolkit("13.0")
    assert cuda_version.installed_cuda_version("fused_adam") == (13, 0)
    assert cuda_version.assert_no_cuda_mismatch("fused_adam") is True
    assert cuda_version.get_default_compute_capabilities() == "8.0;9.0;10.0"


def test_a_torch_without_cuda_mismatches_nothing(
    here: Machine, torch_with: Callable[[str | None], None]
) -> None:
    torch_with(None)
    here.toolkit("12.9")
    assert cuda_version.assert_no_cuda_mismatch() is True


def test_every_minor_of_a_major_may_be_mixed() -> None:
    ok = cuda_version.cuda_minor_mismatch_ok
    assert 13 in ok
    assert "13.4" in ok[13]
    assert "13.0" in ok[13]
    assert "12.9" not in ok[13]
    assert "12.9" in ok[12]
    assert 0 not in ok
    with pytest.raises(KeyError):
        ok[-1]


def test_extra_cuda_brings_every_library_that_a_hint_says_it_brings() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    (extra, *_) = tomllib.loads(project.read_text())["project"]["optional-dependencies"]["cuda"]
    parts = extra.partition("[")[2].partition("]")[0].split(",")
    assert {*toolkits.IN_EXTRA, "nvcc", "cccl", "cudart"} == set(parts)


def test_wheel_headers_of_cuda_12_are_in_one_directory_for_each_library(tmp_path: Path) -> None:
    sdk = torch_sdk_at(tmp_path / "site/torch")
    (tmp_path / "toolkit").mkdir()
    for part in ("cuda_runtime", "cublas", "cusparse"):
        (tmp_path / "site/nvidia" / part / "include").mkdir(parents=True)
    marker = tmp_path / "site/nvidia/cuda_runtime/include/cuda_runtime_api.h"
    marker.write_text("#define CUDART_VERSION  12080\n")
    found = toolkits.find_wheels(sdk, [str(tmp_path / "toolkit")], (12, 8))
    assert found.directories == (
        "cuda_runtime/include", "cublas/include", "cusparse/include"
    )  # fmt: skip
    assert toolkits.find_wheels(sdk, [str(tmp_path / "toolkit")], (12, 9)).directories == ()
    for header in toolkits.WHEEL_HEADERS:
        (tmp_path / "toolkit" / header).touch()
    assert toolkits.find_wheels(sdk, [str(tmp_path / "toolkit")], (12, 8)).directories == ()


def torch_sdk_at(path: Path) -> TorchSDK:
    return TorchSDK(path=str(path), version="2.13.0", identity="x", cuda="12.8", hip=None,
                    cxx11_abi=True)  # fmt: skip
