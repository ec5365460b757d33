"""HIP arch lists: what may be written, what a filter leaves, what covers a device."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opkiln.errors import ArchError, SpecError
from opkiln.machine.arch import hip
from opkiln.machine.arch.hip import HipArch

MI250 = HipArch("gfx90a", ("sramecc+", "xnack-"))


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("gfx90a", "gfx90a"),
        ("gfx90a;gfx942:sramecc+", "gfx90a;gfx942:sramecc+"),
        ("gfx942:xnack-:sramecc+", "gfx942:sramecc+:xnack-"),
        ("GFX90A:XNACK+", "gfx90a:xnack+"),
        ("gfx1100, gfx1030 gfx942;gfx90a;", "gfx90a;gfx942;gfx1030;gfx1100"),
        ("gfx90a gfx90a", "gfx90a"),
        ("gfx90a:xnack-;gfx90a:xnack+", "gfx90a:xnack+;gfx90a:xnack-"),
        ("gfx942 gfx9-4-generic gfx1030", "gfx9-4-generic;gfx942;gfx1030"),
        ("gfx13-generic gfx12-5-generic", "gfx12-5-generic;gfx13-generic"),
        ("gfx9-0-generic gfx9-generic", "gfx9-0-generic;gfx9-generic"),
        ("native", "gfx90a:sramecc+:xnack-"),
        ("gfx1100;NATIVE", "gfx90a:sramecc+:xnack-;gfx1100"),
    ],
)
def test_a_list_has_one_canonical_text(text: str, canonical: str) -> None:
    assert hip.show(hip.parse(text, native=[MI250, MI250])) == canonical


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("", "''"), (" ; ", "' ; '"), ("gfx", "'gfx'"), ("gfx9", "'gfx9'"), ("gfx90", "'gfx90'"),
        ("gfx90g", "'gfx90g'"), ("gfxabc", "'gfxabc'"), ("gfx09a", "'gfx09a'"),
        ("gfx11000", "'gfx11000'"), ("90a", "'90a'"), ("9.0a", "'9.0a'"), ("gfx90a;x", "'x'"),
        ("gfx90a:", "'gfx90a:'"), ("gfx90a:xnack", "'gfx90a:xnack'"), ("gfx90a:+", "'gfx90a:+'"),
        ("gfx90a:wave64+", "'gfx90a:wave64+'"), ("gfx90a::xnack+", "'gfx90a::xnack+'"),
        ("gfx90a:xnack+:xnack-", "'gfx90a:xnack+:xnack-'"), ("gfx٣42", "'gfx٣42'"),
        ("gfx90a:xnack+:xnack+", "'gfx90a:xnack+:xnack+'"), ("gfx-generic", "'gfx-generic'"),
        ("gfx90a-generic", "'gfx90a-generic'"), ("gfx9--generic", "'gfx9--generic'"),
        ("gfx9-12-generic", "'gfx9-12-generic'"), ("gfx9_0a", "'gfx9_0a'"), ("all", "'all'"),
        ("x" * 10_000, "(10000 characters)"),
    ],
)  # fmt: skip
def test_what_means_nothing_is_an_error_that_quotes_the_word(text: str, quoted: str) -> None:
    with pytest.raises(ArchError) as caught:
        hip.parse(text, native=[MI250])
    assert quoted in caught.value.what
    assert caught.value.hint
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "text", ["gfx90a;gfx90a:xnack+", "gfx90a:sramecc+;gfx90a:xnack+", "native;gfx90a"]
)
def test_targets_of_one_processor_set_the_same_features(text: str) -> None:
    with pytest.raises(ArchError, match=r"'gfx90a.*' and 'gfx90a.*' exclude each other"):
        hip.parse(text, native=[MI250])


@pytest.mark.parametrize("native", [None, ()])
def test_native_without_a_gpu_says_so(native: tuple[HipArch, ...] | None) -> None:
    with pytest.raises(ArchError, match=r"'native' .* there are none"):
        hip.parse("native", native=native)


def test_a_list_says_which_side_it_is_for() -> None:
    assert hip.is_hip(" ;GFX90a")
    assert not hip.is_hip("9.0a;gfx90a")
    assert not hip.is_hip("")


WORDS = (
    "gfx90a", "gfx942:sramecc+:xnack-", "gfx1100", "gfx11-generic", "native", "GFX90A:xnack+",
    "gfx1030", "gfx942:xnack+:sramecc-",
)  # fmt: skip
NOISE = "0123456789abcdefxgGFXnacksrme:+-;, \t\x00é٣"


def test_generated_strings_are_lists_that_round_trip_or_errors() -> None:
    source = random.Random(21)
    valid = refused = 0
    for index in range(30_000):
        text = "".join(
            source.choice(WORDS) + source.choice((";", ",", " "))
            for _ in range(source.randrange(4))
        )
        for _ in range(index % 3):
            at = source.randrange(len(text) + 1)
            text = text[:at] + source.choice(NOISE) + text[at + source.randrange(2) :]
        try:
            archs = hip.parse(text, native=[MI250])
        except ArchError as error:
            refused += bool(error.hint)
            continue
        assert hip.parse(hip.show(archs)) == archs
        assert len(set(hip.flags(archs))) == len(archs) > 0
        valid += 1
    assert valid + refused == 30_000
    assert min(valid, refused) > 5_000


@given(st.text())
def test_any_text_is_a_list_that_round_trips_or_an_error(text: str) -> None:
    try:
        archs = hip.parse(text, native=[MI250])
    except ArchError:
        return
    assert hip.parse(hip.show(archs)) == archs


def test_each_offload_arch_appears_exactly_once() -> None:
    assert hip.flags([HipArch("gfx1030"), MI250, HipArch("gfx1030")]) == (
        "--offload-arch=gfx90a:sramecc+:xnack-",
        "--offload-arch=gfx1030",
    )


EVERY = hip.parse("gfx90a:xnack+;gfx90a:xnack-;gfx942;gfx1100")


def test_a_filter_decides_for_a_processor_whatever_its_features() -> None:
    seen: list[str] = []

    def cdna(archs: list[str]) -> list[str]:
        seen.extend(archs)
        return [arch for arch in reversed(archs) if arch.startswith("gfx9")]

    kept, removed = hip.apply_filter(EVERY, cdna)
    assert seen == ["gfx90a", "gfx942", "gfx1100"]
    assert hip.show(kept) == "gfx90a:xnack+;gfx90a:xnack-;gfx942"
    assert hip.show(removed) == "gfx1100"


@pytest.mark.parametrize("answer", [["gfx908"], ["9.0"], [""]])
def test_a_filter_cannot_add(answer: list[str]) -> None:
    with pytest.raises(SpecError, match="was not given"):
        hip.apply_filter(EVERY, lambda _archs: answer)


def test_a_filter_that_raises_is_an_error_of_its_author() -> None:
    with pytest.raises(SpecError, match="failed on gfx90a, gfx942, gfx1100") as caught:
        hip.apply_filter(EVERY, lambda archs: [arch for arch in archs if int(arch)])
    assert "ValueError" in caught.value.why


def test_a_compiler_takes_the_processors_it_has_whatever_their_features() -> None:
    listed = hip.parse("gfx900;gfx90a;gfx1030;gfx1031")
    kept, refused = hip.usable(hip.parse("gfx90a:xnack+ gfx942 gfx1100"), listed)
    assert hip.show(kept) == "gfx90a:xnack+"
    assert refused == (
        (HipArch("gfx942"), "the compiler has no gfx942; it has gfx900, gfx90a"),
        (
            HipArch("gfx1100"),
            "the compiler has no gfx1100; it has gfx900, gfx90a, gfx1030, gfx1031",
        ),
    )


@pytest.mark.parametrize(
    ("text", "device", "way"),
    [
        ("gfx90a", "gfx90a:sramecc+:xnack-", "exact"),
        ("gfx90a:xnack-", "gfx90a:sramecc+:xnack-", "exact"),
        ("gfx90a:xnack+", "gfx90a:sramecc+:xnack-", ""),
        ("gfx90a:xnack+;gfx90a:xnack-", "gfx90a:sramecc+:xnack-", "exact"),
        ("gfx90a:xnack-", "gfx90a", ""),
        ("gfx90a", "gfx90a", "exact"),
        ("gfx90a", "gfx908:sramecc+:xnack-", ""),
        ("gfx11-generic", "gfx1101", "generic"),
        ("gfx11-generic;gfx1101", "gfx1101", "exact"),
        ("gfx11-generic", "gfx1201", ""),
        ("gfx9-4-generic:xnack+", "gfx942:sramecc+:xnack-", ""),
        ("gfx9-generic", "gfx90a", ""),
    ],
)
def test_coverage_follows_the_settings_of_features(text: str, device: str, way: str) -> None:
    (here,) = hip.parse(device)
    assert hip.covers(hip.parse(text), here) == way


def test_nothing_covers_nothing() -> None:
    assert hip.covers((), MI250) == ""
