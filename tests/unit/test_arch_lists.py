"""Arch lists in the files of a project: ``opkiln arch --files``, and the hook for pre-commit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from sample.levels import UNKNOWN_LEVEL, X86_V3

from opkiln.cli import main
from opkiln.errors import UsageError
from opkiln.ship import arch_lists, scaffold

ROOT = Path(__file__).resolve().parents[2]

PYPROJECT = f"""
[project]
name = "demo"

[tool.cibuildwheel]
environment = "TORCH_CUDA_ARCH_LIST='8.0 9.0x' OTHER=9.0x"

[tool.cibuildwheel.linux.environment]
OPKILN_CUDA_ARCH_LIST = "8.0;9.0a;10.0f+PTX"
OPKILN_BUILD_TARGETS = "cuda:8.0,9.0a;cpu:{UNKNOWN_LEVEL}"
PYTORCH_ROCM_ARCH = "gfx90a;gfxx"
"""
MATRIX = f"""
ops = ["norm"]
targets = [
    "cpu:{X86_V3}",
    "cuda:9.0a",
    "cuda:90",
    "tpu:v5",
]
"""
ENV = f"""
# TORCH_CUDA_ARCH_LIST=wrong, but a comment
export TORCH_CUDA_ARCH_LIST="Hopper;native;all-major"
TORCH_CUDA_ARCH_LIST=8.0;8.6+PTX   # two
TORCH_CUDA_ARCH_LIST=$LIST
MY_TORCH_CUDA_ARCH_LIST=wrong
OPKILN_CPU={X86_V3}+avx512f
OPKILN_CPU=pentium
"""
WORKFLOW = """
env:
  TORCH_CUDA_ARCH_LIST: 8.0;9.0
jobs:
  one:
    env:
      "TORCH_CUDA_ARCH_LIST": ${{ matrix.archs }}
      OPKILN_CUDA_ARCH_LIST: '8.0;compute_90'
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = {"pyproject.toml": PYPROJECT, "matrix.toml": MATRIX, ".env": ENV, "ci.yml": WORKFLOW}
    for name, text in files.items():
        (tmp_path / name).write_text(text)


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("pyproject.toml", [(6, "TORCH_CUDA_ARCH_LIST", "'9.0x'"),
                            (10, "OPKILN_BUILD_TARGETS", f"'{UNKNOWN_LEVEL}'"),
                            (11, "PYTORCH_ROCM_ARCH", "'gfxx'")]),
        ("matrix.toml", [(6, "targets", "'90'"), (7, "targets", "'tpu'")]),
        (".env", [(8, "OPKILN_CPU", "'pentium'")]),
        ("ci.yml", [(8, "OPKILN_CUDA_ARCH_LIST", "'compute_90'")]),
    ],
)  # fmt: skip
def test_lists_that_mean_nothing_are_found_with_their_lines(
    write: None, file: str, expected: list[tuple[int, str, str]]
) -> None:
    found = arch_lists.check(file)
    assert [(each.line, each.name) for each in found] == [each[:2] for each in expected]
    for each, (_, _, quoted) in zip(found, expected, strict=True):
        assert quoted in each.what
        assert each.file == file


def test_the_command_prints_file_and_line_and_exits_with_1(
    write: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main._run(["arch", "--files", "matrix.toml", ".env"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("  ")]
    assert [line.partition(": ")[0] for line in lines] == [
        "matrix.toml:6", "matrix.toml:7", ".env:8",
    ]  # fmt: skip
    Path("matrix.toml").write_text('targets = ["cuda:native", "rocm:gfx90a"]\n')
    assert main._run(["arch", "--files", "matrix.toml"]) == 0
    assert capsys.readouterr().out == ""


def test_a_file_that_is_not_toml_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "matrix.toml").write_text("ops = []\ntargets = [\n  what\n]\n")
    (found,) = arch_lists.check(str(tmp_path / "matrix.toml"))
    assert (found.line, found.name) == (3, "TOML")


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        arch_lists.check(str(tmp_path / "none.toml"))


def test_the_hook_runs_the_command_on_the_files_that_have_lists(tmp_path: Path) -> None:
    """The hook for others' repositories, and the one that ``opkiln new`` writes, are the same."""
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert hook["id"] == "opkiln-arch-lists"
    assert hook["entry"] == "opkiln arch --files"
    scaffold.write("demo_ops", str(tmp_path))
    written = yaml.safe_load((tmp_path / "demo_ops" / ".pre-commit-config.yaml").read_text())
    (local,) = written["repos"][0]["hooks"]
    same = ("id", "name", "entry", "language", "types", "files")
    assert [local[each] for each in same] == [hook[each] for each in same]
    matches = re.compile(hook["files"]).search
    for name in ("pyproject.toml", "sub/pyproject.toml", "matrix.toml", ".env", "ci/gpu.env",
                 ".env.local", ".gitlab-ci.yml", ".github/workflows/test.yml"):  # fmt: skip
        assert matches(name), name
    for name in ("poetry.toml", "environment.yml", "docs/pyproject.toml.md", "my.envelope"):
        assert not matches(name), name
