"""fp_quantizer's device code, compiled for GPUs that need not be there, and its CPU code for each
instruction set. In full runs: compilers take a minute for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from instruction_sets import LEVELS, skip_unless_runnable
from sample import child, wanted

from opkiln import get_builder
from opkiln.binary import fatbin
from opkiln.errors import ToolchainError
from opkiln.toolchain import hipcc

pytestmark = [pytest.mark.full, pytest.mark.slow]

_CHECK = """
import sys
sys.path[:0] = sys.argv[1:]
import fp_quantizer_oracle as oracle
import test_fp_quantizer as checks

ops = checks.native()
for form in oracle.FORMS.values():
    for dtype in oracle.DTYPES:
        checks.test_codes_are_those_of_the_nearest_numbers(ops, form, dtype, whole_grid=True)
        checks.test_stochastic_codes_are_the_references_bit_for_bit(ops, form, dtype)
        checks.test_every_code_comes_back_as_its_number_times_the_scale(ops, form, dtype)
"""


def test_it_builds_for_an_amd_gpu() -> None:
    if not hipcc.available():
        pytest.skip("no hipcc is installed: apt-get install hipcc")
    op = get_builder("fp_quantizer", backend="rocm", archs="gfx90a").op()
    assert fatbin.hip_images(wanted.artifact(op).path) == ("gfx90a",)


def test_it_builds_for_nvidia_gpus_with_and_without_instructions_for_fp8() -> None:
    op = get_builder("fp_quantizer", backend="cuda", archs="8.0;9.0a").op()
    try:
        built = wanted.artifact(op)
    except ToolchainError as error:
        pytest.skip(f"no nvcc here: {error.what}")
    assert Path(built.path).stat().st_size > 0


@pytest.mark.parametrize("level", LEVELS)
def test_a_build_for_another_level_agrees(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_unless_runnable(level)
    monkeypatch.setenv("OPKILN_CPU", level)
    here = Path(__file__).parent
    child.run(_CHECK, str(here), str(here.parent), bare=False)
