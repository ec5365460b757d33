"""The platform tag follows from what the libraries need, and from nothing else."""

from __future__ import annotations

import pytest
from packaging.tags import Tag, parse_tag
from sample.levels import AARCH64, X86_64
from sample.prebuilt import ARM, linked

from opkiln.errors import UsageError
from opkiln.machine.binary import elf
from opkiln.ship.audit import Platform, platform

OWNERS = {"GLIBC": "libc.so.6", "GLIBCXX": "libstdc++.so.6", "CXXABI": "libstdc++.so.6",
          "GCC": "libgcc_s.so.1"}  # fmt: skip


def needing(*versions: str, machine: int = 62) -> elf.Elf:
    owners = [OWNERS.get(version.partition("_")[0], "libother.so.1") for version in versions]
    symbols = [
        (owner, f"f{index}", version)
        for index, (owner, version) in enumerate(zip(owners, versions, strict=True))
    ]
    return elf.read(linked(*symbols, machine=machine))


@pytest.mark.parametrize(
    ("versions", "tag", "decided"),
    [
        ((), "manylinux_2_17", "nothing newer than glibc 2.17"),
        (("GLIBC_2.2.5", "GLIBC_2.14", "GLIBCXX_3.4.19"), "manylinux_2_17", "glibc 2.17"),
        (("GLIBC_2.3.4", "GLIBC_2.28"), "manylinux_2_28", "GLIBC_2.28"),
        # 2.9 is older than 2.32: numbers, not texts.
        (("GLIBC_2.32", "GLIBC_2.9"), "manylinux_2_32", "GLIBC_2.32"),
        (("GLIBC_2.32", "GLIBCXX_3.4.29"), "manylinux_2_34", "GLIBCXX_3.4.29"),
        (("GLIBC_2.36", "GLIBCXX_3.4.29"), "manylinux_2_36", "GLIBC_2.36"),
        (("GLIBCXX_3.4.20",), "manylinux_2_24", "GLIBCXX_3.4.20"),
        (("GLIBCXX_3.4.25",), "manylinux_2_31", "GLIBCXX_3.4.25"),
        (("GLIBCXX_3.4.30",), "manylinux_2_35", "GLIBCXX_3.4.30"),
        (("GLIBCXX_3.4.33",), "manylinux_2_39", "GLIBCXX_3.4.33"),
        (("CXXABI_1.3.13",), "manylinux_2_34", "CXXABI_1.3.13"),
        (("CXXABI_FLOAT128",), "manylinux_2_24", "CXXABI_FLOAT128"),
        (("GCC_7.0.0",), "manylinux_2_27", "GCC_7.0.0"),
        (("GLIBC_ABI_DT_RELR",), "manylinux_2_36", "GLIBC_ABI_DT_RELR"),
        (("GLIBC_2.99",), "manylinux_2_99", "GLIBC_2.99"),
        # Not the platform's: whoever has that library says what it needs.
        (("GOMP_4.5", "libcudart.so.13"), "manylinux_2_17", "glibc 2.17"),
    ],
)
def test_the_newest_version_that_is_needed_decides(
    versions: tuple[str, ...], tag: str, decided: str
) -> None:
    found = platform([needing(*versions)])
    assert found.tag == f"{tag}_{X86_64}"
    assert decided in found.why


@pytest.mark.parametrize(
    "version", ["GLIBCXX_3.4.34", "CXXABI_1.3.16", "GCC_15.0.0", "GLIBC_PRIVATE", "GLIBC_3.0"]
)
def test_what_no_platform_is_known_to_have_is_tagged_for_linux_with_the_reason(
    version: str,
) -> None:
    found = platform([needing("GLIBC_2.17", version)])
    assert found.tag == f"linux_{X86_64}"
    assert found.why.startswith("no platform up to manylinux_2_")
    assert found.why.endswith(f" has {version}")


def test_the_worst_of_several_libraries_decides() -> None:
    libraries = [needing("GLIBC_2.17"), needing("GLIBC_2.34"), needing("GLIBC_2.29")]
    assert platform(libraries) == Platform(f"manylinux_2_34_{X86_64}", "GLIBC_2.34")


def test_aarch64_has_tags_of_its_own() -> None:
    tag = platform([needing("GLIBC_2.17", "GLIBCXX_3.4.21", machine=ARM)]).tag
    assert tag == f"manylinux_2_24_{AARCH64}"
    assert parse_tag(f"py3-none-{tag}") == {Tag("py3", "none", tag)}


@pytest.mark.parametrize("machines", [(62, ARM), (243,), ()])
def test_libraries_that_no_one_tag_fits_are_an_error(machines: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="no platform tag fits libraries for"):
        platform([needing(machine=machine) for machine in machines])
