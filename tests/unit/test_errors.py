"""Every error says what, why and what to do, and survives the way to another process."""

from __future__ import annotations

import copy
import pickle

import pytest

from opkiln import errors
from opkiln.errors import OpkilnError

KINDS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, OpkilnError)
]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_reads_what_then_why_then_the_hint(kind: type[OpkilnError]) -> None:
    error = kind("it broke", why="first\nsecond", hint="opkiln report")
    assert str(error) == "it broke\n  first\n  second\nhint: opkiln report"
    assert str(kind("it broke")) == "it broke"


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_crosses_a_process_boundary_whole(kind: type[OpkilnError]) -> None:
    error = kind("it broke", why="because", hint="mend it")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is kind
        assert (twin.what, twin.why, twin.hint) == ("it broke", "because", "mend it")
        assert twin.exit_code == kind.exit_code


def test_exit_codes_tell_the_families_apart() -> None:
    codes = {kind.__name__: kind.exit_code for kind in KINDS}
    assert codes["UsageError"] == codes["SpecError"] == codes["UnknownOp"] == 2
    families = ("ToolchainError", "BuildError", "StoreError", "LoadError", "CompilingOff")
    assert len({codes[name] for name in families}) == len(families)
    assert all(code not in (0, 1) for name, code in codes.items() if name != "OpkilnError")


def test_every_error_is_documented() -> None:
    assert all(kind.__doc__ for kind in KINDS)


def test_an_unknown_op_is_a_key_error_too_and_reads_as_plain_text() -> None:
    error = errors.UnknownOp("there is no op 'x'", why="known: a")
    assert isinstance(error, KeyError)
    assert str(error) == "there is no op 'x'\n  known: a"
