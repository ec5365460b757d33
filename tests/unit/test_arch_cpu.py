"""CPU levels and features: what this CPU is, what covers it, and the flags that say so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample.levels import (
    AARCH64,
    ARM_V8,
    ARM_V8_2,
    UNKNOWN_LEVEL,
    X86_64,
    X86_V1,
    X86_V2,
    X86_V3,
    X86_V4,
)

from opkiln.errors import ArchError
from opkiln.machine import uname
from opkiln.machine.arch import cpu
from opkiln.machine.arch.cpu import CPU

V2 = cpu.requires(X86_V2, ())
V3 = cpu.requires(X86_V3, ())
V4 = cpu.requires(X86_V4, ())
EVERYTHING = frozenset(cpu.probes(X86_64))

FLAGS = (
    "fpu cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3 avx avx2 bmi1 bmi2 f16c fma abm movbe xsave "
    "avx512_vnni amx_tile"
)


def test_the_kernels_names_become_the_compilers() -> None:
    features = cpu.features_of(FLAGS)
    assert features >= {"sse3", "sse4.1", "sahf", "lzcnt", "bmi", "avx512vnni", "amx-tile"}
    assert cpu.native(X86_64, features) == CPU(X86_V3, ("amx-tile", "avx512vnni"))


def test_no_flags_mean_no_features() -> None:
    assert cpu.features_of("") == frozenset()


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        (frozenset(), CPU(X86_V1)),
        (V2, CPU(X86_V2)),
        (V3, CPU(X86_V3)),
        (V4, CPU(X86_V4)),
        (V3 | {"avx512f", "avxvnni"}, CPU(X86_V3, ("avx512f", "avxvnni"))),
        (V4 - {"fma"}, CPU(X86_V2, ("avx", "avx2", "avx512bw", "avx512cd", "avx512dq",
                                         "avx512f", "avx512vl", "bmi2", "f16c"))),
        (V3 - {"popcnt"}, CPU(X86_V1, ("avx", "avx2", "bmi2", "f16c", "fma"))),
    ],
)  # fmt: skip
def test_native_is_the_highest_whole_level_and_what_is_beyond_it(
    features: frozenset[str], expected: CPU
) -> None:
    assert cpu.native(X86_64, features) == expected


@given(st.frozensets(st.sampled_from(sorted(V4 | {"avx512vnni", "amx-tile", "avxvnni"}))))
def test_a_cpu_always_covers_what_native_resolves_to(features: frozenset[str]) -> None:
    found = cpu.native(X86_64, features)
    assert cpu.missing_features(found.level, found.features, features) == ()
    assert cpu.compatible_cpus(X86_64, features)[0] == found
    for each in cpu.compatible_cpus(X86_64, features):
        assert cpu.missing_features(each.level, each.features, features) == ()


@given(st.frozensets(st.sampled_from(sorted(V4 | {"avx512vnni", "amx-tile", "avxvnni"}))))
def test_a_cpu_reads_back_as_it_is_written(features: frozenset[str]) -> None:
    found = cpu.native(X86_64, features)
    assert cpu.parse(str(found), X86_64, frozenset()) == found


def test_lower_levels_cover_too_best_first() -> None:
    names = [str(each) for each in cpu.compatible_cpus(X86_64, V3 | {"avxvnni"})]
    assert names == [f"{X86_V3}+avxvnni", X86_V3, X86_V2, X86_V1]


def test_what_a_cpu_lacks_is_named() -> None:
    assert cpu.missing_features(X86_V3, ("avx512f",), V2 | {"avx", "avx2", "f16c"}) == (
        "avx512f", "bmi", "bmi2", "fma", "lzcnt", "movbe", "xsave",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "quoted"),
    [("skylake", "'skylake'"), (UNKNOWN_LEVEL, f"'{UNKNOWN_LEVEL}'"), (f"{X86_V3}+mmx9", "'mmx9'"),
     ("", "''"), ("native+", "''"), (ARM_V8, f"'{ARM_V8}'")],
)  # fmt: skip
def test_a_cpu_that_means_nothing_is_refused_quoting_the_token(text: str, quoted: str) -> None:
    with pytest.raises(ArchError) as caught:
        cpu.parse(text, X86_64, V4)
    assert quoted in caught.value.what
    assert "known: " in caught.value.why


@pytest.mark.parametrize(
    ("machine", "level"), [(X86_64, X86_V3), (AARCH64, ARM_V8_2), ("riscv64", "riscv64")]
)
def test_common_is_a_level_of_each_machine_whatever_cpu_it_has(machine: str, level: str) -> None:
    assert cpu.machine_of("common", machine) == machine
    assert cpu.parse("common", machine, frozenset()) == CPU(level)


def test_a_feature_that_the_level_has_is_not_named_twice() -> None:
    assert cpu.parse(f"{X86_V3}+avx2+avx512f", X86_64, V2) == CPU(X86_V3, ("avx512f",))


def test_only_flags_that_the_compiler_takes_are_given() -> None:
    wanted = CPU(X86_V3, ("avx512f", "avxvnni"))
    assert cpu.flags(wanted, X86_64, EVERYTHING) == (
        f"-march={X86_V3}", "-mavx512f", "-mavxvnni",
    )  # fmt: skip
    assert cpu.flags(wanted, X86_64, EVERYTHING - {"-mavxvnni"})[-1] == "-mavx512f"


def test_arm_flags_are_one_march_with_its_features() -> None:
    features = frozenset({"lse", "rdma", "dcpop", "fp16", "sve"})
    found = cpu.native(AARCH64, features)
    assert cpu.flags(found, AARCH64, frozenset({"+fp16", "+sve"})) == (
        f"-march={ARM_V8_2}+fp16+sve",
    )
    assert cpu.simd(AARCH64, found) == "neon"


def test_an_unknown_machine_has_one_level_and_no_flags() -> None:
    found = cpu.native("riscv64", frozenset({"v"}))
    assert (found, cpu.flags(found, "riscv64", EVERYTHING)) == (CPU("riscv64"), ())


@pytest.mark.parametrize(
    ("text", "unit"),
    [(X86_V4, "avx512"), (X86_V3, "avx2"), (X86_V2, "scalar")],
)
def test_the_widest_vector_unit_follows_from_the_level(text: str, unit: str) -> None:
    assert cpu.simd(X86_64, cpu.parse(text, X86_64, frozenset())) == unit


def test_this_machine_covers_itself() -> None:
    have = cpu.features_of(uname.cpu_flags())
    found = cpu.native(uname.architecture(), have)
    assert have, "the kernel tells no CPU features"
    assert cpu.missing_features(found.level, found.features, have) == ()
    assert uname.cpu_name()
