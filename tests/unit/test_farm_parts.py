"""What a farm is asked for: a matrix, and an executor by its name."""

from __future__ import annotations

import pickle
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING

import pytest
from sample.levels import HIGH, LOW

from opkiln.errors import ToolchainError, UsageError
from opkiln.ship.farm import executors, matrix
from opkiln.ship.farm.tasks import Job, work
from opkiln.ship.prebuild import FAILED
from opkiln.ship.selection import NamedTarget

if TYPE_CHECKING:
    from pathlib import Path


def test_a_matrix_has_ops_and_targets(tmp_path: Path) -> None:
    file = tmp_path / "matrix.toml"
    file.write_text(f'targets = ["cpu:{LOW},{HIGH}", "cuda:9.0a", "cuda:9.0a"]')
    found = matrix.read(str(file))
    assert found.ops == ()
    assert [str(each) for each in found.targets] == [f"cpu:{LOW}", f"cpu:{HIGH}", "cuda:9.0a"]
    file.write_text('targets = ["cpu"]\nops = ["b", "a", "b"]')
    assert matrix.read(str(file)) == (("b", "a"), (("cpu", ""),))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("targets = [", "is not TOML"),
        ("", "has no targets"),
        ("targets = []", "has no targets"),
        ('targets = "cpu"', "targets is not a list of texts"),
        ("targets = [1]", "targets is not a list of texts"),
        ('targets = ["cpu"]\ntorches = ["2.12"]', "unknown key torches"),
        ('targets = ["gpu"]', "there is no backend 'gpu'"),
    ],
)
def test_a_wrong_matrix_is_an_error_that_names_the_file(
    tmp_path: Path, text: str, told: str
) -> None:
    file = tmp_path / "matrix.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=told) as raised:
        matrix.read(str(file))
    assert str(file) in raised.value.what


def test_processes_are_a_pool_of_their_number() -> None:
    with executors.named("processes=3")() as pool:
        assert isinstance(pool, ProcessPoolExecutor)
        assert pool._max_workers == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "text", ["", "processes", "processes=0", "processes=x", "dask", "dask://", "mpi=4", "slurm"]
)
def test_an_unknown_executor_is_an_error_that_lists_the_known_ones(text: str) -> None:
    with pytest.raises(UsageError, match="processes=N, dask://HOST:PORT, ray"):
        executors.named(text)


@pytest.mark.parametrize(
    ("text", "package"),
    [
        ("dask://h:8786", "distributed"),
        ("ray", "ray"),
        ("ray://h:10001", "ray"),
        ("mpi", "mpi4py"),
        ("slurm=/shared", "submitit"),
    ],
)
def test_an_executor_whose_package_is_missing_names_the_command_that_installs_it(
    text: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("distributed", "ray", "mpi4py", "mpi4py.futures", "submitit"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ToolchainError) as raised:
        executors.named(text)
    assert raised.value.hint == f"pip install {package}"


def test_a_worker_returns_errors_and_raises_none() -> None:
    result = work(Job("no_such_op", NamedTarget("cpu")))
    assert result.outcome.status == FAILED
    assert "no_such_op" in str(result.outcome.error)
    other = work(Job("utils", NamedTarget("cpu"), version="0.0"))
    assert "and 0.0 here" in str(other.outcome.error)
    assert pickle.loads(pickle.dumps(other)).outcome.error.what == other.outcome.error.what
