"""cpu_adam, built for each instruction set, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from instruction_sets import LEVELS, skip_unless_runnable

# What test_cpu_adam.py asks of the build for this machine, conversions bit for bit included.
_CHECK = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
import adam_oracle as oracle
import test_cpu_adam as checks
import opkiln

ops = opkiln.get_builder("cpu_adam").jit_load()
(library,) = (path for path in torch.ops.loaded_libraries if "cpu_adam" in path)
assert sys.argv[2].encode() in open(library, "rb").read(), "not built for this instruction set"
for param in oracle.DTYPES:
    for grad in oracle.DTYPES:
        for state in {param, oracle.F32}:
            oracle.assert_step(ops, oracle.lists(oracle.SIZES, param, grad, state))
        checks.test_copies_are_what_the_params_convert_to(ops, param, grad)
for adamw_mode in (True, False):
    checks.test_fp32_stays_within_1e_6_of_float64_after_100_steps(ops, adamw_mode)
    checks.test_rollback_gives_back_what_was_there(ops, oracle.F32, oracle.F32, adamw_mode)
checks.test_nan_and_infinity_travel_as_in_torch(ops, oracle.F32)
checks.test_views_at_odd_addresses_are_stepped_and_their_neighbours_are_not(ops)
"""


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_a_build_for_another_level_agrees(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_unless_runnable(level)
    monkeypatch.setenv("OPKILN_CPU", level)
    here = str(Path(__file__).parent)
    # As in a mangled name: opkiln::avx2::...
    name = LEVELS[level][0]
    run = subprocess.run(
        [sys.executable, "-c", _CHECK, here, f"6opkiln{len(name)}{name}"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
