"""The host optimizers' ops, built for each instruction set, which has a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from instruction_sets import LEVELS, not_native, skip_unless_runnable
from sample import child
from sample.catalogue import LEVELS_OF

_LOAD = """
import sys
sys.path[:0] = sys.argv[1], sys.argv[1].rpartition("/")[0]
import torch
import adam_oracle as oracle
import opkiln

def load(op):
    ops = opkiln.get_builder(op).jit_load()
    (library,) = (path for path in torch.ops.loaded_libraries if op in path)
    assert sys.argv[2].encode() in open(library, "rb").read(), "not built for this instruction set"
    return ops
"""

# What the other tests ask of the build for this machine, conversions bit for bit included.
_ADAM = """
import test_cpu_adam as checks

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
_OTHERS = """
import host_oracle
import test_cpu_lion_and_adagrad as checks

case = host_oracle.CASES[op]
for param, state in checks.STATES:
    for grad in oracle.DTYPES:
        tensors = host_oracle.lists(case, oracle.SIZES, param, grad, state)
        host_oracle.assert_step(case, ops, tensors)
        if state == oracle.F32:
            checks.test_copies_follow_the_step_and_the_rollback(case, ops, None, param, grad)
checks.test_fp32_stays_within_1e_6_of_float64_after_100_steps(case, ops)
checks.test_rollback_gives_back_what_was_there(case, ops, oracle.F32, oracle.F32)
checks.test_nan_and_infinity_travel_as_in_torch(case, ops, oracle.F32)
checks.test_views_at_odd_addresses_are_stepped_and_their_neighbours_are_not(case, ops)
"""
_ROWS = """
import test_cpu_adagrad_sparse as sparse

for width in (1, 7, 64):
    sparse.assert_rows(ops, sparse.rows(50, width, [3, 17, 49]))
"""
_CHECKS = {"cpu_adam": _ADAM, "cpu_adagrad": _OTHERS + _ROWS, "cpu_lion": _OTHERS}


@pytest.mark.slow
@pytest.mark.parametrize("level", not_native())
@pytest.mark.parametrize(
    "op",
    [pytest.param(op, marks=() if op in LEVELS_OF else pytest.mark.full) for op in _CHECKS],
)
def test_a_build_for_another_level_agrees(
    op: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_unless_runnable(level)
    monkeypatch.setenv("OPKILN_CPU", level)
    # As in a mangled name: opkiln::avx2::...
    name = LEVELS[level][0]
    here = str(Path(__file__).parent)
    code = f"{_LOAD}\nop = {op!r}\nops = load(op)\n{_CHECKS[op]}"
    child.run(code, here, f"6opkiln{len(name)}{name}", bare=False)
