"""The first use of every op and every optimizer of the catalogue in a compiled function."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from compiled_first_use import CASES, OPTIMIZERS
from sample import child, forks, pool

STEPS = [f"{name}.{form}" for name in OPTIMIZERS for form in ("function", "step")]

pytestmark = pytest.mark.slow  # every op is built, if no other test has done so


@pytest.fixture(scope="module")
def found(catalogue: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What fresh processes reported: one op with an empty store, the other ops and the optimizers
    with what other tests may have built."""
    environment = {
        **child.environment(),
        "OPKILN_PROGRESS": "off",
        "OPKILN_STORE_LAYERS": str(pool.LAYER),
    }
    script = Path(__file__).with_name("compiled_first_use.py")
    lines = []
    empty = tmp_path_factory.mktemp("empty")
    others = [case for case in CASES if case != "packbits"]
    for store, cases in ((empty, ["packbits"]), (catalogue, others), (catalogue, STEPS)):
        running = forks.Fork(
            [str(script), "aot_eager", *cases],
            env={**environment, "OPKILN_CACHE_DIR": str(store)},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        done = child.finish(running, timeout=1200)
        assert done.returncode == 0, done.stderr
        lines += done.stdout.splitlines()
    pool.add(empty)
    return {line["case"]: line for line in map(json.loads, lines)}


@pytest.mark.parametrize("case", CASES)
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
