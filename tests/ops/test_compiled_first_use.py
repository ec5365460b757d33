"""The first use of every op and every optimizer of the catalogue in a compiled function."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from compiled_first_use import CASES, OPTIMIZERS
from sample import child

STEPS = [f"{name}.{form}" for name in OPTIMIZERS for form in ("function", "step")]

pytestmark = pytest.mark.slow  # every op is built, if no other test has done so


@pytest.fixture(scope="module")
def found(catalogue: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What fresh processes reported: one op with an empty store, the other ops and the optimizers
    with what other tests may have built."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment |= {
        "PYTHONPATH": str(child.SOURCE),
        "OPKILN_PROGRESS": "off",
    }
    script = Path(__file__).with_name("compiled_first_use.py")
    lines = []
    empty = tmp_path_factory.mktemp("empty")
    others = [case for case in CASES if case != "packbits"]
    for store, cases in ((empty, ["packbits"]), (catalogue, others), (catalogue, STEPS)):
        done = subprocess.run(
            [sys.executable, str(script), "aot_eager", *cases],
            env={**environment, "OPKILN_CACHE_DIR": str(store)},
            capture_output=True, text=True, check=False, timeout=1200,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        lines += done.stdout.splitlines()
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
