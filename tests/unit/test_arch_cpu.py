"""CPU levels and features: what this CPU is, what covers it, and the flags that say so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opkiln import machine
from opkiln.arch import cpu
from opkiln.arch.cpu import CPU
from opkiln.errors import ArchError

V2 = cpu.requires("x86-64-v2", ())
V3 = cpu.requires("x86-64-v3", ())
V4 = cpu.requires("x86-64-v4", ())
EVERYTHING = frozenset(cpu.probes("x86_64"))

FLAGS = (
    "fpu cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3 avx avx2 bmi1 bmi2 f16c fma abm movbe xsave "
    "avx512_vnni amx_tile"
)


def test_the_kernels_names_become_the_compilers() -> None:
    features = cpu.features_of(FLAGS)
    assert features >= {"sse3", "sse4.1", "sahf", "lzcnt", "bmi", "avx512vnni", "amx-tile"}
    assert cpu.native("x86_64", features) == CPU("x86-64-v3", ("amx-tile", "avx512vnni"))


def test_no_flags_mean_no_features() -> None:
    assert cpu.features_of("") == frozenset()


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        (frozenset(), CPU("x86-64")),
        (V2, CPU("x86-64-v2")),
        (V3, CPU("x86-64-v3")),
        (V4, CPU("x86-64-v4")),
        (V3 | {"avx512f", "avxvnni"}, CPU("x86-64-v3", ("avx512f", "avxvnni"))),
        (V4 - {"fma"}, CPU("x86-64-v2", ("avx", "avx2", "avx512bw", "avx512cd", "avx512dq",
                                         "avx512f", "avx512vl", "bmi2", "f16c"))),
        (V3 - {"popcnt"}, CPU("x86-64", ("avx", "avx2", "bmi2", "f16c", "fma"))),
    ],
)  # fmt: skip
def test_native_is_the_highest_whole_level_and_what_is_beyond_it(
    features: frozenset[str], expected: CPU
) -> None:
    assert cpu.native("x86_64", features) == expected


@given(st.frozensets(st.sampled_from(sorted(V4 | {"avx512vnni", "amx-tile", "avxvnni"}))))
def test_a_cpu_always_covers_what_native_resolves_to(features: frozenset[str]) -> None:
    found = cpu.native("x86_64", features)
    assert cpu.lacking(found.level, found.features, features) == ()
    assert cpu.covering("x86_64", features)[0] == found
    for each in cpu.covering("x86_64", features):
        assert cpu.lacking(each.level, each.features, features) == ()


@given(st.frozensets(st.sampled_from(sorted(V4 | {"avx512vnni", "amx-tile", "avxvnni"}))))
def test_a_cpu_reads_back_as_it_is_written(features: frozenset[str]) -> None:
    found = cpu.native("x86_64", features)
    assert cpu.parse(str(found), "x86_64", frozenset()) == found


def test_lower_levels_cover_too_best_first() -> None:
    names = [str(each) for each in cpu.covering("x86_64", V3 | {"avxvnni"})]
    assert names == ["x86-64-v3+avxvnni", "x86-64-v3", "x86-64-v2", "x86-64"]


def test_what_a_cpu_lacks_is_named() -> None:
    assert cpu.lacking("x86-64-v3", ("avx512f",), V2 | {"avx", "avx2", "f16c"}) == (
        "avx512f", "bmi", "bmi2", "fma", "lzcnt", "movbe", "xsave",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "quoted"),
    [("skylake", "'skylake'"), ("x86-64-v5", "'x86-64-v5'"), ("x86-64-v3+mmx9", "'mmx9'"),
     ("", "''"), ("native+", "''"), ("armv8-a", "'armv8-a'")],
)  # fmt: skip
def test_a_cpu_that_means_nothing_is_refused_quoting_the_token(text: str, quoted: str) -> None:
    with pytest.raises(ArchError) as caught:
        cpu.parse(text, "x86_64", V4)
    assert quoted in caught.value.what
    assert "known: " in caught.value.why


def test_a_feature_that_the_level_has_is_not_named_twice() -> None:
    assert cpu.parse("x86-64-v3+avx2+avx512f", "x86_64", V2) == CPU("x86-64-v3", ("avx512f",))


def test_only_flags_that_the_compiler_takes_are_given() -> None:
    wanted = CPU("x86-64-v3", ("avx512f", "avxvnni"))
    assert cpu.flags(wanted, "x86_64", EVERYTHING) == (
        "-march=x86-64-v3", "-mavx512f", "-mavxvnni",
    )  # fmt: skip
    assert cpu.flags(wanted, "x86_64", EVERYTHING - {"-mavxvnni"})[-1] == "-mavx512f"


def test_arm_flags_are_one_march_with_its_features() -> None:
    features = frozenset({"lse", "rdma", "dcpop", "fp16", "sve"})
    found = cpu.native("aarch64", features)
    assert cpu.flags(found, "aarch64", frozenset({"+fp16", "+sve"})) == (
        "-march=armv8.2-a+fp16+sve",
    )
    assert cpu.simd("aarch64", found) == "neon"


def test_an_unknown_machine_has_one_level_and_no_flags() -> None:
    found = cpu.native("riscv64", frozenset({"v"}))
    assert (found, cpu.flags(found, "riscv64", EVERYTHING)) == (CPU("riscv64"), ())


@pytest.mark.parametrize(
    ("text", "unit"),
    [("x86-64-v4", "avx512"), ("x86-64-v3", "avx2"), ("x86-64-v2", "scalar")],
)
def test_the_widest_vector_unit_follows_from_the_level(text: str, unit: str) -> None:
    assert cpu.simd("x86_64", cpu.parse(text, "x86_64", frozenset())) == unit


def test_this_machine_covers_itself() -> None:
    have = cpu.features_of(machine.cpu_flags())
    found = cpu.native(machine.architecture(), have)
    assert have, "the kernel tells no CPU features"
    assert cpu.lacking(found.level, found.features, have) == ()
    assert machine.cpu_name()
