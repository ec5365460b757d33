"""The first use of every op and every optimizer of the catalogue in a compiled function."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from compiled_first_use import CASES, HYPER, OPTIMIZERS
from sample import child, forks, pool

# Of the optimizers and their ops one of each kind is in every run.
FEW = ("CPUAdam", "FusedLamb", "cpu_adam", "fused_lamb")
OPS = [
    pytest.param(name, marks=pytest.mark.full if name in HYPER and name not in FEW else ())
    for name in CASES
]
STEPS = [
    pytest.param(f"{name}.{form}", marks=() if name in FEW else pytest.mark.full)
    for form in ("function", "step")
    for name in OPTIMIZERS
]

pytestmark = pytest.mark.slow  # every op is built, if no other test has done so


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, catalogue: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What a fresh process reported: one op with an empty store, the other ops and the optimizers
    with what other tests may have built."""
    cases = [each.callspec.params["case"] for each in request.session.items
             if each.path == request.path]  # fmt: skip
    empty = tmp_path_factory.mktemp("empty")
    running = forks.Fork(
        [str(Path(__file__).with_name("compiled_first_use.py")), "aot_eager", str(empty), *cases],
        env={**child.environment(), "OPKILN_PROGRESS": "off", "OPKILN_CACHE_DIR": str(catalogue),
             "OPKILN_STORE_LAYERS": str(pool.LAYER)},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    done = child.finish(running, timeout=1200)
    assert done.returncode == 0, done.stderr
    pool.add(empty)
    assert any(empty.iterdir()) == ("packbits" in cases), "it was compiled"
    return {line["case"]: line for line in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("case", OPS)
def test_op_used_first_in_a_compiled_function_is_in_its_graph_and_compiles_once(
    case: str, found: dict[str, dict[str, Any]]
) -> None:
    answer = found[case]
    assert "error" not in answer, answer["error"]
    assert answer["right"], "compiled and not compiled differ"
    assert (answer["first"], answer["last"]) == (1, 1), "a later call compiled anew"
    assert any(call.startswith("opkiln.") for call in answer["calls"]), answer["calls"]


@pytest.mark.parametrize("case", STEPS)
def test_optimizer_step_made_first_in_a_compiled_function_compiles_once(
    case: str, found: dict[str, dict[str, Any]]
) -> None:
    answer = found[case]
    assert "error" not in answer, answer["error"]
    assert answer["right"], "compiled and not compiled differ"
    assert (answer["first"], answer["last"]) == (1, 1), "a later step compiled anew"
    assert "opkiln.step_" in answer["calls"]
