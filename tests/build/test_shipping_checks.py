"""What is asked to be shipped is checked: before anything is compiled where that can be known."""

from __future__ import annotations

import json
import re
import shlex
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sample import child, wanted
from sample.compiler import Compiler
from sample.levels import ARM_V8_2, HIGH, IS_X86, LEVELS, LOW, UNKNOWN_LEVEL
from sample.package import rest, settle
from sample.shipped import announce, described

from opkiln import __version__
from opkiln.errors import SettingError, StoreError
from opkiln.settings import override
from opkiln.ship.precompile import precompile
from opkiln.ship.selection import DeclaredOp
from opkiln.store import layer

if TYPE_CHECKING:
    import subprocess

    from sample.package import Package, Steps

# Flags for a newer CPU than LOW, as a user or an author may add them; and those that HIGH has.
NEWER = ("-march=native", *(("-mavx512f", "-maes") if IS_X86 else ("-mcpu=neoverse-v1",)))
FOR_ONE_CPU = ("-march=haswell", "-mavx512f", "-mfma") if IS_X86 else (f"-march={ARM_V8_2}+sve",)
OF_HIGH = ("-mavx2", "-mfma") if IS_X86 else (f"-march={ARM_V8_2}",)


# Flags that ask more of a CPU than the target says


def export(package: Package, out: Path, *flags: str, **settings: Any) -> list[str]:
    """Build with an author's flags, and put it into a layer."""
    settle(*package.files())
    with override(**settings):
        made = wanted.artifact(package.builder(FLAGS=flags).op())
        return layer.export([made.path], str(out))


@pytest.mark.parametrize("flag", NEWER)
def test_a_library_for_an_older_cpu_with_a_users_flags_for_a_newer_one_is_not_shipped(
    plain: Package, tmp_path: Path, flag: str
) -> None:
    with pytest.raises(StoreError) as refused:
        export(plain, tmp_path / "out", cpu=LOW, cxxflags=("-DNOTHING", flag))
    assert refused.value.what == f"op plain for {LOW} cannot be shipped"
    assert f"it was compiled with {flag}, " in refused.value.why
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flag", FOR_ONE_CPU)
def test_a_library_for_an_older_cpu_with_an_authors_flags_for_a_newer_one_is_not_shipped(
    plain: Package, tmp_path: Path, flag: str
) -> None:
    with pytest.raises(StoreError, match=f"it was compiled with {re.escape(flag)}, "):
        export(plain, tmp_path / "out", flag, cpu=LOW)


@pytest.mark.parametrize("target", [LEVELS[1], LOW, HIGH, "native"])
def test_a_library_with_the_flags_of_its_own_target_is_shipped(
    plain: Package, tmp_path: Path, target: str
) -> None:
    (leaf,) = export(plain, tmp_path / "out", cpu=target)
    assert (Path(leaf) / "plain.so").is_file()


def test_an_authors_flag_that_the_target_has_anyway_is_shipped(
    plain: Package, tmp_path: Path
) -> None:
    assert export(plain, tmp_path / "out", *OF_HIGH, cpu=HIGH)


# The command line

_RUN = "import sys; from opkiln.cli.main import main; sys.argv[0] = 'opkiln'; main()"
ANY = f"cpu:{LOW}"


class CommandLine:
    """`opkiln` in processes of their own, beside a package that provides ``plain``."""

    def __init__(self, package: Package, cache: Path) -> None:
        self.package = package
        self.cache = cache
        self.before = ""  # lines that run first
        announce(package, "plain", "PlainBuilder")
        settle(*package.files())

    def __call__(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        where = [self.package.where]
        code = self.before + _RUN
        done = child.finish(child.start(code, *words, path=where, env=env, bare=False))
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def json(self, *words: str, **env: str) -> Any:
        done = self(*words, "--json", **env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def refused(self, *words: str) -> str:
        """What is said of a command that exits with 2 and has compiled nothing."""
        done = self("build", *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert "building" not in done.stderr
        assert not list(self.cache.rglob("*.o")) + list(self.cache.rglob("*.so"))
        return done.stderr


@pytest.fixture
def opkiln(plain: Package, cache: Path) -> CommandLine:
    return CommandLine(plain, cache)


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (f"cpu:{UNKNOWN_LEVEL}", f"invalid target 'cpu:{UNKNOWN_LEVEL}'"),
        ("cpu:", "it names nothing, or two backends"),
        (f"cpu:{LOW},,{HIGH}", "it names nothing, or two backends"),
        (f"cpu:{HIGH},cuda:9.0", "it names nothing, or two backends"),
        ("cuda:9.0z", "invalid target 'cuda:9.0z'"),
    ],
)
def test_a_target_that_is_none_is_an_error_before_the_others_are_compiled(
    opkiln: CommandLine, target: str, why: str
) -> None:
    said = opkiln.refused("plain", "--target", ANY, "--target", target)
    assert f"--target: invalid target '{target}'" in said
    assert why in said
    assert "hint: " in said


@pytest.mark.parametrize("name", ["opkiln", "OpKiln", "torch", "bad name"])
def test_a_name_that_no_wheel_of_ops_can_have_is_an_error_before_anything_is_compiled(
    opkiln: CommandLine, tmp_path: Path, name: str
) -> None:
    said = opkiln.refused("plain", "--wheel", str(tmp_path / "out"), "--name", name)
    assert repr(name) in said
    assert not (tmp_path / "out").exists()


def test_a_wheel_cannot_be_called_as_the_package_whose_ops_it_has(
    opkiln: CommandLine, tmp_path: Path
) -> None:
    name = opkiln.package.name.replace("_", "-")
    said = opkiln.refused("plain", "--wheel", str(tmp_path / "out"), "--name", name)
    assert f"hint: --name {name}-ops" in said


@pytest.mark.parametrize("form", ["out", "wheel", "bundle"])
def test_to_put_nothing_into_something_is_an_error(
    opkiln: CommandLine, tmp_path: Path, form: str
) -> None:
    record, place = tmp_path / "ops.jsonl", tmp_path / "place"
    record.touch()
    said = opkiln.refused("--recorded", str(record), f"--{form}", str(place))
    assert f"there is nothing to put into {place}" in said
    assert not place.exists()


def test_nothing_to_build_is_no_error_where_nothing_is_to_be_written(
    opkiln: CommandLine, tmp_path: Path, cache: Path
) -> None:
    record = tmp_path / "ops.jsonl"
    record.touch()
    done = opkiln("build", "--recorded", str(record))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (cache / "v1" / "ops").exists()


def test_verify_tells_the_platform_of_each_library(opkiln: CommandLine) -> None:
    found = opkiln.json("build", "plain", "--target", ANY, "--verify")["findings"]
    (note,) = [each for each in found if each["what"].startswith("its platform is ")]
    assert note["op"] == "plain"
    assert note["level"] == "note"
    assert note["what"].startswith("its platform is manylinux_2_")
    assert (
        f"note: plain: {note['what']}"
        in opkiln("build", "plain", "--target", ANY, "--verify").stderr
    )


def test_a_wheel_of_a_packages_ops_has_its_version_and_requires_that_release(
    opkiln: CommandLine, tmp_path: Path
) -> None:
    name = opkiln.package.name
    words = ("build", "plain", "--target", ANY, "--wheel", str(tmp_path))
    (wheel,) = opkiln.json(*words)["written"]
    assert Path(wheel).name.startswith(f"{name}_ops-1.0-")
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        told = archive.read(path).decode().splitlines()
    assert __version__ != "1.0"
    assert "Version: 1.0" in told
    assert sorted(line for line in told if line.startswith("Requires-Dist: ")) == [
        "Requires-Dist: opkiln", f"Requires-Dist: {name}==1.0",
    ]  # fmt: skip


@pytest.mark.timed
def test_a_second_layer_at_the_same_place_has_what_a_new_system_header_made(
    opkiln: CommandLine, tmp_path: Path
) -> None:
    """The system's headers are those on the compiler's own path; none of them is in an entry."""
    system, out = tmp_path / "system", tmp_path / "out"
    system.mkdir()
    header = system / "value.h"
    header.write_text("constexpr int kShared = 100;\n")
    (opkiln.package / "csrc/include/shared.h").write_text("#pragma once\n#include <value.h>\n")
    settle(*opkiln.package.files())
    compiler = Compiler(tmp_path)
    compiler.write(before=f'set -- -isystem {shlex.quote(str(system))} "$@"')
    # The directory comes to rest at once: an edit in place leaves it as it is.
    opkiln.before = "from opkiln.base import digest; digest._SETTLED_NS = 10_000_000\n"
    rest()
    words = ("build", "plain", "--target", ANY, "--out", str(out))
    digests = []
    for value in (100, 200):
        header.write_text(f"constexpr int kShared = {value};\n")
        rest()
        (row,) = opkiln.json(*words, CXX=str(compiler.path))["ops"]
        assert row["status"] == "built"
        digests.append(row["sha256"])
    leaves = [path.parent for path in out.rglob("manifest.json")]
    assert sorted(described(leaf)["sha256"] for leaf in leaves) == sorted(digests)
    assert len(set(digests)) == 2
    for leaf in leaves:
        assert [each for each in described(leaf)["deps"]["own"] if each[0] == "outside"] == []
    again = opkiln.json(*words, CXX=str(compiler.path))["ops"][0]
    assert again["status"] == "cached"
    assert len(list(out.rglob("manifest.json"))) == 2


# Where a package is installed


def test_a_cpu_in_the_targets_of_an_install_that_is_none_is_an_error_and_skips_no_op(
    plain: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: Steps
) -> None:
    monkeypatch.setenv("OPKILN_BUILD_OPS", "1")
    monkeypatch.setenv("OPKILN_BUILD_TARGETS", f"cpu:{UNKNOWN_LEVEL}")
    ops = [DeclaredOp("plain", f"{plain.name}.op:PlainBuilder")]
    with pytest.raises(SettingError) as wrong:
        precompile(plain.name, ops, str(plain.where), str(tmp_path / "out"))
    assert f"OPKILN_BUILD_TARGETS='cpu:{UNKNOWN_LEVEL}'" in wrong.value.what
    assert not steps.seen
    assert not (tmp_path / "out").exists()
