"""What is known of the compilers' options is what the compilers here say."""

from __future__ import annotations

import random
import shutil

import option_tables
import pytest

from opkiln.steps import option_tables as known

CHECKED = 60  # options of a compiler that are asked about one by one


def needs(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not here")


def test_every_separate_value_that_gcc_lists_is_known() -> None:
    needs("g++")
    assert option_tables.gcc_help() - known.HOST_VALUES == set()


def test_every_separate_value_that_clang_lists_is_known() -> None:
    needs("clang++")
    assert option_tables.clang_help() - known.HOST_VALUES == set()


@pytest.mark.parametrize("program", ["g++", "clang++"])
def test_a_compiler_misses_no_value_of_an_option_that_is_not_known_to_take_one(
    program: str,
) -> None:
    needs(program)
    names = option_tables.gcc_names() if program == "g++" else option_tables.clang_names()
    alone = sorted(name for name in names - known.HOST_VALUES if name[-1] not in "=-")
    asked = random.Random(17).sample(alone, CHECKED)
    assert [name for name in asked if option_tables.takes_value(program, name)] == []


def test_every_option_of_ld_is_known_with_its_value() -> None:
    needs("ld")
    names, values = option_tables.linker()
    assert names - known.LINKER == set()
    assert values - known.LINKER_VALUES == set()


def test_every_option_of_nvcc_is_known_with_its_value() -> None:
    needs("nvcc")
    for long, (short, value) in option_tables.nvcc().items():
        table = known.NVCC_VALUES if value else known.NVCC_FLAGS
        assert {f"--{long}", f"-{short}"} <= table
