"""A compiler that links a static libstdc++ into what it makes, as wrappers of custom ones do."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

import opkiln
from opkiln.machine.binary import elf
from opkiln.machine.toolchain import host
from opkiln.store.layers import Store

if TYPE_CHECKING:
    from pathlib import Path

_SOURCE = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

void complain(torch::stable::Tensor x) {
  STD_TORCH_CHECK(false, "a message with the number ", x.numel());
}

STABLE_TORCH_LIBRARY_IMPL(static_runtime, CPU, m) { m.impl("complain", TORCH_BOX(&complain)); }
"""


def _asked(directory: Path) -> str:
    """By a flag."""
    return "-static-libstdc++"


def _unasked(directory: Path) -> str:
    """Because its directory has the archive, and a link to a shared one that is not there."""
    found = subprocess.run(
        ["g++", "-print-file-name=libstdc++.a"], capture_output=True, text=True, check=True
    )
    (directory / "libstdc++.a").symlink_to(found.stdout.strip())
    (directory / "libstdc++.so").symlink_to(directory / "nowhere")
    return f"-B{directory}/"


@pytest.fixture(
    params=[pytest.param(_asked, marks=pytest.mark.full), _unasked], ids=["asked", "unasked"]
)
def wrapper(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    program = tmp_path / "g++"
    flag = request.param(tmp_path)
    program.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} "$@" {flag}\n')
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    return program


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.usefixtures("wrapper")
def test_an_op_shares_the_c_plus_plus_runtime_of_its_process() -> None:
    import torch

    library = torch.library.Library("static_runtime", "FRAGMENT")
    if not hasattr(torch.ops.static_runtime, "complain"):
        library.define("complain(Tensor x) -> ()")
    path = opkiln.load_inline("static_runtime", _SOURCE, is_python_module=False, abi="torch-stable")
    assert "libstdc++.so.6" in elf.read(path).needed
    with pytest.raises(RuntimeError, match="a message with the number 3"):
        torch.ops.static_runtime.complain(torch.ones(3))


def test_a_compiler_that_shares_it_anyway_is_left_alone() -> None:
    assert host.choose(Store().memory).shared_runtime == ""
