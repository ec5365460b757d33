"""Any text in a variable, any bytes in a file: a value that reads back, or the error that is told.

Names of ops are in ``test_plan``, keys in ``test_digest``, lists of GPU architectures in
``test_arch_cuda`` and ``test_arch_hip``, libraries in ``test_elf``; ``tests/faults/fuzz`` has a
coverage-guided fuzzer for each parser of files.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given
from hypothesis import settings as limits
from hypothesis import strategies as st
from sample.levels import X86_64, X86_V3

from opkiln.base.setting_values import parse_size
from opkiln.errors import ArchError, LoadError, OpkilnError, SettingError, UsageError
from opkiln.machine.arch import cpu
from opkiln.settings import Setting, override, table
from opkiln.ship import selection
from opkiln.ship.wheel_check import verify_wheel
from opkiln.store import archive, bundle, entry, signatures

# What a variable or a path can hold: no NUL, and bytes that are no UTF-8 as lone surrogates.
_BYTES = st.binary(max_size=60).map(lambda data: data.replace(b"\0", b""))
OS_TEXT = st.one_of(st.text(max_size=60), _BYTES.map(os.fsdecode)).filter(lambda t: "\0" not in t)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=8), st.floats(width=32)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


# Variables


# One setting of each reader; the others are read by the same functions.
READERS = {(each.parse, each.empty_counts): each for each in table()}.values()


@pytest.mark.parametrize(
    "setting",
    [pytest.param(each, marks=() if each in READERS else pytest.mark.full) for each in table()],
    ids=lambda each: each.variable,
)
def test_any_text_in_a_variable_is_a_value_or_an_error_that_names_it(setting: Setting) -> None:
    @limits(max_examples=15, deadline=None)
    @given(OS_TEXT)
    @example("\ud800")
    @example("'")
    @example("9" * 5000)
    @example("1e999")
    @example("nan")
    def read(text: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name in setting.names:
                patch.delenv(name, raising=False)
            try:
                patch.setenv(setting.variable, text)
            except UnicodeEncodeError:
                return  # no environment can hold it
            try:
                _, origin = setting.resolve()
            except SettingError as error:
                told = error.what, error.hint
            else:
                told = origin, origin
            if told != ("default", "default"):
                assert all(setting.variable in each for each in told)
            elif not setting.empty_counts:
                assert not text

    read()


@given(st.text(max_size=30))
@example("1e400")
@example("-1G")
@example("0.5KiB")
def test_any_size_is_a_number_of_bytes_or_an_error(text: str) -> None:
    try:
        size = parse_size(text)
    except ValueError:
        return
    assert 0 <= size < 1 << 100


@given(st.text(max_size=40))
@example(f"{X86_V3}+avx512f+avx512f")
@example("native+")
def test_any_cpu_is_one_that_reads_back_or_an_error(text: str) -> None:
    try:
        found = cpu.parse(text, X86_64, frozenset())
    except ArchError:
        return
    assert cpu.parse(str(found), X86_64, frozenset()) == found


@limits(deadline=None)
@given(st.text(max_size=40))
@example(f"cuda:8.0,9.0a+PTX;cpu:{X86_V3}")
@example("cpu:")
@example(":")
def test_any_target_is_understood_or_an_error(text: str) -> None:
    try:
        found = selection.parse(text)
    except UsageError:
        return
    assert found


# Manifests


@given(st.dictionaries(st.text(max_size=8), JSON, max_size=6))
def test_a_manifest_reads_back_as_it_was_written(body: dict[str, Any]) -> None:
    manifest = {**body, "schema": entry.SCHEMA}
    assume(
        not entry.find_wrong_type(manifest)
    )  # a name that manifests use, with a value of another type
    data = entry.write_manifest(manifest)
    again = entry.parse_manifest(data)
    assert entry.write_manifest(again) == data
    assert json.loads(data)["manifest"].keys() == manifest.keys()


@given(st.data())
def test_a_manifest_with_a_byte_changed_is_none(data: st.DataObject) -> None:
    whole = entry.write_manifest({"schema": entry.SCHEMA, "op": "one", "size": 3})
    at = data.draw(st.integers(0, len(whole) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != whole[at]))
    with pytest.raises(ValueError, match="manifest"):
        entry.parse_manifest(whole[:at] + bytes([byte]) + whole[at + 1 :])


def test_a_manifest_that_is_nested_without_end_is_an_error_and_nothing_else(tmp_path: Path) -> None:
    import hashlib

    body = b'{"schema":2,"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    digest = hashlib.sha256(body).hexdigest().encode()
    with pytest.raises(ValueError, match="nested too deeply"):
        entry.parse_manifest(b'{"sha256":"' + digest + b'","manifest":' + body + b"}\n")


# Bundles and wheels


@given(st.one_of(st.text(max_size=40), st.lists(st.text(max_size=12), max_size=9).map("/".join)))
@example(f"v1/ops/../../{'a' * 40}/{'b' * 40}/{'c' * 40}/x")
def test_a_path_that_a_bundle_may_hold_leads_to_where_it_says(text: str) -> None:
    leaf = f"v1/ops/d/o/{'a' * 40}/{'b' * 40}/{'c' * 40}"
    for name in (text, f"v1/ops/{text}", f"{leaf}/{text}"):
        try:
            (member,) = archive._lay_out([(name, 1, "0" * 64)], 0)
        except archive.Damaged:
            continue
        assert os.path.normpath(os.path.join("/store", member.name)) == f"/store/{name}"
        assert name.count("/") == 7


@limits(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(JSON, JSON, JSON), max_size=3))
def test_any_index_is_one_that_is_refused_or_read(rows: list[Any], tmp_path: Path) -> None:
    from zlib import crc32

    from opkiln.store.zip_format import local_header, stored_header

    index = entry.write_manifest({"schema": entry.SCHEMA, "kind": "bundle", "members": rows})
    file = tmp_path / "file"
    file.write_bytes(
        local_header(stored_header(archive.INDEX, len(index), crc32(index), 0)) + index
    )
    with pytest.raises(OpkilnError, match=re.escape(str(file))):
        bundle.read_bundle(str(file))


def test_a_record_of_endless_lines_or_another_packing_is_no_wheel(tmp_path: Path) -> None:
    import zipfile

    wheel = tmp_path / "demo_ops-1.0-py3-none-any.whl"
    record = "demo_ops-1.0.dist-info/RECORD"
    for content, packing, told in (
        (b'"' + b"x" * 200_000, zipfile.ZIP_STORED, "field larger"),
        (b"", zipfile.ZIP_LZMA, "packed by method 14"),
        (b"", zipfile.ZIP_BZIP2, "packed by method 12"),
    ):
        with zipfile.ZipFile(wheel, "w", packing) as archive:
            archive.writestr(record, content)
        with pytest.raises(LoadError, match=told):
            verify_wheel(str(wheel))


# Signatures


@given(st.dictionaries(st.binary(min_size=32, max_size=32), st.binary(min_size=64, max_size=64),
                       min_size=1, max_size=4))  # fmt: skip
def test_signatures_read_back_as_they_were_written(found: dict[bytes, bytes]) -> None:
    by_key = {signatures.write_key(key): each for key, each in found.items()}
    assert signatures.read(signatures.write(by_key)) == by_key


@given(st.one_of(st.text(max_size=60), st.binary(max_size=40).map(signatures.write_key)))
def test_any_text_is_a_key_in_its_one_form_or_an_error(text: str) -> None:
    try:
        public = signatures.parse_key(text)
    except ValueError:
        return
    assert signatures.write_key(public) == text


@limits(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.binary(max_size=200))
def test_any_file_of_keys_is_keys_or_nobody_is_trusted(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(data)
    with override(trusted_keys=(str(file),)):
        try:
            keys = signatures.keys_to_trust()
        except signatures.Untrusted:
            return
    assert keys
    assert all(key.encode() in data for key in keys)
