"""The compile-time parameters of an op: what may be listed, and what it is called."""

from __future__ import annotations

from typing import Any

import pytest

from opkiln.builder.parameters import Parameters
from opkiln.errors import SpecError

GOOD = Parameters.of(
    "attn", {"HEAD": (64, -1), "T": ("half", "float"), "CAUSAL": (False, True)}, {}
)


def test_every_combination_is_a_variant_with_a_name_and_macros() -> None:
    assert len(list(GOOD.combinations())) == 8
    values = (-1, "half", True)
    assert GOOD.library(values) == "attn__HEAD_minus1_T_half_CAUSAL_true"
    assert GOOD.flags(values) == ("-DHEAD=-1", "-DOPKILN_PARAMETER_T=half", "-DCAUSAL=true")


def test_values_are_taken_by_name_and_those_not_listed_are_told() -> None:
    assert GOOD.find_values({"CAUSAL": True, "T": "half", "HEAD": 64}) == ((64, "half", True), "")
    values, why = GOOD.find_values({"HEAD": 96, "T": "half", "CAUSAL": True})
    assert (values, why) == ((), "no variant has HEAD=96; variants= lists 64, -1")
    for wrong in ({"HEAD": 64}, 64, {"HEAD": 64, "T": "half", "CAUSAL": True, "MORE": 1}):
        with pytest.raises(SpecError, match=r"the function of @attn.variant returns"):
            GOOD.find_values(wrong)


def test_part_of_the_values_selects_several_variants() -> None:
    assert len(GOOD.matching({"HEAD": 64})) == 4
    assert GOOD.matching({"HEAD": 64, "T": "half", "CAUSAL": True}) == [(64, "half", True)]
    with pytest.raises(SpecError, match="has no variant with HEAD=1"):
        GOOD.matching({"HEAD": 1})
    assert Parameters("plain").matching({}) == [()]


@pytest.mark.parametrize(
    ("variants", "words"),
    [
        ({"a-b": (1,)}, "has the name 'a-b'"),
        ({"Ä": (1,)}, "has the name 'Ä'"),
        ({"int": (1,)}, "has the name 'int'"),
        ({"x": (1,)}, "has the name 'x'"),
        ({"_H": (1,)}, "has the name '_H'"),
        ({"OPKILN_H": (1,)}, "has the name 'OPKILN_H'"),
        ({3: (1,)}, "has the name 3"),
        ({"H": ()}, "not a list of values"),
        ({"H": "half"}, "not a list of values"),
        ({"H": (1.5,)}, "has the value 1.5 for H"),
        ({"H": ("1;2",)}, "has the value '1;2' for H"),
        ({"H": ("a b",)}, "has the value 'a b' for H"),
        ({"H": (None,)}, "has the value None for H"),
        ({"H": (1, True)}, "lists H=True twice, as 1"),
        ({"no": ("grad", "way")}, "no_grad is the name of"),
        ({"A": ("x", "x_B_x"), "B": ("x", "x_B_x")}, "A_x_B_x_B_x is the name of"),
        ({"H": tuple(range(40)), "K": tuple(range(40))}, "1600 combinations"),
        ({"H" * 99: (1,)}, "cannot be the name of an op"),
        (("H",), "is not a dict"),
    ],
)
def test_what_cannot_be_a_macro_is_refused_with_the_reason(variants: Any, words: str) -> None:
    with pytest.raises(SpecError) as refused:
        Parameters.of("attn", variants, {})
    assert words in str(refused.value)


def test_a_parameter_is_chosen_or_tuned_but_not_both() -> None:
    with pytest.raises(SpecError, match="variants= and tune= both have H"):
        Parameters.of("attn", {"H": (1,)}, {"H": (1,)})
