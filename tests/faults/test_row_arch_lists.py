"""Row 22: whatever is written as an arch list, it is a list that round-trips or an ArchError."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from sample.levels import ARM_V8, UNKNOWN_LEVEL, X86_64, X86_V1, X86_V2, X86_V3, X86_V4

from opkiln.errors import ArchError
from opkiln.machine.arch import cpu, cuda, hip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fault_rows import Cases

pytestmark = pytest.mark.row(22)

NOISE = "0123456789.afAFsm_+PTXptxgGFXnack:;, \t\r-\x00é²٣\U0001f525'\"\\$`\n(){}[]%=/"
CUDA_WORDS = (
    "8.0", "9.0a", "10.0f", "10.3+PTX", "12.1a+PTX", "Hopper", "Ada", "Ampere", "native", "all",
    "all-major", "7.5", "80", "sm_90", "compute_80", "9.", ".9", "0", "0.0", "-1", "9.0aa", "+PTX",
    "9.0+ptx", "1e3", "9.0a+", "nan", "\u0669.\u0660", "99999999999999999999.0",
)  # fmt: skip
HIP_WORDS = (
    "gfx90a", "gfx942:sramecc+:xnack-", "gfx1100", "gfx11-generic", "native", "GFX90A:xnack+",
    "gfx", "gfx90a:", "gfx90a:xnack", "gfx90a:xnack+:xnack+", "gfx9-4-generic", "90a", "gfxzzz",
)  # fmt: skip
CPU_WORDS = (
    "native", X86_V1, X86_V2, X86_V3, X86_V4, UNKNOWN_LEVEL, "avx2", "+avx512f",
    "amx-tile", ARM_V8, "sve", "-avx", "v3", "+", "++", "znver3",
)  # fmt: skip

LISTED = cuda.parse("7.5;8.0;8.6;8.9;9.0;10.0;10.3;12.0;12.1")


def read_cuda(text: str) -> tuple[Any, Any, list[str]]:
    native = cuda.parse("9.0")
    found = cuda.parse(text, native=native, listed=LISTED)
    return found, cuda.parse(cuda.show(found)), list(cuda.flags(found))


def read_hip(text: str) -> tuple[Any, Any, list[str]]:
    found = hip.parse(text, native=hip.parse("gfx90a:sramecc+:xnack-"))
    return found, hip.parse(hip.show(found)), list(hip.flags(found))


def read_cpu(text: str) -> tuple[Any, Any, list[str]]:
    features = cpu.features_of("sse2 ssse3 sse4_1 sse4_2 popcnt avx avx2 fma bmi1 bmi2")
    found = cpu.parse(text, X86_64, features)
    return found, cpu.parse(str(found), X86_64, features), []


def texts(words: tuple[str, ...], separators: tuple[str, ...], numbers: Iterator[int]) -> Any:
    """Random text, lists of words, and lists with a few characters changed."""
    chance = random.Random(22)
    for number in numbers:
        if number % 4 == 0:
            yield "".join(chance.choices(NOISE, k=chance.randrange(24)))
            continue
        text = "".join(
            chance.choice(words) + chance.choice(separators) for _ in range(chance.randrange(1, 5))
        )
        text = text[:-1] if chance.random() < 0.5 else text
        for _ in range(number % 4 - 1):
            at = chance.randrange(len(text) + 1)
            text = text[:at] + chance.choice(NOISE) + text[at + chance.randrange(2) :]
        yield text


@pytest.mark.parametrize(
    ("read", "words", "separators", "whole"),
    [
        (read_cuda, CUDA_WORDS, (";", ",", " ", ";;", " ;\n"), 100_000),
        (read_hip, HIP_WORDS, (";", ",", " "), 100_000),
        (read_cpu, CPU_WORDS, ("+", ",", " "), 100_000),
    ],
    ids=["cuda", "hip", "cpu"],
)
def test_a_list_round_trips_or_is_an_arch_error(
    read: Callable[[str], tuple[Any, Any, list[str]]],
    words: tuple[str, ...],
    separators: tuple[str, ...],
    whole: int,
    cases: Cases,
) -> None:
    valid = refused = 0
    for text in texts(words, separators, cases(whole)):
        try:
            found, again, flags = read(text)
        except ArchError as error:
            refused += "\n" not in error.what and len(str(error)) < 2000
            continue
        assert found == again, ascii(text)
        assert len(flags) == len(set(flags))
        assert all(flag.isascii() and flag.isprintable() for flag in flags), ascii(text)
        valid += 1
    assert valid + refused == cases.number
    assert min(valid, refused) > cases.number // 100
