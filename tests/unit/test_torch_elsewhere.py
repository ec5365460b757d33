"""The torch of an isolated build: one that its Python has in sight and cannot import."""

from __future__ import annotations

import sysconfig
from typing import TYPE_CHECKING

import pytest
from sample import child

from opkiln.errors import SettingError
from opkiln.machine.toolchain import torch_sdk
from opkiln.ship import precompile

if TYPE_CHECKING:
    from pathlib import Path

FIND = "from opkiln.machine.toolchain import torch_sdk; print(torch_sdk.find())"


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.99.0'\ncuda = '13.0'\n")
    return tmp_path / "torch"


def test_a_python_without_torch_takes_the_one_that_is_named(elsewhere: Path) -> None:
    assert child.run(FIND).strip() == "None"
    said = child.run(FIND, env={"OPKILN_TORCH_DIR": str(elsewhere)})
    assert "2.99.0" in said
    assert str(elsewhere) in said


def test_a_python_with_torch_takes_its_own(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = torch_sdk.find()
    if own is None:
        pytest.skip("torch is not installed")
    monkeypatch.setenv("OPKILN_TORCH_DIR", str(elsewhere))
    assert torch_sdk.find() == own


def test_a_directory_without_torch_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPKILN_TORCH_DIR", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(__import__("sys").modules, "torch", raising=False)
    with pytest.raises(SettingError, match=r"OPKILN_TORCH_DIR=.*: there is no torch"):
        torch_sdk.locate()


def test_an_isolated_build_finds_the_torch_among_the_packages_of_its_environment(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(__import__("sys").modules, "torch", raising=False)
    monkeypatch.setattr(sysconfig, "get_path", lambda scheme: str(elsewhere.parent))
    assert torch_sdk.locate() is None, "only a build looks there"
    with precompile._use_environments_torch():
        assert torch_sdk.locate() == str(elsewhere)
    assert torch_sdk.locate() is None


IMPORT = """
import sys
from opkiln.ship import precompile
before = list(sys.path)
with precompile._use_environments_torch():
    assert sys.path[:-1] == before  # behind what the build requires
    import torch
    print(torch.__file__)
assert sys.path == before
"""


def test_a_build_without_torch_imports_a_package_that_needs_torch(elsewhere: Path) -> None:
    """A decorated function is declared to torch when its module is imported."""
    (elsewhere / "__init__.py").write_text("")
    said = child.run(IMPORT, env={"OPKILN_TORCH_DIR": str(elsewhere)})
    assert said.strip() == str(elsewhere / "__init__.py")


def test_the_demo_says_that_torch_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from opkiln.cli import demo
    from opkiln.errors import ToolchainError

    monkeypatch.setattr(torch_sdk, "find", lambda: None)
    with pytest.raises(ToolchainError) as caught:
        demo._demo("")
    assert str(caught.value) == (
        "the demo needs torch\n  torch is not installed\nhint: pip install torch"
    )


def test_a_front_end_says_that_torch_is_missing() -> None:
    code = (
        "import opkiln\n"
        "for take in (lambda: opkiln.optim.CPUAdam, lambda: opkiln.nn.inference.rms_norm):\n"
        "    try:\n        take()\n"
        "    except ModuleNotFoundError as error:\n        print(error)\n"
    )
    assert child.run(code).splitlines() == [
        "opkiln.optim.CPUAdam needs torch, which is not installed",
        "hint: pip install torch",
        "opkiln.nn.inference.rms_norm needs torch, which is not installed",
        "hint: pip install torch",
    ]
