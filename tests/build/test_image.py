"""A container image in two stages: compilers fill a store in the first, the second has none.

What runs there is a user that no passwd file knows, without a home, who may write nowhere; the
store is root's and can only be read.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click
import pytest
from sample import child
from sample.doctor import can_mount
from sample.shipped import build
from sample.tracing import NETWORK, calls, strace

import opkiln
from opkiln.builder.registry import ALL_OPS
from opkiln.machine.toolchain import torch_sdk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sample.tracing import Call

SOURCE = Path(opkiln.__file__).parent.parent
STRANGER = 12345  # a uid without a passwd entry
OPS = ("cpu_adam",)

# What the image runs: every op natively, and one of them for its work.
PROGRAM = """
import os, pwd, sys
try:
    pwd.getpwuid(os.getuid())
except KeyError:
    print("nobody knows uid", os.getuid())
import torch, opkiln
from opkiln.loading import loader
def mark(name):
    try:
        open(name)
    except FileNotFoundError:
        pass
mark("/mark-begin")
for op in sys.argv[1:]:
    opkiln.get_builder(op, backend="cpu").jit_load()
mark("/mark-end")
weight = torch.nn.Parameter(torch.ones(8))
optimizer = opkiln.optim.CPUAdam([weight], lr=0.1)
weight.grad = torch.ones(8)
optimizer.step()
print("weight", round(weight[0].item(), 4))
for (_, op, _), (loaded, _) in loader.loaded_here().items():
    print(op, loaded.artifact.path, loaded.artifact.compiled)
"""

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


class Image(NamedTuple):
    """What the second stage has: a store, a layer and a bundle; all root's, none writable."""

    base: Path
    python: str
    packages: str

    @property
    def store(self) -> Path:
        return self.base / "store"

    @property
    def layer(self) -> Path:
        return self.base / "layer"

    @property
    def bundle(self) -> Path:
        return self.base / "ops.bundle"

    def run(self, *ops: str, prefix: list[str] | None = None, **environment: str) -> str:
        """Run the program as the stranger; the environment is these variables and no others."""
        done = subprocess.run(
            [*(prefix or []), self.python, "-c", PROGRAM, *ops],
            env={
                "PATH": "/nonexistent",
                "PYTHONPATH": f"{self.base}/src:{self.packages}",
                "PYTHONDONTWRITEBYTECODE": "1",
                **environment,
            },
            cwd="/", user=STRANGER, group=STRANGER, extra_groups=[],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"nobody knows uid {STRANGER}" in done.stdout
        assert "weight 0.9" in done.stdout
        return str(done.stdout)


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    yield from make_image(*OPS)


def make_image(*ops: str) -> Iterator[Image]:
    python = child.python_for(STRANGER)
    torch = torch_sdk.locate()
    if python is None or torch is None:
        pytest.skip("no interpreter that another user can start, or no torch")
    packages = os.path.dirname(torch)
    probe = subprocess.run(
        [python, "-c", "import torch"], env={"PYTHONPATH": packages, "PATH": "/nonexistent"},
        cwd="/", user=STRANGER, group=STRANGER, extra_groups=[], capture_output=True, check=False,
    )  # fmt: skip
    if probe.returncode != 0:
        pytest.skip("another user cannot import this torch")
    # Not below pytest's own directory, which other users may not enter.
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        made = Image(base, python, packages)
        build(made.store, *ops, "--out", str(made.layer), "--bundle", str(made.bundle))
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(SOURCE / "opkiln", base / "src" / "opkiln", ignore=ignored)
        for path in (base, *base.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield made


def state(image: Image) -> list[tuple[str, int, float]]:
    found = [path for path in image.base.rglob("*") if "/src/" not in str(path)]
    return sorted((str(path), path.stat().st_size, path.stat().st_mtime) for path in found)


def ways(image: Image) -> dict[str, dict[str, str]]:
    return {
        "store": {"OPKILN_CACHE_DIR": str(image.store)},
        "layer": {"OPKILN_STORE_LAYERS": str(image.layer)},
        "store as a layer": {"OPKILN_STORE_LAYERS": str(image.store)},
        "bundle": {"OPKILN_STORE_LAYERS": str(image.bundle)},
    }


@as_root
@pytest.mark.parametrize(
    "way",
    [
        "store",
        "bundle",
        *(pytest.param(way, marks=pytest.mark.full) for way in ("layer", "store as a layer")),
    ],
)
def test_everything_loads_nothing_is_written_and_no_socket_is_opened(
    way: str, image: Image
) -> None:
    before = state(image)
    with tempfile.TemporaryDirectory() as logs:
        os.chown(logs, STRANGER, STRANGER)
        log = Path(logs) / "strace.log"
        prefix = strace(log, NETWORK)
        prefix = [shutil.which("strace") or "strace", *prefix[1:]]
        out = image.run(*OPS, prefix=prefix, **ways(image)[way])
        made = calls(log)
    for op in OPS:
        (line,) = (line for line in out.splitlines() if line.startswith(op))
        _, path, compiled = line.split()
        assert path.startswith("/proc/" if way == "bundle" else str(image.base))
        assert compiled == "0"
    begun, ended = (at for at, call in enumerate(made) if call.path.startswith("/mark-"))
    loading = made[begun:ended]
    assert any(OPS[0] in call.arguments for call in loading)  # it saw the load at all
    assert [call for call in loading if changes_a_file(call)] == []
    sockets = [call for call in made if call.name in NETWORK.split(",")]
    assert [call for call in sockets if call in loading] == []
    # glibc asks its name service, on this machine, who the user is.
    assert [call for call in sockets if "AF_UNIX" not in call.arguments] == []
    assert len([call for call in made if call.name == "execve" and not call.failed]) == 1
    # Importing torch is not ours; but it, too, leaves the image as it is.
    assert state(image) == before


def changes_a_file(call: Call) -> bool:
    return call.writes and not call.path.startswith(("pipe:", "/dev/null", "/memfd:"))


@as_root
@pytest.mark.full
@pytest.mark.slow
def test_every_op_loads_in_an_image_of_all_of_them() -> None:
    ops = [name for name, builder in ALL_OPS.items() if "cpu" in builder.BACKENDS]
    for image in make_image("--all", "--target", "cpu:native"):
        for way in ways(image).values():
            out = image.run(*ops, **way)
            assert {line.split()[0] for line in out.splitlines()} >= set(ops)


@as_root
def test_without_the_store_the_image_says_why_and_serves_the_reference(image: Image) -> None:
    """What the tests above rest on: there is no compiler that could have helped."""
    code = (
        "import warnings, opkiln\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    opkiln.get_builder('cpu_adam').load()\n"
        "print(*(each.message for each in caught))\n"
    )
    done = subprocess.run(
        [image.python, "-c", code],
        env={"PATH": "/nonexistent", "PYTHONPATH": f"{image.base}/src:{image.packages}"},
        cwd="/", user=STRANGER, group=STRANGER, extra_groups=[],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "no C++ compiler can be used here" in done.stdout


@as_root
def test_a_shared_layer_serves_beside_a_private_store(image: Image) -> None:
    """A cluster: the group's layer on a shared file system, each user's own store beside it."""
    with tempfile.TemporaryDirectory() as home:
        os.chown(home, STRANGER, STRANGER)
        out = image.run(*OPS, OPKILN_STORE_LAYERS=str(image.layer), OPKILN_CACHE_DIR=home)
        assert str(image.layer) in out
        assert os.listdir(home) == []


# docs/deploying.md

# A root that can only be read, also below /tmp, and then what the manifest mounts.
_READ_ONLY = """
mount -o remount,ro,bind /
for place in /tmp /var/tmp; do mount -t tmpfs -o ro tmpfs $place; done
for place in $MOUNTED; do mount -t tmpfs -o mode=1777 tmpfs $place; done
cd /
exec "$@"
"""


@as_root
@pytest.mark.full
def test_the_kubernetes_manifest_mounts_what_torchs_optimizers_write_to(tmp_path: Path) -> None:
    if not can_mount(tmp_path):
        pytest.skip("this user may not mount a file system")
    import torch

    for needed in (sys.executable, torch.__file__):
        if needed.startswith(("/tmp/", "/var/tmp/")):
            pytest.skip(f"{needed} would be hidden by the mount")
    (manifest,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert "readOnlyRootFilesystem: true" in manifest
    code = "import torch; torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))]); print('made')"

    def optimizer(mounted: list[str]) -> subprocess.CompletedProcess[str]:
        argv = ["unshare", "--mount", "sh", "-ec", _READ_ONLY, "sh", sys.executable, "-c", code]
        env = {"PATH": os.environ["PATH"], "MOUNTED": " ".join(mounted)}
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)

    done = optimizer(re.findall(r"mountPath: ([^\s},]+)", manifest))
    assert done.stdout == "made\n", done.stderr
    assert "No usable temporary directory found" in optimizer([]).stderr, "what it is for"


PAGE = Path(__file__).resolve().parents[2] / "docs" / "deploying.md"
_BLOCK = re.compile(r"```(?:sh|dockerfile)\n(.*?)```", re.DOTALL)
_CONTAINED = re.compile(r"`(opkiln [^`…]+)`")


def commands() -> list[str]:
    text = PAGE.read_text()
    lines = [line for block in _BLOCK.findall(text) for line in block.splitlines()]
    found = [line[line.index("opkiln ") :] for line in lines if re.search(r"(^|RUN )opkiln ", line)]
    return [*found, *_CONTAINED.findall(text)]


@pytest.mark.parametrize("line", commands())
def test_every_command_on_the_page_about_deploying_is_one(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name, options and arguments are parsed as the command line parses them."""
    from opkiln.cli.main import cli

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    name, *arguments = shlex.split(line)[1:]
    command = cli.get_command(cli.make_context("opkiln", [name]), name)
    assert command is not None, line
    while isinstance(command, click.Group):
        name, *arguments = arguments
        found = command.commands.get(name)
        assert found is not None, line
        command = found
    command.make_context(name, arguments, help_option_names=["-h", "--help"])


def test_the_page_has_commands_to_try() -> None:
    assert len(commands()) >= 10
