"""GPU images of libraries by name, and fat binaries and bundles that are not what they say."""

from __future__ import annotations

import tracemalloc

import pytest
from sample.binaries import (
    CUBIN,
    LTO,
    NOBITS,
    PTX,
    A,
    F,
    bundle,
    container,
    cuda,
    hip,
    image,
    library,
    packed,
)

from opkiln.errors import LoadError
from opkiln.machine.binary.fatbin import hip_images, images


@pytest.mark.parametrize(
    ("kind", "arch", "flags", "expected"),
    [
        (CUBIN, 80, 0, "sm_80"),
        (CUBIN, 90, A, "sm_90a"),
        (CUBIN, 100, F, "sm_100f"),
        (CUBIN, 121, A | 1 << 24, "sm_121a"),
        (CUBIN, 120, F | 0x8000, "sm_120f"),  # packed with zstd
        (CUBIN, 90, A | 0x2000, "sm_90a"),  # packed with LZ4
        (PTX, 75, 0, "compute_75"),
        (PTX, 90, A | 0x8000, "compute_90a"),
        (PTX, 100, F, "compute_100f"),
        (LTO, 90, A, "lto_90a"),
    ],
)
def test_an_image_is_named_by_its_entrys_header_alone(
    kind: int, arch: int, flags: int, expected: str
) -> None:
    assert images(cuda(container(image(kind, arch, flags)))) == (expected,)


def test_images_are_in_numeric_order_machine_code_first_and_each_once() -> None:
    units = [
        container(image(PTX, 90), image(CUBIN, 100), image(CUBIN, 90, A), image(CUBIN, 90)),
        container(image(CUBIN, 80), image(LTO, 80), image(PTX, 100, F), image(CUBIN, 90)),
    ]
    assert images(cuda(*units)) == (
        "sm_80", "sm_90", "sm_90a", "sm_100", "compute_90", "compute_100f", "lto_80",
    )  # fmt: skip


def test_containers_may_be_padded_and_empty() -> None:
    file = cuda(
        bytes(24),
        container(image(CUBIN, 75)),
        bytes(70_000),
        container(),
        container(image(PTX, 75)),
    )
    assert images(file) == ("sm_75", "compute_75")


def test_longer_headers_and_unknown_kinds_are_passed_over() -> None:
    longer = image(CUBIN, 103, A, header=120)
    assert images(cuda(container(image(64, 0), longer, image(16, 90)))) == ("sm_103a",)


def test_a_file_without_images_has_none() -> None:
    plain = library((".text", 1, b"\xc3", 0))
    assert (images(plain), hip_images(plain)) == ((), ())
    nobits = library((".nv_fatbin", NOBITS, b"\xc3", 0))
    assert images(nobits) == ()


def test_the_inputs_of_a_device_link_are_no_images_of_the_library() -> None:
    file = library(
        (".nv_fatbin", 1, container(image(CUBIN, 90)), 0),
        ("__nv_relfatbin", 1, container(image(PTX, 75), image(CUBIN, 120)), 0),
    )
    assert images(file) == ("sm_90",)


@pytest.mark.parametrize(
    ("section", "why"),
    [
        (b"\x50\xed\x55", "reach past the end"),
        (b"not a fat binary", "is not the start of a fat binary"),
        (container(image(CUBIN, 80)) + b"\0\0\1", "reach past the end"),
        (container(image(CUBIN, 80)) + b"\0\1" * 16, "is not the start of a fat binary"),
        (container(image(CUBIN, 80), version=2), "version 2"),
        (container(image(CUBIN, 80), header=8), "header of 8 bytes"),
        (container(image(CUBIN, 80), size=1 << 63), "reaches past the section's end"),
        (container(image(CUBIN, 80, size=1 << 63)), "reaches past its fat binary's end"),
        (container(image(CUBIN, 80, size=25)), "reaches past its fat binary's end"),
        (container(image(CUBIN, 80, version=0x201)), "version 0x201"),
        (container(image(CUBIN, 80, header=0)), "header of 0 bytes"),
        (container(image(CUBIN, 0)), "architecture 0"),
        (container(image(CUBIN, 0x5A00)), "architecture 23040"),
        (container(image(CUBIN, 90, A | F)), "flags 0x300011"),
        (bytes(1 << 22), "nothing but zeros"),
    ],
)
def test_a_damaged_fat_binary_is_a_load_error_that_says_where(section: bytes, why: str) -> None:
    with pytest.raises(LoadError) as raised:
        images(cuda(section))
    assert why in raised.value.why
    assert "readelf" in raised.value.hint


def test_hip_targets_keep_their_features_and_the_host_is_none_of_them() -> None:
    first = bundle(
        "hipv4-amdgcn-amd-amdhsa--gfx1030", "hipv4-amdgcn-amd-amdhsa--gfx90a:sramecc+:xnack-"
    )
    second = bundle("hip-amdgcn-amd-amdhsa-unknown-gfx906", "hip-amdgcn-amd-amdhsa--gfx9-4-generic")
    assert hip_images(hip(first, bytes(4096), second)) == (
        "gfx906", "gfx90a:sramecc+:xnack-", "gfx1030", "gfx9-4-generic",
    )  # fmt: skip


@pytest.mark.parametrize("version", [2, 3])
def test_a_packed_bundle_is_listed_too(version: int) -> None:
    whole = bundle("hipv4-amdgcn-amd-amdhsa--gfx942:xnack+")
    file = hip(packed(whole, version=version), bytes(64), bundle("hip-amdgcn-amd-amdhsa--gfx1100"))
    assert hip_images(file) == ("gfx942:xnack+", "gfx1100")


def test_a_packed_bundle_may_unpack_to_far_more_than_is_held() -> None:
    whole = bundle("hipv4-amdgcn-amd-amdhsa--gfx942") + bytes(1 << 26)
    file = hip(packed(whole))
    tracemalloc.start()
    try:
        assert hip_images(file) == ("gfx942",)
        assert tracemalloc.get_traced_memory()[1] < 1 << 23
    finally:
        tracemalloc.stop()


def test_bundles_packed_with_zstd_say_so_and_how_to_avoid_them() -> None:
    with pytest.raises(LoadError, match="zstd") as raised:
        hip_images(hip(packed(b"", method=1)))
    assert "--no-offload-compress" in raised.value.hint


@pytest.mark.parametrize(
    ("section", "why"),
    [
        (b"__CLANG_OFFLOAD", "is not the start of an offload bundle"),
        (b"__CLANG_OFFLOAD_BUNDLE__", "reach past the end"),
        (bundle("hip-amdgcn-amd-amdhsa--gfx906", entries=1 << 60), "no room for"),
        (bundle("hip-amdgcn-amd-amdhsa--gfx906", entries=3), "no target id"),
        (bundle("hip-amdgcn-amd-amdhsa--gfx906", size=1 << 40), "is not inside the bundle"),
        (bundle("x" * 5000), "is not inside the bundle"),
        (bundle("hip-amdgcn"), "no target id"),
        (bundle("hip-amdgcn-amd-amdhsa--gfx9\n06"), "no target id"),
        (packed(b"", version=7), "version 7"),
        (packed(b"", method=9), "method 9"),
        (packed(b"", size=1 << 40), "1099511627776 bytes"),
        (packed(b"", size=4), "4 bytes"),
        (packed(b""), "reach past the end"),
        (packed(b"something else, at length"), "unpacks to something else"),
        (packed(bundle("hip-amdgcn-amd-amdhsa--gfx906"), size=40), "reach past the end"),
        (packed(bundle())[:32] + b"\xff" * 200, "packed bundle: Error -3"),
    ],
)
def test_a_damaged_offload_bundle_is_a_load_error_that_says_where(section: bytes, why: str) -> None:
    with pytest.raises(LoadError) as raised:
        hip_images(library((".hip_fatbin", 1, section, 0), (".rest", 1, bytes(0), 0)))
    assert why in raised.value.why
