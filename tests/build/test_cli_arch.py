"""``opkiln arch``, with the toolkits that are here."""

from __future__ import annotations

import json
import os
import re
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from opkiln.cli import main
from opkiln.errors import ToolchainError
from opkiln.machine.devices import nvidia
from opkiln.machine.devices.nvidia import NvidiaDevices, NvidiaGPU
from opkiln.machine.toolchain import choice
from opkiln.store.layers import Store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LIST = "7.5;8.0;8.6;9.0a;10.0f+PTX"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A machine without GPUs, or with those of these capabilities."""

    def has(*capabilities: str, cuda: str = "13.0") -> None:
        gpus = tuple(NvidiaGPU(i, f"GPU-{i}", "stand-in", c, 1) for i, c in enumerate(capabilities))
        monkeypatch.setitem(nvidia._known, "/", NvidiaDevices(gpus, "580.65.06", cuda, "nvml"))

    has()
    return has


@pytest.fixture
def nvcc() -> str:
    """The nvcc that opkiln chooses here."""
    try:
        device = choice.choose(Store().memory, "cuda").device
    except ToolchainError as error:
        pytest.skip(error.what)
    assert device is not None
    return device.path


@pytest.fixture
def no_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPKILN_CUDA_HOME", str(tmp_path / "nothing"))


class Arch:
    """Runs ``opkiln arch`` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self._capsys.readouterr()
        code = main._run(["arch", *arguments])
        return (code, *self._capsys.readouterr())

    def json(self, *arguments: str) -> dict[str, Any]:
        _, out, err = self(*arguments, "--json")
        assert out, err
        return json.loads(out)


@pytest.fixture
def arch(capsys: pytest.CaptureFixture[str]) -> Arch:
    return Arch(capsys)


def test_a_list_is_shown_from_what_was_asked_to_the_flags(arch: Arch, nvcc: str) -> None:
    code, out, err = arch("10.0f+ptx", "8.0,", "9.0a;8.0")
    assert (code, err) == (0, "")
    rows = [re.split(r"  +", line, maxsplit=1) for line in out.splitlines()]
    assert rows[0] == ["asked", "10.0f+ptx 8.0, 9.0a;8.0 (LIST)"]
    assert rows[1] == ["read as", "8.0;9.0a;10.0f+PTX"]
    assert re.match(r"nvcc \d+\.\d+ in /.* has .*9\.0;10\.0", rows[2][1])
    assert [row[-1] for row in rows[3:]] == [
        "8.0;9.0a;10.0f+PTX",
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_100f,code=sm_100f",
        "-gencode=arch=compute_100f,code=compute_100f",
    ]


def test_what_the_json_says_is_what_the_toolkit_says_of_itself(arch: Arch, nvcc: str) -> None:
    found = arch.json("9.0a")
    listing = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True)
    numbers = {name.partition("_")[2] for name in listing.stdout.split()}
    assert {each.replace(".", "") for each in found["toolkit"]["archs"]} == numbers
    assert "90a" in found["toolkit"]["variants"]
    assert found["images"] == ["sm_90a"]
    assert found["schema"] == 1


def dry(nvcc: str, directory: Path, *flags: str) -> set[str]:
    """The images that nvcc would put into a fat binary."""
    source = directory / "empty.cu"
    source.touch()
    done = subprocess.run(
        [nvcc, "--dryrun", *flags, "-c", str(source), "-o", str(directory / "empty.o")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    kinds = {"elf": "sm", "ptx": "compute"}
    images = re.findall(r"--image3=kind=(elf|ptx),sm=(\w+)", done.stderr)
    return {f"{kinds[kind]}_{number}" for kind, number in images}


@pytest.mark.parametrize("word", ["all", "all-major"])
def test_all_and_all_major_are_what_nvcc_itself_builds_for_them(
    arch: Arch, nvcc: str, word: str, tmp_path: Path
) -> None:
    own = dry(nvcc, tmp_path, f"-arch={word}")
    assert set(arch.json(word)["images"]) == own
    assert len(own) > 5


def test_the_flags_give_exactly_the_images_that_are_shown(
    arch: Arch, nvcc: str, tmp_path: Path
) -> None:
    found = arch.json(LIST, "12.1f")
    assert not found["refused"]
    assert len(set(found["flags"])) == len(found["flags"]) == 7
    assert dry(nvcc, tmp_path, *found["flags"]) == set(found["images"])


def test_what_the_toolkit_lacks_is_refused_with_the_reason(arch: Arch, nvcc: str) -> None:
    code, out, _ = arch("1.0", "9.0", "99.9")
    oldest, *_, newest = arch.json("9.0")["toolkit"]["archs"]
    assert code == 1
    assert f"refused  1.0: the toolkit has no 1.0; its oldest is {oldest}\n" in out
    assert f"refused  99.9: the toolkit has no 99.9; its newest is {newest}\n" in out
    assert "left     9.0\n" in out


def test_nothing_left_is_said_and_is_a_failure(arch: Arch, nvcc: str) -> None:
    code, out, _ = arch("1.0")
    assert code == 1
    assert "left     nothing" in out
    assert "-gencode" not in out


def test_without_a_list_the_settings_say_it_then_the_gpus_then_the_toolkit(
    arch: Arch, nvcc: str, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = arch.json()
    assert (everything["asked"], everything["origin"]) == ("all", "toolkit")
    assert [a.removesuffix("+PTX") for a in everything["parsed"]] == everything["toolkit"]["archs"]
    machine("9.0", "8.0", "9.0")
    devices = arch.json()
    assert (devices["origin"], devices["archs"]) == ("devices", ["8.0", "9.0"])
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    torchs = arch.json()
    assert (torchs["origin"], torchs["archs"]) == ("TORCH_CUDA_ARCH_LIST", ["9.0+PTX"])
    monkeypatch.setenv("OPKILN_CUDA_ARCH_LIST", "native;8.9")
    own = arch.json()
    assert (own["origin"], own["archs"]) == ("OPKILN_CUDA_ARCH_LIST", ["8.0", "8.9", "9.0"])
    assert arch.json("7.5")["archs"] == ["7.5"]


def test_a_setting_that_means_nothing_is_named(
    arch: Arch, nvcc: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0b")
    code, out, err = arch()
    assert (code, out) == (2, "")
    assert err.startswith("error: TORCH_CUDA_ARCH_LIST: '9.0b' is not a CUDA architecture\n")


def test_a_gpu_newer_than_the_toolkit_gets_its_newest_ptx_and_a_note(
    arch: Arch, nvcc: str, machine: Callable[..., None]
) -> None:
    machine("9.0", "99.0", cuda="99.0")
    found = arch.json()
    newest = found["toolkit"]["archs"][-1]
    assert found["parsed"] == ["9.0", "99.0"]
    assert found["archs"] == ["9.0", f"{newest}+PTX"]
    (note,) = found["notes"]
    assert "99.0" in note
    machine("99.0", cuda="1.0")
    code, _, err = arch("native")
    assert code == 2
    assert "the driver is too old" in err


@pytest.mark.parametrize("text", ["", "99.99", "9.0b", "8", "x" * 10_000, "8.0;nonsense"])
def test_a_list_that_means_nothing_is_one_error(arch: Arch, text: str, no_toolkit: None) -> None:
    code, out, err = arch(text)
    assert (code, out) == (2, "")
    assert err.count("error:") == 1
    assert err.count("hint:") == 1
    assert repr(text.partition(";")[2] or text)[:20] in err


def test_without_a_toolkit_that_is_said_and_the_rest_is_shown(arch: Arch, no_toolkit: None) -> None:
    code, out, _ = arch(LIST)
    assert code == 0
    assert re.search(r"^toolkit  none: .* has no CUDA toolkit$", out, re.MULTILINE)
    assert "-gencode=arch=compute_100f,code=compute_100f" in out
    found = arch.json(LIST)
    assert found["toolkit"] is None
    assert len(found["flags"]) == 6


@pytest.mark.parametrize(
    ("word", "why"), [("all", "there is no toolkit"), ("native", "there are none")]
)
def test_words_that_need_what_is_not_here_say_so(
    arch: Arch, no_toolkit: None, word: str, why: str
) -> None:
    code, _, err = arch(word)
    assert code == 2
    assert f"'{word}'" in err
    assert why in err


OP = """
from opkiln import CUDAOpBuilder

class Filtered(CUDAOpBuilder):
    NAME = "filtered"

    def sources(self):
        return ["kernel.cu"]

    def filter_ccs(self, ccs):
        return [cc for cc in (cc.split(".") for cc in ccs) if int(cc[0]) >= 8 and int(cc[1]) == 0]

class Open(CUDAOpBuilder):
    NAME = "open"

    def sources(self):
        return ["kernel.cu"]
"""


@pytest.fixture
def ops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An op with a filter, as DeepSpeed's builders write theirs, and one without."""
    site = tmp_path / "site"
    metadata = site / "filtering-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "filtering.py").write_text(OP)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: filtering\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[opkiln.ops]\nfiltered = filtering:Filtered\nopen = filtering:Open\n"
    )
    monkeypatch.syspath_prepend(str(site))


def test_what_an_ops_filter_removed_is_shown_with_its_name(
    arch: Arch, ops: None, no_toolkit: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", LIST)
    before = dict(os.environ)
    code, out, _ = arch("--op", "filtered")
    assert code == 0
    assert "filter   Filtered.filter_ccs removed 7.5;8.6\n" in out
    assert "left     8.0;9.0a;10.0f+PTX\n" in out
    found = arch.json("--op", "open")
    assert found["removed"] == []
    assert found["archs"] == LIST.split(";")
    assert dict(os.environ) == before


def test_a_filter_that_leaves_nothing_is_a_failure(arch: Arch, ops: None, no_toolkit: None) -> None:
    code, out, _ = arch("7.5;8.6", "--op", "filtered")
    assert code == 1
    assert "filter   Filtered.filter_ccs removed 7.5;8.6\nt" in out
    assert "left     nothing" in out


def test_an_op_without_a_filter_or_without_device_code_is_told_apart(
    arch: Arch, ops: None, no_toolkit: None
) -> None:
    assert "filter   op open has none\n" in arch("8.0", "--op", "open")[1]
    code, _, err = arch("8.0", "--op", "cpu_adam")
    assert code == 2
    assert "op cpu_adam has no version for 'cuda'" in err


def test_a_gfx_list_is_for_hip_and_what_hipcc_lacks_is_refused(arch: Arch) -> None:
    if not choice.available("rocm"):
        pytest.skip("no hipcc")
    assert "read as  gfx90a:xnack-;gfx9993\n" in arch("gfx9993", "gfx90a:xnack-")[1]
    found = arch.json("gfx90a:xnack-;gfx9993")
    assert (found["backend"], found["archs"]) == ("rocm", ["gfx90a:xnack-"])
    assert found["flags"] == ["--offload-arch=gfx90a:xnack-"]
    (refused,) = found["refused"]
    assert refused["arch"] == "gfx9993"
    assert "the compiler has no gfx9993" in refused["reason"]


def test_a_gfx_list_that_means_nothing_is_one_error(arch: Arch) -> None:
    code, out, err = arch("gfx90a;gfx90a:xnack+")
    assert (code, out) == (2, "")
    assert "exclude each other" in err
