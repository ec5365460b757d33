"""Row 13: two different requests never have one key."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from sample.levels import X86_64, X86_V3

from opkiln.base.build_model import Target
from opkiln.base.digest import encode, key
from opkiln.base.model import OpSpec
from opkiln.store.key import intent_key

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fault_rows import Cases

pytestmark = pytest.mark.row(13)

# Pieces that meet where one value ends and the next begins, and that look like the encoding itself.
PIECES = (
    "", "-D", "A", "B", "-DA", "-DB", "-DA-DB", "-DA -DB", " ", "\0", "s1:A", "(2:", "i1;", "n",
    "t", "é", "e\u0301", ":", "1", "{src}/", "\n", "\udcff", "-I", "/a", "/a/b",
)  # fmt: skip
TARGET = Target("cpu", "linux", X86_64, X86_V3, (), "none")
FIELDS = ("sources", "include_dirs", "cxx_args", "ldflags", "libraries")


def some_flags(chance: random.Random) -> tuple[str, ...]:
    def word() -> str:
        return "".join(chance.choices(PIECES, k=chance.randrange(4)))

    return tuple(word() for _ in range(chance.randrange(5)))


def a_value(chance: random.Random, depth: int = 3) -> Any:
    kind = chance.randrange(7 if depth else 5)
    if kind == 0:
        return chance.choice((None, True, False))
    if kind == 1:
        return chance.randrange(-3, 12)
    if kind == 2:
        return "".join(chance.choices(PIECES, k=2)).encode("utf-8", "surrogateescape")
    if kind in (3, 4):
        return "".join(chance.choices(PIECES, k=chance.randrange(3)))
    if kind == 5:
        return tuple(a_value(chance, depth - 1) for _ in range(chance.randrange(4)))
    return {chance.choice(PIECES): a_value(chance, depth - 1) for _ in range(chance.randrange(3))}


def told_apart(value: Any) -> Any:
    """A value in a form whose equality is identity of meaning: True is not 1, "1" is not b"1"."""
    if isinstance(value, tuple):
        return ("tuple", *(told_apart(item) for item in value))
    if isinstance(value, dict):
        return ("dict", frozenset((name, told_apart(item)) for name, item in value.items()))
    return (type(value).__name__, value)


def test_different_values_have_different_encodings(cases: Cases) -> None:
    chance = random.Random(13)
    different = 0
    for _ in cases(100_000):
        one, two = a_value(chance), a_value(chance)
        if told_apart(one) != told_apart(two):
            different += 1
            assert encode(one) != encode(two), (one, two)
        else:
            assert encode(one) == encode(two)
    assert different > cases.number // 2


def test_different_declarations_have_different_keys(cases: Cases) -> None:
    chance = random.Random(31)
    seen: dict[str, OpSpec] = {}
    for _ in cases(100_000):
        field = {name: some_flags(chance) for name in chance.sample(FIELDS, k=2)}
        spec = OpSpec(name="op", distribution="jit", root="/root/of/it", **{"sources": (), **field})
        assert seen.setdefault(intent_key(spec, TARGET), spec) == spec
    assert len(seen) > cases.number // 2


def test_the_textbook_collisions_do_not_collide() -> None:
    assert key("x", ("-DA", "-DB")) != key("x", ("-DA-DB",))
    assert key("x", ("-DA -DB",)) != key("x", ("-DA", "-DB"))
    assert key("x", (("a",), ("b",))) != key("x", (("a", "b"),))
    assert key("x", ("", "a")) != key("x", ("a", ""))
    assert key("x", 1) != key("x", True)
    assert key("x", "1") != key("x", 1)
    assert key("x", b"1") != key("x", "1")
    assert key("x", ()) != key("x", None)
    assert key("a", "b") != key("ab", "")


def test_flags_that_join_to_the_same_text_build_two_libraries(
    tmp_path: Path, value: Callable[..., int]
) -> None:
    source = tmp_path / "op.cpp"
    source.write_text(
        "#ifdef B\n#define SECOND 1\n#else\n#define SECOND 0\n#endif\n"
        'extern "C" int value() { return sizeof(A) * 10 + SECOND; }\n'
    )
    assert value(source, extra_cflags=['-DA="a"', "-DB"]) == 21
    assert value(source, extra_cflags=['-DA="a" "-DB"']) == 50
