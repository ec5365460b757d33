"""``opkiln.comm``: collectives of the ranks of one host through shared memory.

shm_ranks.py runs each case on ranks of its own, and shm_kills.py kills ranks.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import shm_ranks
import torch
import torch.distributed as dist
from sample import child, forks
from torch import Tensor

import opkiln
from opkiln.comm import ShmGroup
from opkiln.errors import ArgumentError, ClusterError
from opkiln.ops.shm_comm import functions

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
# What 1 and 3 ranks do, on other numbers of them.
OTHERS = ("_4", "reference_2")
CASES = [
    pytest.param(case, marks=pytest.mark.full if case.endswith(OTHERS) else ())
    for case in shm_ranks.CASES
]
pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")


def program(catalogue: Path, name: str, *args: object) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(Path(opkiln.__file__).parents[1]), *sys.path])
    variables = {**os.environ, "PYTHONPATH": paths, "OPKILN_CACHE_DIR": str(catalogue)}
    running = forks.Fork(
        [str(HERE / name), *map(str, args)], env=variables, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    return child.finish(running, timeout=1800)


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, catalogue: Path
) -> dict[str, Any]:
    asked = [each.callspec.params["case"] for each in request.session.items
             if getattr(each, "originalname", "") == test_several_ranks.__name__]  # fmt: skip
    done = program(catalogue, "shm_ranks.py", tmp_path_factory.mktemp("ranks"), *asked)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {each["case"]: each["wrong"] for each in found}


@pytest.mark.parametrize("case", CASES)
def test_several_ranks(outcomes: dict[str, Any], case: str) -> None:
    assert outcomes[case] == ""


def files_in_memory() -> list[str]:
    """Not directories: tests of other users' caches make some there meanwhile."""
    return sorted(each.name for each in os.scandir("/dev/shm") if not each.is_dir())


def test_a_killed_rank_is_named_by_the_others_and_nothing_is_left(
    request: pytest.FixtureRequest, tmp_path: Path, catalogue: Path
) -> None:
    count = 200 if request.config.getoption("--full-counts") else 5
    before = files_in_memory()
    done = program(catalogue, "shm_kills.py", tmp_path, count)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["killed"] == count
    assert result["wrong"] == []
    assert files_in_memory() == before
    assert "opkiln-shm" not in Path("/proc/net/unix").read_text()


# One rank, in this process


@pytest.fixture(scope="module", autouse=True)
def native() -> None:
    """Another file of tests may have had its references serve in this process."""
    opkiln.get_builder("shm_comm").load(verbose=False, reload=True)


@pytest.fixture
def alone() -> Iterator[ShmGroup]:
    with ShmGroup(dist.HashStore(), 0, 1) as group:
        yield group


def test_the_ops_pass_torchs_checks(alone: ShmGroup) -> None:
    x, number = torch.randn(6, 5), alone.number
    ops = torch.ops.opkiln
    for op, args in (
        (ops.shm_all_reduce, (x.clone().requires_grad_(), number, "mean")),
        (ops.shm_all_reduce_, (x.clone(), number, "max")),
        (ops.shm_reduce_scatter, (x.clone().requires_grad_(), number, "sum")),
        (ops.shm_reduce_scatter_into, (torch.empty(6, 5), x, number, "sum")),
        (ops.shm_all_gather, (x.clone().requires_grad_(), number)),
        (ops.shm_all_gather_into, (torch.empty(30), x, number)),
    ):
        torch.library.opcheck(op.default, args)


def test_compiled_graphs_hold_the_ops(alone: ShmGroup) -> None:
    number = alone.number

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        total = functions.shm_all_reduce(x * 2, number)
        functions.shm_all_reduce_(x, number, "max")
        return total + 1, functions.shm_reduce_scatter(functions.shm_all_gather(x, number), number)

    x = torch.randn(6, 5)
    total, part = step(x.clone())
    assert torch.equal(total, x * 2 + 1)
    assert torch.equal(part, x)


def test_a_result_is_new_memory(alone: ShmGroup) -> None:
    x = torch.ones(3)
    for made in (alone.all_reduce(x), alone.reduce_scatter(x), alone.all_gather(x)):
        assert torch.equal(made, x)
        assert made.data_ptr() != x.data_ptr()


def test_impossible_ranks_are_refused() -> None:
    with pytest.raises(ArgumentError, match="rank is 2, expected 0 to 1"):
        ShmGroup(dist.HashStore(), 2, 2)
    with pytest.raises(ArgumentError, match="size is 0, expected 1 to 256"):
        ShmGroup(dist.HashStore(), 0, 0)


def test_memory_that_cannot_be_made_is_an_error_that_the_others_are_told(alone: ShmGroup) -> None:
    store, limits = dist.HashStore(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(ClusterError, match="rank 0 cannot share memory") as failure:
            ShmGroup(store, 0, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large" in str(failure.value.why)
    assert any(b"none" in store.get(key) for key in store.list_keys() if "socket" in key)


def test_closing_a_group_closes_its_memory() -> None:
    def open_memories() -> int:
        links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        return sum(link.is_symlink() and "opkiln-shm" in os.readlink(link) for link in links)

    before = open_memories()
    group = ShmGroup(dist.HashStore(), 0, 1)
    assert open_memories() == before + 1
    group.close()
    assert open_memories() == before
    ShmGroup(dist.HashStore(), 0, 1)  # dropped
    assert open_memories() == before
