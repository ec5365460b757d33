"""A layer becomes a wheel that installers take: tags, RECORD, metadata, always the same bytes."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import shutil
import stat
import time
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
from packaging.metadata import Metadata
from packaging.utils import parse_wheel_filename
from sample import command
from sample.levels import AARCH64, ARM_V8, X86_64
from sample.prebuilt import ARM, FULL, SYSTEM, TORCH, add, linked

from opkiln.base.model import SHARED
from opkiln.errors import StoreError, UsageError
from opkiln.ship.precompile import tag_of
from opkiln.ship.wheel import wheel_name, write_wheel
from opkiln.ship.wheel_check import verify_wheel

NEWER = ("libc.so.6", "newer", "GLIBC_2.34")


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    """Two ops, of which one needs glibc 2.34."""
    path = tmp_path / "layer"
    add(path, "alpha")
    add(path, "beta", linked(*SYSTEM, *TORCH, NEWER), backend="cuda", archs=["9.0a"])
    return path


def wheels(layer: Path, **changes: Any) -> list[Path]:
    asked = {"name": "demo-ops", "version": "1.2.0", **changes}
    out = asked.pop("out", layer.parent / "dist")
    return [Path(path) for path in write_wheel(str(layer), str(out), **asked)]


def wheel(layer: Path, **changes: Any) -> Path:
    (path,) = wheels(layer, **changes)
    return path


def read(path: Path, name: str) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read(name)


def names(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return archive.namelist()


def random_bytes(size: int, seed: str) -> bytes:
    blocks = (hashlib.sha256(f"{seed}{n}".encode()).digest() for n in range(size // 32 + 1))
    return b"".join(blocks)[:size]


def test_a_wheel_holds_the_layer_and_what_installers_need(layer: Path) -> None:
    path = wheel(layer)
    assert path.name == f"demo_ops-1.2.0-py3-none-manylinux_2_34_{X86_64}.whl"
    files = sorted(str(file.relative_to(layer)) for file in layer.rglob("*") if file.is_file())
    info = [f"demo_ops-1.2.0.dist-info/{name}"
            for name in ("METADATA", "sboms/opkiln.cdx.json", "WHEEL", "RECORD")]  # fmt: skip
    assert names(path) == [*(f"{SHARED}/demo_ops/{file}" for file in files), *info]
    for file in files:
        assert read(path, f"{SHARED}/demo_ops/{file}") == (layer / file).read_bytes()
    verify_wheel(str(path))


def test_no_code_is_in_the_directory_that_wheels_share(layer: Path) -> None:
    assert not [name for name in names(wheel(layer)) if name.endswith(".py")]


def test_record_has_the_digest_and_size_of_every_file_but_itself(layer: Path) -> None:
    path = wheel(layer)
    rows = list(csv.reader(read(path, "demo_ops-1.2.0.dist-info/RECORD").decode().splitlines()))
    assert [row[0] for row in rows] == names(path)
    assert rows.pop() == ["demo_ops-1.2.0.dist-info/RECORD", "", ""]
    for name, digest, size in rows:
        data = read(path, name)
        encoded = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        assert (digest, int(size)) == (f"sha256={encoded}", len(data))


def test_the_metadata_is_what_the_standards_want(layer: Path) -> None:
    path = wheel(layer, requires=["opkiln>=0.1", "torch>=2.10; python_version < '4'"])
    metadata = Metadata.from_email(read(path, "demo_ops-1.2.0.dist-info/METADATA"))
    assert metadata.metadata_version == "2.4"
    assert metadata.name == "demo-ops"
    assert str(metadata.version) == "1.2.0"
    assert [str(each) for each in metadata.requires_dist or []] == [
        "opkiln>=0.1", 'torch>=2.10; python_version < "4"',
    ]  # fmt: skip
    assert "alpha, beta" in (metadata.summary or "")
    told = Parser().parsestr(read(path, "demo_ops-1.2.0.dist-info/WHEEL").decode())
    assert told["Wheel-Version"] == "1.0"
    assert told["Root-Is-Purelib"] == "false"
    assert told.get_all("Tag") == [f"py3-none-manylinux_2_34_{X86_64}"]
    name, version, build, tags = parse_wheel_filename(path.name)
    assert (name, str(version), build) == ("demo-ops", "1.2.0", ())
    assert [str(tag) for tag in tags] == told.get_all("Tag")


def test_the_same_layer_gives_the_same_bytes_wherever_and_whenever(
    layer: Path, tmp_path: Path
) -> None:
    first = wheel(layer)
    copied = tmp_path / "elsewhere" / "copied"
    shutil.copytree(layer, copied)
    for file in copied.rglob("*"):
        os.utime(file, (time.time() + 1e6, time.time() + 1e6))
        file.chmod(0o700)
    second = wheel(copied, out=tmp_path / "other")
    assert second.name == first.name
    assert second.read_bytes() == first.read_bytes()


def test_the_command_checks_wheels_and_says_what_is_wrong(layer: Path, tmp_path: Path) -> None:
    path = wheel(layer)
    whole = command.run("cache", "verify", str(path))
    assert (whole.returncode, whole.stdout) == (0, "2 entries checked, 0 damaged\n")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    harmed = tmp_path / "harmed" / path.name
    harmed.parent.mkdir()
    harmed.write_bytes(data)
    files = [str(harmed), str(path)]
    done = command.run("cache", "verify", *files)
    assert done.returncode == 5
    first, last = done.stdout.splitlines()
    assert first.startswith(f"damaged  {harmed}: ")
    assert last == "2 entries checked, 1 damaged"
    refused = command.run("cache", "verify", "--remove", *files)
    assert (refused.returncode, harmed.read_bytes() == data) == (2, True)
    assert command.run("cache", "verify", str(tmp_path)).returncode == 2


def test_times_and_modes_in_the_archive_are_fixed(layer: Path) -> None:
    add(layer, "program", kind="executable")
    path = wheel(layer)
    verify_wheel(str(path))
    with zipfile.ZipFile(path) as archive:
        assert any(name.endswith("/program.so") for name in archive.namelist())
        for each in archive.infolist():
            assert each.date_time == (1980, 1, 1, 0, 0, 0)
            mode = 0o755 if each.filename.endswith("/program.so") else 0o644
            assert each.external_attr >> 16 == stat.S_IFREG | mode


def test_logs_stay_at_home(layer: Path) -> None:
    before = wheel(layer).read_bytes()
    for leaf in layer.glob("v1/ops/*/*/*/*/*"):
        (leaf / "build.log").write_text("g++ in /home/somebody\n")
    assert wheel(layer).read_bytes() == before


def test_ops_for_one_python_are_tagged_for_it(tmp_path: Path) -> None:
    add(tmp_path / "layer", "full", linked(*SYSTEM), abi_tag=FULL)
    name = wheel(tmp_path / "layer").name
    assert name == f"demo_ops-1.2.0-cp311-cp311-manylinux_2_17_{X86_64}.whl"


def test_ops_for_one_python_and_for_all_are_an_error_that_says_which(layer: Path) -> None:
    add(layer, "full", abi_tag=FULL)
    with pytest.raises(UsageError) as raised:
        wheel(layer)
    assert raised.value.why == "cp311-cp311: full\npy3-none: alpha, beta"
    assert list((layer.parent / "dist").iterdir()) == []


def test_package_with_ops_for_one_python_and_for_all_is_tagged_for_the_one(layer: Path) -> None:
    add(layer, "full", abi_tag=FULL)
    assert tag_of(str(layer)) == f"cp311-cp311-manylinux_2_34_{X86_64}"


def test_each_machine_gets_a_wheel_of_its_own(layer: Path) -> None:
    arm = linked(("libc.so.6", "f", "GLIBC_2.28"), machine=ARM)
    add(layer, "alpha", arm, machine=AARCH64, cpu=ARM_V8)
    made = wheels(layer)
    assert [path.name for path in made] == [
        f"demo_ops-1.2.0-py3-none-manylinux_2_28_{AARCH64}.whl",
        f"demo_ops-1.2.0-py3-none-manylinux_2_34_{X86_64}.whl",
    ]
    for path in made:
        verify_wheel(str(path))
        assert sum(name.endswith("/alpha.so") for name in names(path)) == 1


def large(layer: Path, op: str, size: int, **target: Any) -> None:
    """An op whose library does not get smaller."""
    content = random_bytes(size, f"{op}{target}")
    add(layer, op, linked(*SYSTEM, *TORCH, content=content), **target)


@pytest.fixture
def heavy(tmp_path: Path) -> Path:
    """Two CPU ops of 10 kB, and on CUDA, for each of two architectures, one of 10 and of 40 kB."""
    path = tmp_path / "heavy"
    for op in ("alpha", "beta"):
        large(path, op, 10_000)
    for arch in ("8.0", "9.0a+PTX"):
        large(path, "alpha", 10_000, backend="cuda", archs=[arch])
        large(path, "beta", 40_000, backend="cuda", archs=[arch])
    return path


@pytest.mark.parametrize(
    ("max_size", "parts"),
    [
        (1_000_000, [""]),
        (120_000, ["_cpu", "_cuda"]),
        (70_000, ["_cpu", "_cuda_80", "_cuda_90a_ptx"]),
        (48_000, ["_cpu", "_cuda_80_alpha", "_cuda_80_beta", "_cuda_90a_ptx_alpha",
                  "_cuda_90a_ptx_beta"]),
    ],
)  # fmt: skip
def test_wheels_that_would_be_too_large_are_split(
    heavy: Path, max_size: int, parts: list[str]
) -> None:
    made = wheels(heavy, max_size=max_size)
    tag = f"1.2.0-py3-none-manylinux_2_17_{X86_64}"
    assert [path.name for path in made] == [f"demo_ops{part}-{tag}.whl" for part in parts]
    shipped = set()
    for path in made:
        verify_wheel(str(path))
        assert path.stat().st_size <= max_size
        below = f"{SHARED}/{path.name.partition('-')[0]}/"
        inside = {name.removeprefix(below) for name in names(path) if name.startswith(below)}
        assert not inside & shipped
        shipped |= inside
    assert shipped == {str(file.relative_to(heavy)) for file in heavy.rglob("*") if file.is_file()}


def test_one_op_with_several_variants_is_split_by_variant(tmp_path: Path) -> None:
    for features in ([], ["avx512_fp16"]):
        large(tmp_path / "layer", "alpha", 10_000, cpu_features=features)
    made = wheels(tmp_path / "layer", max_size=16_000)
    assert len({path.name for path in made}) == 2
    assert all(path.name.startswith(f"demo_ops_cpu_{X86_64}_v3_alpha_") for path in made)


def test_an_op_that_is_too_large_by_itself_is_an_error_with_its_size(heavy: Path) -> None:
    with pytest.raises(UsageError) as raised:
        wheels(heavy, max_size=30_000)
    assert "op beta for cuda 8.0 makes a wheel of 4" in raised.value.what
    assert "; 30000 are allowed" in raised.value.what
    assert list((heavy.parent / "dist").iterdir()) == []


def test_names_are_normalized_in_files_and_kept_in_the_metadata(layer: Path) -> None:
    path = wheel(layer, name="My.Demo--Ops", version="2.0rc1+cu130.g1")
    assert path.name.startswith("my_demo_ops-2.0rc1+cu130.g1-py3-none-")
    metadata = read(path, "my_demo_ops-2.0rc1+cu130.g1.dist-info/METADATA").decode()
    assert "\nName: My.Demo--Ops\n" in metadata
    assert wheel_name("My.Demo--Ops") == "my_demo_ops"
    verify_wheel(str(path))


@pytest.mark.parametrize(
    "asked",
    [
        {"name": ""}, {"name": "../up"}, {"name": "-x"}, {"name": "a b"}, {"name": "x\ny"},
        {"version": ""}, {"version": "1.0-1"}, {"version": "01"}, {"version": "v1"},
        {"version": "1/2"}, {"version": "1.0+UP"}, {"version": "1\n"},
        {"requires": ["torch\nName: evil"]}, {"requires": [" "]},
    ],
)  # fmt: skip
def test_what_no_wheel_can_be_called_is_a_usage_error(layer: Path, asked: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        wheel(layer, **asked)
    assert not (layer.parent / "dist").exists()


def test_an_empty_layer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="has no ops to ship"):
        wheel(tmp_path / "nothing")


def spoil_payload(leaf: Path) -> None:
    with (leaf / "alpha.so").open("r+b") as file:
        file.write(b"\x7fELG")


def spoil_lists(leaf: Path) -> None:
    (leaf / "inputs.json").write_text("{}")


def misplace(leaf: Path) -> None:
    leaf.rename(leaf.with_name("0" * 40))


def leave_a_file(leaf: Path) -> None:
    (leaf / "more.so").write_bytes(b"")


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (spoil_payload, "alpha.so has the wrong digest"),
        (spoil_lists, "inputs.json"),
        (misplace, "it belongs at demo/alpha/"),
        (leave_a_file, "more.so"),
    ],
)
def test_a_layer_that_is_not_whole_is_not_shipped(layer: Path, harm: Any, said: str) -> None:
    (leaf,) = layer.glob("v1/ops/demo/alpha/*/*/*")
    harm(leaf)
    with pytest.raises(StoreError, match=said):
        wheel(layer)


def test_a_wheel_replaces_one_of_its_name_and_leaves_nothing_else(layer: Path) -> None:
    first = wheel(layer)
    first.write_bytes(b"an older one")
    assert wheel(layer) == first
    verify_wheel(str(first))
    assert list(first.parent.iterdir()) == [first]


def test_where_nothing_can_be_written_it_is_a_store_error(layer: Path) -> None:
    (layer.parent / "dist").write_text("a file")
    with pytest.raises(StoreError, match="no wheel can be written to"):
        wheel(layer)
