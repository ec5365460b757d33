"""What a farm is asked for: a matrix, and a function that makes an executor."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest
from sample.levels import HIGH, LOW

from opkiln.errors import ToolchainError, UsageError
from opkiln.ship import farm as coordinator
from opkiln.ship.farm import Job, work
from opkiln.ship.prebuild import FAILED
from opkiln.ship.selection import NamedTarget

if TYPE_CHECKING:
    from pathlib import Path


def test_a_matrix_has_ops_and_targets(tmp_path: Path) -> None:
    file = tmp_path / "matrix.toml"
    file.write_text(f'targets = ["cpu:{LOW},{HIGH}", "cuda:9.0a", "cuda:9.0a"]')
    ops, targets = coordinator.read_matrix(str(file))
    assert ops == []
    assert [str(each) for each in targets] == [f"cpu:{LOW}", f"cpu:{HIGH}", "cuda:9.0a"]
    file.write_text('targets = ["cpu"]\nops = ["b", "a", "b"]')
    assert coordinator.read_matrix(str(file)) == (["b", "a"], [("cpu", "")])


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
        coordinator.read_matrix(str(file))
    assert str(file) in raised.value.what


@pytest.mark.parametrize(
    "text", ["", ":", "processes=4", "dask://h:8786", "no_such_module:make", "os:no_such_function"]
)
def test_what_names_no_function_is_an_error_that_shows_the_form(text: str) -> None:
    with pytest.raises(UsageError, match="names a function that cannot be found") as raised:
        coordinator.find_function(text)
    assert "--executor MODULE:FUNCTION" in raised.value.hint


def test_a_function_that_makes_no_executor_is_an_error_that_says_why() -> None:
    with pytest.raises(UsageError, match="str is not a"):
        coordinator.find_function("os:getcwd")()
    with pytest.raises(ToolchainError, match="TypeError: "):
        coordinator.find_function("os:rename")()


def test_a_worker_returns_errors_and_raises_none() -> None:
    result = work(Job("no_such_op", NamedTarget("cpu")))
    assert result.outcome.status == FAILED
    assert "no_such_op" in str(result.outcome.error)
    other = work(Job("utils", NamedTarget("cpu"), version="0.0"))
    assert "and 0.0 here" in str(other.outcome.error)
    assert pickle.loads(pickle.dumps(other)).outcome.error.what == other.outcome.error.what
