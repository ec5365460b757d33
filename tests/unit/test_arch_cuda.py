"""CUDA arch lists: what may be written, what a filter and a toolkit leave, what covers a device."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opkiln.errors import ArchError, SpecError
from opkiln.machine.arch import cuda
from opkiln.machine.arch.cuda import CudaArch

# What `nvcc --list-gpu-arch` of CUDA 13.0 prints, in its own order.
NUMBERS = ("75", "80", "86", "87", "88", "89", "90", "100", "110", "103", "120", "121")
LISTED = tuple(CudaArch(int(n[:-1]), int(n[-1])) for n in NUMBERS)

H200 = CudaArch(9, 0)


def shown(text: str) -> str:
    return cuda.show(cuda.parse(text, native=[H200], listed=LISTED))


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("8.0", "8.0"),
        ("9.0a", "9.0a"),
        ("12.1f", "12.1f"),
        ("8.0;9.0a 10.0f+PTX", "8.0;9.0a;10.0f+PTX"),
        ("8.0,9.0", "8.0;9.0"),
        ("8.0 9.0", "8.0;9.0"),
        (" ;, 8.0 ,;\t9.0;\n", "8.0;9.0"),
        ("9.0;", "9.0"),
        ("8.0+ptx", "8.0+PTX"),
        ("9.0A+Ptx", "9.0a+PTX"),
        ("sm_90a", "9.0a"),
        ("SM_103F+PTX", "10.3f+PTX"),
        ("native", "9.0"),
        ("Native;8.0", "8.0;9.0"),
        ("native+PTX", "9.0+PTX"),
        ("all", "7.5;8.0;8.6;8.7;8.8;8.9;9.0;10.0;10.3;11.0;12.0+PTX;12.1"),
        ("all-major", "7.5;8.0;9.0;10.0;11.0;12.0+PTX"),
        ("ALL-MAJOR 9.0a", "7.5;8.0;9.0;9.0a;10.0;11.0;12.0+PTX"),
    ],
)
def test_a_list_has_one_canonical_text(text: str, canonical: str) -> None:
    assert shown(text) == canonical


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("Kepler+Tesla", "3.7"), ("Kepler", "3.5+PTX"), ("Maxwell+Tegra", "5.3"),
        ("Maxwell", "5.0;5.2+PTX"), ("Pascal", "6.0;6.1+PTX"), ("Volta+Tegra", "7.2"),
        ("Volta", "7.0+PTX"), ("Turing", "7.5+PTX"), ("Ampere+Tegra", "8.7"),
        ("Ampere", "8.0;8.6+PTX"), ("Ada", "8.9+PTX"), ("Hopper", "9.0+PTX"),
        ("Blackwell+Tegra", "11.0"), ("Blackwell", "10.0;10.3;12.0;12.1+PTX"),
        ("hopper ADA", "8.9+PTX;9.0+PTX"), ("Volta+Tegra+PTX", "7.2+PTX"), ("Ada+PTX", "8.9+PTX"),
    ],
)  # fmt: skip
def test_names_mean_what_torchs_arch_list_means_by_them(name: str, canonical: str) -> None:
    assert shown(name) == canonical


def test_the_order_is_numeric_and_duplicates_are_one() -> None:
    text = "12.0 10.3 9.0a 9.0 8.0+PTX 10.0f 10.0 8.0 9.0a 8.0+ptx"
    assert shown(text) == "8.0+PTX;9.0;9.0a;10.0;10.0f;10.3;12.0"


def test_an_arch_with_and_without_ptx_is_one_with_it() -> None:
    assert cuda.parse("8.0;8.0+PTX") == (CudaArch(8, 0, ptx=True),)
    assert cuda.images(cuda.parse("8.0;8.0+PTX")) == ("sm_80", "compute_80")


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("", "''"), (" ;, ", "' ;, '"), ("99.99", "'99.99'"), ("-1.-2", "'-1.-2'"),
        ("9.0b", "'9.0b'"), ("8", "'8'"), ("80", "'80'"), ("compute_80", "'compute_80'"),
        ("8.0;;9.0;x;y", "'x'"), ("8.", "'8.'"), (".0", "'.0'"), ("8.0.0", "'8.0.0'"),
        ("08.0", "'08.0'"), ("8.00", "'8.00'"), ("0.0", "'0.0'"), ("100.0", "'100.0'"),
        ("+PTX", "'+PTX'"), ("8.0+", "'8.0+'"), ("8.0+PTX+PTX", "'8.0+PTX+PTX'"),
        ("8.0aa", "'8.0aa'"), ("9.0af", "'9.0af'"), ("8.0a", "'8.0a'"), ("9.0f", "'9.0f'"),
        ("sm_", "'sm_'"), ("sm_9", "'sm_9'"), ("sm_9.0", "'sm_9.0'"), ("sm_9000", "'sm_9000'"),
        ("\u0669.\u0660", "'\u0669.\u0660'"), ("\u00b2.0", "'\u00b2.0'"),
        ("8.0\x00", "'8.0\\x00'"), ("gfx90a", "'gfx90a'"), ("Hopper+Tegra", "'Hopper+Tegra'"),
        ("\ud800", "'\\ud800'"),
    ],
)  # fmt: skip
def test_what_means_nothing_is_an_error_that_quotes_the_word(text: str, quoted: str) -> None:
    with pytest.raises(ArchError) as caught:
        cuda.parse(text, native=[H200], listed=LISTED)
    assert quoted in caught.value.what
    assert caught.value.hint
    assert "\n" not in caught.value.what


def test_ten_kilobytes_of_noise_are_one_short_error() -> None:
    noise = "".join(random.Random(7).choices("abcxyz0123456789._+-/\\'\"$(){}", k=10_000))
    with pytest.raises(ArchError) as caught:
        cuda.parse("8.0;" + noise)
    assert noise[:20] in caught.value.what.replace("\\\\", "\\").replace("\\'", "'")
    assert "(10000 characters)" in caught.value.what
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("text", "meant"),
    [("8", "8.0"), ("80", "8.0"), ("sm90a", "9.0a"), ("compute_80", "8.0+PTX"), ("103", "10.3"),
     ("86-real", "8.6"), ("90a-virtual", "9.0a+PTX"), ("compute_100f", "10.0f+PTX")],
)  # fmt: skip
def test_other_spellings_are_refused_with_the_one_that_is_meant(text: str, meant: str) -> None:
    with pytest.raises(ArchError) as caught:
        cuda.parse(text)
    assert f"did you mean {meant}?" in caught.value.why
    assert caught.value.hint == f"OPKILN_CUDA_ARCH_LIST={meant}"
    assert shown(meant) == meant


@pytest.mark.parametrize("native", [None, ()])
def test_native_without_a_gpu_says_so(native: tuple[CudaArch, ...] | None) -> None:
    with pytest.raises(ArchError, match=r"'native' .* there are none") as caught:
        cuda.parse("8.0;native", native=native, listed=LISTED)
    assert caught.value.hint


@pytest.mark.parametrize("word", ["all", "all-major"])
def test_all_without_a_toolkit_says_so(word: str) -> None:
    with pytest.raises(ArchError, match=f"'{word}' .* there is no toolkit") as caught:
        cuda.parse(word, native=[H200])
    assert caught.value.hint


def test_native_names_every_gpu_of_the_machine() -> None:
    mixed = [CudaArch(9, 0), CudaArch(8, 0), CudaArch(9, 0), CudaArch(12, 1, ptx=True)]
    assert cuda.show(cuda.parse("native", native=mixed)) == "8.0;9.0;12.1+PTX"


def test_all_of_a_toolkit_without_a_round_version_ends_in_its_newest() -> None:
    assert (
        cuda.show(cuda.parse("all-major", listed=[CudaArch(7, 2), CudaArch(7, 5)])) == "7.2;7.5+PTX"
    )


WORDS = (
    "8.0", "9.0a", "10.0f+PTX", "12.1f", "Hopper", "Volta+Tegra", "native", "all", "all-major",
    "sm_90a", "SM_103F", "7.5", "8.6+ptx", "99.9", "ada+PTX",
)  # fmt: skip
NOISE = "0123456789.afAFsm_+PTXptx;, \t-\x00é²٣\U0001f525'\"\\$`\n"


def generated(count: int) -> list[str]:
    """Random text, well-formed lists, and well-formed lists with a few characters changed."""
    source = random.Random(20)
    found = []
    for index in range(count):
        if index % 4 == 0:
            found.append("".join(source.choices(NOISE, k=source.randrange(24))))
            continue
        text = "".join(
            source.choice(WORDS) + source.choice((";", ",", " ", ";;", " ;\n"))
            for _ in range(source.randrange(1, 5))
        )
        for _ in range(index % 4 - 1):
            at = source.randrange(len(text) + 1)
            text = text[:at] + source.choice(NOISE) + text[at + source.randrange(2) :]
        found.append(text)
    return found


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.full)])
def test_generated_strings_are_lists_that_round_trip_or_errors(count: int) -> None:
    valid = refused = 0
    for text in generated(count):
        try:
            archs = cuda.parse(text, native=[H200], listed=LISTED)
        except ArchError as error:
            refused += bool(error.hint) and "\n" not in error.what
            continue
        assert archs
        assert cuda.parse(cuda.show(archs)) == archs
        assert list(archs) == sorted(set(archs))
        flags = cuda.flags(archs)
        assert len(flags) == len(set(flags)) == len(cuda.images(archs))
        valid += 1
    assert valid + refused == count
    assert min(valid, refused) > count / 5


@given(st.text())
def test_any_text_is_a_list_that_round_trips_or_an_error(text: str) -> None:
    try:
        archs = cuda.parse(text, native=[H200], listed=LISTED)
    except ArchError:
        return
    assert cuda.parse(cuda.show(archs)) == archs


def test_each_gencode_appears_exactly_once() -> None:
    assert cuda.flags(cuda.parse("7.5;8.0;8.6;9.0a;10.0f+PTX;8.0")) == (
        "-gencode=arch=compute_75,code=sm_75",
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_86,code=sm_86",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_100f,code=sm_100f",
        "-gencode=arch=compute_100f,code=compute_100f",
    )


def test_flags_and_images_do_not_depend_on_how_the_list_was_put_together() -> None:
    loose = [
        CudaArch(10, 0),
        CudaArch(8, 0, ptx=True),
        CudaArch(8, 0),
        CudaArch(9, 0, "a", ptx=True),
    ]
    assert cuda.images(loose) == ("sm_80", "compute_80", "sm_90a", "compute_90a", "sm_100")
    assert cuda.flags(loose) == cuda.flags(cuda.merge(loose))


EVERY = cuda.parse("7.5;8.0+PTX;9.0;9.0a;10.0f+PTX")


def test_a_filter_sees_plain_capabilities_each_once() -> None:
    seen: list[str] = []

    def keep_all(ccs: list[str]) -> list[str]:
        seen.extend(ccs)
        ccs.clear()  # what it does to its argument is its own business
        return seen

    assert cuda.apply_filter(EVERY, keep_all) == (EVERY, ())
    assert seen == ["7.5", "8.0", "9.0", "10.0"]


def deepspeed_filter(ccs: list[str]) -> list[list[str]]:
    """As DeepSpeed's builders write theirs; ``int`` fails on a suffix or on +PTX."""
    return [cc for cc in (cc.split(".") for cc in ccs) if int(cc[0]) >= 9 and int(cc[1]) == 0]


def test_a_filter_written_for_deepspeed_decides_for_every_variant() -> None:
    kept, removed = cuda.apply_filter(EVERY, deepspeed_filter)
    assert cuda.show(kept) == "9.0;9.0a;10.0f+PTX"
    assert cuda.show(removed) == "7.5;8.0+PTX"


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        ([], ""),
        (["9.0", "7.5", "9.0"], "7.5;9.0;9.0a"),
        ([("8", "0"), ["10", "0"]], "8.0+PTX;10.0f+PTX"),
        ([(9, 0)], "9.0;9.0a"),
        (["9.0a"], "9.0a"),
        ([["8", "0+PTX"]], "8.0+PTX"),
        ([["10", "0f"]], "10.0f+PTX"),
        (iter(["7.5"]), "7.5"),
    ],
)
def test_what_a_filter_returns_is_kept_in_numeric_order(answer: list[str], kept: str) -> None:
    found = cuda.apply_filter(EVERY, lambda _ccs: answer)
    assert cuda.show(found.kept) == kept
    assert cuda.merge((*found.kept, *found.removed)) == EVERY


def test_a_filter_may_have_the_variant_compiled_instead() -> None:
    found = cuda.apply_filter(cuda.parse("8.0;9.0;10.0+PTX"), lambda _ccs: ["9.0a", "10.0f"])
    assert cuda.show(found.kept) == "9.0a;10.0+PTX;10.0f"
    assert cuda.show(found.removed) == "8.0"


@pytest.mark.parametrize(
    "answer",
    [["9.1"], ["7.5+PTX"], ["10.0a"], [["8", "6"]], ["Hopper"], ["all"], [""], [[]], ["8"]],
)
def test_a_filter_cannot_add(answer: list[str]) -> None:
    def adds(_ccs: list[str]) -> list[str]:
        return answer

    with pytest.raises(SpecError, match=r"adds.* returned .* was not given") as caught:
        cuda.apply_filter(EVERY, adds)
    assert "7.5, 8.0, 9.0, 10.0" in caught.value.why


@pytest.mark.parametrize("answer", [None, 8, "8.0", [8.0], [None]])
def test_a_filter_that_returns_no_list_is_an_error_of_its_author(answer: object) -> None:
    with pytest.raises(SpecError, match=r"failed on 7.5, 8.0, 9.0, 10.0"):
        cuda.apply_filter(EVERY, lambda _ccs: answer)  # type: ignore[arg-type,return-value]


def test_a_filter_that_raises_is_named_with_what_it_raised() -> None:
    def broken(ccs: list[str]) -> list[str]:
        return [cc for cc in ccs if int(cc) > 7]

    with pytest.raises(SpecError, match="broken failed") as caught:
        cuda.apply_filter(EVERY, broken)
    assert "ValueError: invalid literal" in caught.value.why
    assert isinstance(caught.value.__cause__, ValueError)


def test_nothing_is_asked_about_an_empty_list() -> None:
    def unasked(_ccs: list[str]) -> list[str]:
        raise AssertionError

    assert cuda.apply_filter((), unasked) == ((), ())


def test_a_toolkit_takes_what_it_lists_and_the_variants_of_that() -> None:
    archs = cuda.parse("7.0;7.5;9.0a;10.0f+PTX;10.1;12.1f;13.0")
    kept, refused = cuda.usable(archs, LISTED, frozenset())
    assert cuda.show(kept) == "7.5;9.0a;10.0f+PTX;12.1f"
    assert [(str(arch), reason) for arch, reason in refused] == [
        ("7.0", "the toolkit has no 7.0; its oldest is 7.5"),
        ("10.1", f"the toolkit has no 10.1; it has {', '.join(map(str, sorted(LISTED)))}"),
        ("13.0", "the toolkit has no 13.0; its newest is 12.1"),
    ]  # fmt: skip


def test_a_variant_that_a_probe_did_not_show_is_refused() -> None:
    archs = cuda.parse("9.0;9.0a;10.0f")
    kept, refused = cuda.usable(archs, LISTED, frozenset({"90a"}))
    assert cuda.show(kept) == "9.0;9.0a"
    assert refused == (
        (CudaArch(10, 0, "f"), "the toolkit has 10.0, but not its variant 10.0f"),
    )  # fmt: skip


def test_a_toolkit_that_lists_nothing_takes_nothing() -> None:
    assert cuda.usable([H200], (), frozenset()).refused == (
        (H200, "the toolkit lists no architecture"),
    )


@pytest.mark.parametrize("driver_ptx", [True, False])
def test_a_device_that_the_toolkit_knows_gets_its_own_code(driver_ptx: bool) -> None:
    assert cuda.choose_for_device(H200, LISTED, driver_ptx) == (H200, "")


@pytest.mark.parametrize(
    ("capability", "driver_ptx", "expected"),
    [
        (CudaArch(13, 0), True, "12.1+PTX"),
        (CudaArch(12, 3), True, "12.1+PTX"),
        (CudaArch(12, 3), False, "12.1"),
        (CudaArch(9, 1), True, "9.0+PTX"),
        (CudaArch(10, 1), True, "10.0+PTX"),
    ],
)
def test_a_device_newer_than_the_toolkit_gets_what_it_can_run_and_a_note(
    capability: CudaArch, driver_ptx: bool, expected: str
) -> None:
    arch, note = cuda.choose_for_device(capability, LISTED, driver_ptx)
    assert str(arch) == expected
    assert str(capability) in note
    assert cuda.covers([arch], capability)


def test_a_binary_that_runs_is_preferred_to_newer_ptx() -> None:
    # 8.7 is integrated: its binary does not run on 8.9, that of 8.6 does.
    listed = [CudaArch(8, 0), CudaArch(8, 6), CudaArch(8, 7)]
    assert cuda.choose_for_device(CudaArch(8, 9), listed, True)[0] == CudaArch(8, 6, ptx=True)


@pytest.mark.parametrize(
    ("capability", "driver_ptx", "why"),
    [
        (CudaArch(7, 0), True, "its oldest architecture is 7.5"),
        (CudaArch(13, 0), False, "the driver is too old"),
        (CudaArch(10, 1), False, "the driver is too old"),
    ],
)
def test_a_device_that_nothing_serves_is_an_error(
    capability: CudaArch, driver_ptx: bool, why: str
) -> None:
    with pytest.raises(ArchError, match=f"capability {capability}") as caught:
        cuda.choose_for_device(capability, LISTED, driver_ptx)
    assert why in caught.value.why
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "capability", "way"),
    [
        ("9.0", (9, 0), "exact"), ("9.0a", (9, 0), "exact"), ("10.0f", (10, 0), "exact"),
        ("8.0", (8, 9), "binary"), ("12.0", (12, 1), "binary"), ("10.0f", (10, 3), "binary"),
        ("12.0f", (12, 1), "binary"), ("8.0;8.9", (8, 9), "exact"),
        ("8.0+PTX", (9, 0), "ptx"), ("8.0+PTX", (8, 6), "binary"), ("7.5+PTX;9.0", (12, 1), "ptx"),
        ("10.0f+PTX", (10, 3), "binary"), ("8.7+PTX", (8, 9), "ptx"),
        ("9.0", (8, 9), ""), ("9.0", (10, 0), ""), ("8.9", (8, 6), ""), ("8.9+PTX", (8, 6), ""),
        ("9.0a+PTX", (10, 0), ""), ("10.0a", (10, 3), ""), ("10.0a+PTX", (10, 3), ""),
        ("10.0f+PTX", (12, 0), ""), ("10.0f+PTX", (11, 0), ""), ("10.3f", (10, 0), ""),
        ("12.1f", (12, 0), ""),
        # Integrated chips take no other chip's binary, nor others theirs.
        ("8.6", (8, 7), ""), ("8.7", (8, 9), ""), ("10.0f+PTX", (10, 1), ""),
        ("8.7", (8, 7), "exact"), ("10.0+PTX", (10, 1), "ptx"),
    ],
)  # fmt: skip
def test_coverage_follows_nvidias_rules(text: str, capability: tuple[int, int], way: str) -> None:
    archs, device = cuda.parse(text), CudaArch(*capability)
    assert cuda.covers(archs, device) == way
    assert cuda.covers(cuda.images(archs), device) == way


def test_ptx_without_a_binary_covers_as_ptx() -> None:
    assert cuda.covers(["compute_90"], H200) == "ptx"
    assert cuda.covers(["compute_90a"], H200) == "ptx"
    assert cuda.covers(["compute_100f"], CudaArch(10, 3)) == "ptx"


def test_nothing_covers_nothing() -> None:
    assert cuda.covers([], H200) == ""


@pytest.mark.parametrize("name", ["lto_90", "90", "sm_", "sm_9x", "compute_"])
def test_an_image_by_another_name_is_refused(name: str) -> None:
    with pytest.raises(ArchError, match=repr(name)):
        cuda.covers([name], H200)


@pytest.mark.parametrize(
    ("text", "expected"), [("8.0;9.0a", True), ("7.5;8.0", False), ("10.0f", True)]
)
def test_bf16_needs_every_arch_to_have_it(text: str, expected: bool) -> None:
    assert cuda.has_bf16(cuda.parse(text)) is expected


def test_no_arch_has_no_bf16() -> None:
    assert not cuda.has_bf16(())
