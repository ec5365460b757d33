"""Row 26: a wheel whose files are not those that were written is refused."""

from __future__ import annotations

import base64
import hashlib
import itertools
import random
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sample.levels import X86_64
from sample.prebuilt import SYSTEM, TORCH, add, linked

from opkiln.errors import LoadError
from opkiln.ship.wheel import write_wheel
from opkiln.ship.wheel_check import verify_wheel
from opkiln.store import zip_format
from opkiln.store.entry import parse_manifest, write_manifest

if TYPE_CHECKING:
    from collections.abc import Callable

    from fault_rows import Cases

pytestmark = pytest.mark.row(26)

CHANCE = random.Random(26)
INFO = "demo_ops-1.0.dist-info"

Files = dict[str, bytes]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of three ops, with libraries that get smaller, and with some that do not."""
    base = tmp_path_factory.mktemp("wheel")
    for seed, op in enumerate(("alpha", "beta", "gamma")):
        content = random.Random(seed).randbytes(4000) + bytes(6000)
        add(base / "layer", op, linked(*SYSTEM, *TORCH, content=content))
    (path,) = write_wheel(str(base / "layer"), str(base), name="demo-ops", version="1.0")
    verify_wheel(path)
    return Path(path)


def unpacked(path: Path) -> Files:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(path: Path, files: Files) -> None:
    """Write an archive of these files just as opkiln writes its own."""
    with path.open("wb") as out:
        archive = zip_format.Writer(out)
        for name, data in files.items():
            archive.add(name, [data], method=zip_format.DEFLATED)
        archive.close()


def recorded(files: Files) -> Files:
    """The same files with a RECORD that fits them."""
    lines = []
    for name, data in files.items():
        if name != f"{INFO}/RECORD":
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(data)}\n")
    lines.append(f"{INFO}/RECORD,,\n")
    return {**files, f"{INFO}/RECORD": "".join(lines).encode()}


def pick(files: Files, ending: str = "", count: int = 1) -> list[str]:
    return CHANCE.sample([name for name in files if name.endswith(ending)], count)


# What may happen to a wheel. Each changes the file, and gives the name in it that is to be told of
# where there is just one, "" where the archive itself is what is not whole.


def change_a_file(path: Path) -> str:
    files = unpacked(path)
    (name,) = pick(files)
    data = bytearray(files[name])
    data[CHANCE.randrange(len(data))] ^= CHANCE.randrange(1, 256)
    packed(path, {**files, name: bytes(data)})
    return "" if name == f"{INFO}/RECORD" else name


def cut(path: Path) -> str:
    data = path.read_bytes()
    path.write_bytes(data[: CHANCE.randrange(len(data))])
    return ""


def add_a_file(path: Path) -> str:
    name = CHANCE.choice(["opkiln_prebuilt/demo_ops/evil.so", "evil.pth", f"{INFO}/evil"])
    packed(path, {name: CHANCE.randbytes(50), **unpacked(path)})
    return name


def add_a_file_as_anybody_would(path: Path) -> str:
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("sitecustomize.py", "import evil")
    return "sitecustomize.py"


def add_a_file_and_record_it(path: Path) -> str:
    """Into an entry of the store, where nobody would miss it."""
    files = unpacked(path)
    (payload,) = pick(files, ".so")
    name = payload.removesuffix(".so") + "2.so"
    packed(path, recorded({name: b"evil", **files}))
    return name


def add_a_path_that_leads_out_and_record_it(path: Path) -> str:
    name = CHANCE.choice(["../evil.pth", "/evil.pth", "opkiln_prebuilt/../../evil.pth"])
    packed(path, recorded({name: b"import evil", **unpacked(path)}))
    return f"{name} leads out of the wheel"


def remove_a_file(path: Path) -> str:
    files = unpacked(path)
    (name,) = pick(files)
    packed(path, {each: data for each, data in files.items() if each != name})
    return name


def rename_a_file(path: Path) -> str:
    files = unpacked(path)
    (name,) = pick(files)
    packed(path, {each + ("x" if each == name else ""): data for each, data in files.items()})
    return name


def move_an_entry_and_record_it(path: Path) -> str:
    """An op's entry under another op's name."""
    files = unpacked(path)
    moved = {name.replace("/demo/alpha/", "/demo/delta/"): data for name, data in files.items()}
    packed(path, recorded(moved))
    return next(name for name in moved if "/delta/" in name and name.endswith("manifest.json"))


def swap_payloads(path: Path) -> str:
    files = unpacked(path)
    one, other = pick(files, ".so", 2)
    packed(path, {**files, one: files[other], other: files[one]})
    return min(one, other)


def swap_payloads_and_record_it(path: Path) -> str:
    files = unpacked(path)
    one, other = pick(files, ".so", 2)
    packed(path, recorded({**files, one: files[other], other: files[one]}))
    return min(one, other)


def change_a_payload_and_record_it(path: Path) -> str:
    files = unpacked(path)
    (name,) = pick(files, ".so")
    data = bytearray(files[name])
    data[CHANCE.randrange(len(data))] ^= CHANCE.randrange(1, 256)
    packed(path, recorded({**files, name: bytes(data)}))
    return name


def change_a_manifest_and_record_it(path: Path) -> str:
    files = unpacked(path)
    (name,) = pick(files, "manifest.json")
    data = bytearray(files[name].rstrip(b"\n"))
    data[CHANCE.randrange(len(data) - 1)] ^= CHANCE.randrange(1, 256)
    packed(path, recorded({**files, name: bytes(data)}))
    return name.removesuffix("/manifest.json")


def change_what_a_manifest_was_made_of(path: Path) -> str:
    """With its own digest made to fit, and RECORD's: the entry's name no longer does."""
    files = unpacked(path)
    (name,) = pick(files, "manifest.json")
    manifest = parse_manifest(files[name])
    manifest["deps"]["own"][0][2] = CHANCE.randbytes(32).hex()
    packed(path, recorded({**files, name: write_manifest(manifest)}))
    return name


CHANGES: list[Callable[[Path], str]] = [
    change_a_file, cut, add_a_file, add_a_file_as_anybody_would, add_a_file_and_record_it,
    add_a_path_that_leads_out_and_record_it, remove_a_file, rename_a_file,
    move_an_entry_and_record_it, swap_payloads, swap_payloads_and_record_it,
    change_a_payload_and_record_it, change_a_manifest_and_record_it,
    change_what_a_manifest_was_made_of,
]  # fmt: skip


def test_no_changed_wheel_is_taken_and_the_file_and_the_digest_are_named(
    whole: Path, cases: Cases, tmp_path: Path
) -> None:
    good = whole.read_bytes()
    refused = 0
    changes = itertools.cycle(CHANGES)
    for _ in cases(2000, least=50):
        change = next(changes)
        path = tmp_path / whole.name
        path.write_bytes(good)
        name = change(path)
        assert path.read_bytes() != good
        with pytest.raises(LoadError) as raised:
            verify_wheel(str(path))
        said = str(raised.value)
        assert raised.value.what.startswith(f"{path} is refused: "), change.__name__
        assert name in said, change.__name__
        assert hashlib.sha256(path.read_bytes()).hexdigest() in said
        refused += 1
    assert refused == cases.number
    path.write_bytes(good)
    verify_wheel(str(path))


def test_a_flipped_byte_of_a_file_is_told_with_the_digests_that_are_expected_and_found(
    whole: Path, tmp_path: Path
) -> None:
    files = unpacked(whole)
    (name,) = pick(files, "beta.so")
    changed = files[name][:-1] + bytes([files[name][-1] ^ 1])
    packed(tmp_path / whole.name, {**files, name: changed})
    with pytest.raises(LoadError) as raised:
        verify_wheel(str(tmp_path / whole.name))
    expected, found = (hashlib.sha256(data).hexdigest() for data in (files[name], changed))
    assert f"{name} has the SHA-256 {found}; RECORD says {expected}" in raised.value.what


def test_a_wheel_under_another_name_is_refused(whole: Path, tmp_path: Path) -> None:
    for name in ("demo_ops-1.0-py3-none-any", f"other-1.0-py3-none-manylinux_2_17_{X86_64}"):
        path = tmp_path / f"{name}.whl"
        path.write_bytes(whole.read_bytes())
        with pytest.raises(LoadError, match=r"is refused: it(s name|) (is|has)"):
            verify_wheel(str(path))


def test_a_flipped_byte_of_the_archive_is_refused_or_changes_no_file(
    whole: Path, tmp_path: Path
) -> None:
    good = whole.read_bytes()
    path = tmp_path / whole.name
    refused = 0
    for place in CHANCE.sample(range(len(good)), 400):
        data = bytearray(good)
        data[place] ^= 1 << CHANCE.randrange(8)
        path.write_bytes(data)
        try:
            verify_wheel(str(path))
        except LoadError:
            refused += 1
        else:
            assert unpacked(path) == unpacked(whole)
    assert refused > 200


def test_a_packages_own_wheel_is_checked_by_its_record_and_its_entries(
    whole: Path, tmp_path: Path
) -> None:
    files = unpacked(whole)
    files[f"{INFO}/WHEEL"] = files[f"{INFO}/WHEEL"].replace(b"opkiln ", b"setuptools ")
    path = tmp_path / whole.name

    def written(changed: Files) -> None:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in recorded(changed).items():
                archive.writestr(name, data)

    written(files)
    verify_wheel(str(path))
    one, other = pick(files, ".so", 2)
    written({**files, one: files[other]})
    with pytest.raises(LoadError, match=one):
        verify_wheel(str(path))


def test_what_cannot_be_read_is_a_load_error(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="cannot be read"):
        verify_wheel(str(tmp_path / "absent-1.0-py3-none-any.whl"))
    (tmp_path / "empty-1.0-py3-none-any.whl").write_bytes(b"")
    with pytest.raises(LoadError, match="not an intact zip archive"):
        verify_wheel(str(tmp_path / "empty-1.0-py3-none-any.whl"))
