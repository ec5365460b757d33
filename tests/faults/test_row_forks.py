"""Row 25: imports and detection leave the device alone, so forks before and after are safe.

A library stands in for the CUDA driver and notes every call; NVML's stand-in knows two GPUs. So
this tells something on machines without a GPU, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from loaders import returning, shim, write
from sample import child
from sample.nvidia import A100, H200, described, nvml, tree

if TYPE_CHECKING:
    from pathlib import Path

    from fault_rows import Cases

pytestmark = pytest.mark.row(25)

IMPORT = """
import opkiln
for name in opkiln.__all__:
    getattr(opkiln, name)
"""
DETECT = """
from opkiln.machine.devices import nvidia
nvidia._known.clear()
found = nvidia.devices((), sys.argv[1])
assert found.how == "nvml" and len(found.gpus) == 2, found
"""
LOAD = """
library = opkiln.load(
    f"op{number}", [sys.argv[2]], is_python_module=False, abi="none",
    extra_cflags=[f"-DNUMBER={number}"]
)
assert library.value() == number
"""
INITIALISE = """
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
assert driver.cuInit() == 0 and driver.cuCtxCreate_v2() == 0
"""
# ``{0}`` in a forked child, whose exit status is the parent's.
FORKED = """
for number in range(int(sys.argv[3])):
    child = os.fork()
    if child == 0:
        try:
{0}
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0
"""


class Machine:
    """Two GPUs, by what NVML's stand-in says, and a driver that notes what it is asked."""

    def __init__(self, base: Path) -> None:
        self.root = tree(base / "root", H200, A100)
        self.log = base / "cuda.log"
        libraries = nvml(base / "lib")
        made = shim("recording_cuda", base)
        (libraries / "libcuda.so.1").symlink_to(made)
        (libraries / "libcuda.so").symlink_to(made)
        self.env: dict[str, str | None] = {
            "LD_LIBRARY_PATH": str(libraries), "STANDIN_GPUS": described(H200, A100),
            "CUDA_LOG": str(self.log), "PYTHONPYCACHEPREFIX": None,
        }  # fmt: skip
        self.source = write(base / "op.cpp", returning("NUMBER"))

    def run(self, code: str, count: int = 1, *, bare: bool = True) -> str:
        code = f"import os, sys\nnumber = 7777\n{code}\n"
        arguments = (str(self.root), str(self.source), str(count))
        return child.run(code, *arguments, env=self.env, bare=bare)

    def calls(self) -> list[list[str]]:
        """What the driver was asked, and by whom."""
        text = self.log.read_text() if self.log.exists() else ""
        return [line.split() for line in text.splitlines()]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("machine"))


@pytest.fixture
def machine(made: Machine) -> Machine:
    made.log.unlink(missing_ok=True)
    return made


def indented(*parts: str) -> str:
    lines = "".join(parts).splitlines()
    return "\n".join(f"            {line}" for line in lines)


LOADED = """
with open("/proc/self/maps") as maps:
    assert "libcuda" not in maps.read()
"""


def test_imports_detection_loads_and_forked_children_do_not_even_open_the_driver(
    machine: Machine, cases: Cases
) -> None:
    count = cases.count(20)
    cases.tried(count)
    children = FORKED.format(indented(DETECT, LOAD, LOADED))
    machine.run(IMPORT + LOADED + LOAD + DETECT + LOADED + children, count)
    assert machine.calls() == []


def test_the_stand_in_notes_who_asks(machine: Machine) -> None:
    machine.run(INITIALISE)
    assert [name for name, _ in machine.calls()] == ["cuInit", "cuCtxCreate_v2"]


def test_importing_everything_with_torch_initialises_no_device(machine: Machine) -> None:
    pytest.importorskip("torch")
    machine.run(
        f"{IMPORT}{DETECT}"
        "opkiln.get_accelerator().device_count()\n"
        "from opkiln.builder.registry import libraries\n"
        "for name, kind in opkiln.ALL_OPS.items():\n"
        "    for _, builder in libraries(name, kind):\n        builder().op()\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n",
        bare=False,
    )
    assert [name for name, _ in machine.calls() if "Ctx" in name] == []


def test_children_forked_after_the_device_was_initialised_leave_it_alone(
    machine: Machine, cases: Cases
) -> None:
    """A context does not survive a fork: any call of the driver in a child would be an error."""
    count = cases.count(20)
    cases.tried(count)
    machine.run(IMPORT + INITIALISE + DETECT + LOAD + FORKED.format(indented(DETECT, LOAD)), count)
    made = machine.calls()
    assert [name for name, _ in made] == ["cuInit", "cuCtxCreate_v2"]
    assert len({pid for _, pid in made}) == 1


@pytest.mark.timed
def test_a_child_forked_while_another_thread_builds_builds_too(
    machine: Machine, cases: Cases
) -> None:
    code = f"""{IMPORT}
import threading
def build():
    number = 1000
    library = opkiln.load(
        "slow", [sys.argv[2]], is_python_module=False, abi="none", extra_cflags=["-DNUMBER=1000"]
    )
    assert library.value() == 1000
thread = threading.Thread(target=build)
thread.start()
{FORKED.format(indented(DETECT, LOAD))}
thread.join()
"""
    count = cases.count(20)
    cases.tried(count)
    machine.run(code, count)
    assert machine.calls() == []


IMPORTING = """
import threading
import opkiln
opkiln.get_builder  # the loader, with what it does after a fork
sys.path.insert(0, os.path.dirname(sys.argv[2]))
begun = threading.Event()
sys.begun = begun
thread = threading.Thread(target=__import__, args=("half_made",))
thread.start()
assert begun.wait(60)
child = os.fork()
if child == 0:
    import half_made
    os._exit(half_made.VALUE)
sys.go_on.set()
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
thread.join()
"""
HALF_MADE = """
import sys, threading
if hasattr(sys, "go_on"):
    VALUE = 7  # in the child: imported again, from its beginning
else:
    sys.go_on = threading.Event()
    sys.begun.set()
    sys.go_on.wait(60)
    VALUE = 8
"""


@pytest.mark.timed
def test_a_child_forked_while_another_thread_imports_can_import_the_same(machine: Machine) -> None:
    """A build imports modules as it needs them, and the lock of a module is not the child's."""
    write(machine.source.parent / "half_made.py", HALF_MADE)
    machine.run(IMPORTING)
