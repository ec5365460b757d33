"""Garbage collection while much is imported or built."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import pytest

from opkiln.base.lazy import young_collections

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    gc.unfreeze()  # the tests' own processes are frozen
    yield
    gc.freeze()


class _Node:
    def __init__(self) -> None:
        self.itself = self


def test_young_collections_free_what_was_made_within_the_block_alone() -> None:
    gc.collect()
    before = weakref.ref(_Node())
    with young_collections():
        within = weakref.ref(_Node())
        with young_collections():
            gc.collect()
        assert within() is None
        assert before() is not None
        assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert before() is None


def test_young_collections_leave_frozen_what_a_program_has_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with pytest.raises(KeyError), young_collections():
        raise KeyError
    assert gc.get_freeze_count() >= frozen > 0
