"""A bundle holds the entries of a layer, byte for byte, and nothing else."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from sample import layer

from opkiln.errors import StoreError
from opkiln.machine.facts import Hasher
from opkiln.settings import override
from opkiln.store import archive, bundle, layers, sealed, zip_format
from opkiln.store.entry import Leaf, Refused
from opkiln.store.key import deps_key


@pytest.fixture(autouse=True)
def _as_in_a_new_process() -> None:
    sealed._kept.clear()


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    """A layer of two ops."""
    made = tmp_path / "layer"
    layer.add(made, "one", b"\x7fELF" + bytes(range(256)) * 9)
    layer.add(made, "two", b"\x7fELF" + b"2" * 70_000)
    return made


@pytest.fixture
def file(shipped: Path, tmp_path: Path) -> Path:
    path = tmp_path / "ops.bundle"
    bundle.write_bundle(str(shipped), str(path))
    return path


def crafted(path: Path, files: dict[str, bytes], listed: list[tuple[str, int, str]]) -> Path:
    """A file as the writer would lay it out, with an index of somebody else's making."""
    from zlib import crc32

    index = archive.write_index(listed)
    headers = [zip_format.stored_header(archive.INDEX, len(index), crc32(index), 0)]
    data = zip_format.local_header(headers[0]) + index
    for name, content in files.items():
        headers.append(zip_format.stored_header(name, len(content), crc32(content), len(data)))
        data += zip_format.local_header(headers[-1]) + content
    path.write_bytes(data + zip_format.directory(headers))
    return path


def all_of(files: dict[str, bytes]) -> list[tuple[str, int, str]]:
    return [(n, len(d), hashlib.sha256(d).hexdigest()) for n, d in files.items()]


def contents(shipped: Path) -> dict[str, bytes]:
    found = {str(p.relative_to(shipped)): p.read_bytes() for p in shipped.rglob("*.*")}
    return dict(sorted(found.items()))


def find(file: Path, op: str = "one") -> Leaf | Refused:
    (leaf,) = archive.leaves(str(file), "somebody", op)
    return archive.examine(leaf, {}, Hasher())


def good(file: Path, op: str = "one") -> Leaf:
    found = find(file, op)
    assert isinstance(found, Leaf)
    return found


def test_the_same_layer_gives_the_same_bytes(shipped: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(shipped, copy)
    for path in copy.rglob("*.*"):
        os.utime(path, (1, 1))
        path.chmod(0o600)
    first = bundle.write_bundle(str(shipped), str(tmp_path / "1"))
    second = bundle.write_bundle(str(copy), str(tmp_path / "2"))
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    assert first.sha256 == second.sha256 == archive.sha256_file(str(tmp_path / "1"))
    assert first.entries == 2


def test_any_zip_tool_can_read_a_bundle(shipped: Path, file: Path) -> None:
    with zipfile.ZipFile(file) as read:
        assert read.testzip() is None
        assert read.namelist() == [archive.INDEX, *contents(shipped)]
        assert {name: read.read(name) for name in read.namelist()[1:]} == contents(shipped)


def test_a_bundle_is_written_whole_or_not_at_all(shipped: Path, tmp_path: Path) -> None:
    target = tmp_path / "a directory"
    target.mkdir()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(StoreError, match=f"{target} cannot be written"):
        bundle.write_bundle(str(shipped), str(target))
    assert sorted(tmp_path.iterdir()) == before


def test_an_empty_layer_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="has no ops to ship"):
        bundle.write_bundle(str(tmp_path), str(tmp_path / "file"))


def test_a_log_stays_at_home(shipped: Path, file: Path, tmp_path: Path) -> None:
    (next(shipped.rglob("one.so")).parent / "build.log").write_text("/home/me/op.cpp")
    bundle.write_bundle(str(shipped), str(tmp_path / "other"))
    assert (tmp_path / "other").read_bytes() == file.read_bytes()


def test_a_damaged_entry_is_not_bundled(shipped: Path, tmp_path: Path) -> None:
    next(shipped.rglob("two.so")).write_bytes(b"other")
    with pytest.raises(StoreError, match=r"two\.so has the wrong digest"):
        bundle.write_bundle(str(shipped), str(tmp_path / "file"))
    assert not (tmp_path / "file").exists()


def test_what_is_unpacked_is_what_was_bundled(shipped: Path, file: Path, tmp_path: Path) -> None:
    root = tmp_path / "store" / "v1"
    taken = bundle.unpack(str(file), str(root))
    assert [(each.op, each.new) for each in taken] == [("one", True), ("two", True)]
    assert contents(tmp_path / "store") == contents(shipped)
    assert os.stat(taken[0].directory).st_mode & 0o077 == 0
    assert list((root / "staging").iterdir()) == []
    again = bundle.unpack(str(file), str(root))
    assert [each.new for each in again] == [False, False]


def test_a_damaged_entry_of_the_store_is_replaced(file: Path, tmp_path: Path) -> None:
    root = tmp_path / "store" / "v1"
    first, _ = bundle.unpack(str(file), str(root))
    good = Path(first.directory, "one.so").read_bytes()
    Path(first.directory, "one.so").write_bytes(b"damaged")
    again = bundle.unpack(str(file), str(root))
    assert [each.new for each in again] == [True, False]
    assert Path(first.directory, "one.so").read_bytes() == good


def test_a_file_with_another_digest_than_was_told_is_refused(file: Path, tmp_path: Path) -> None:
    digest = archive.sha256_file(str(file))
    with pytest.raises(StoreError, match=f"has the SHA-256 {digest}, not {'0' * 64}"):
        bundle.unpack(str(file), str(tmp_path / "v1"), sha256="0" * 64)
    assert not (tmp_path / "v1").exists()
    assert len(bundle.unpack(str(file), str(tmp_path / "v1"), sha256=digest.upper())) == 2


@pytest.mark.parametrize(
    "name",
    [
        "../../outside/op.so",
        "/etc/passwd",
        "v1/ops/../../../x/op.so",
        f"v1/ops/d/op/{'a' * 40}/{'b' * 40}/{'c' * 40}/../../op.so",
        f"v1/ops/d/op/{'a' * 40}/{'b' * 40}/{'c' * 40}/sub/op.so",
        f"v1/ops/d/op/{'a' * 40}/{'b' * 40}/{'c' * 40}/.hidden",
        f"v1/ops/d/op/{'A' * 40}/{'b' * 40}/{'c' * 40}/op.so",
        f"v1/objects/{'a' * 40}/op.so",
        f"v2/ops/d/op/{'a' * 40}/{'b' * 40}/{'c' * 40}/op.so",
        f"v1/ops/d/o\\p/{'a' * 40}/{'b' * 40}/{'c' * 40}/op.so",
        f"v1/ops/d/o\x1bp/{'a' * 40}/{'b' * 40}/{'c' * 40}/op.so",
        f"v1/ops/d/{'x' * 300}/{'a' * 40}/{'b' * 40}/{'c' * 40}/op.so",
        "",
    ],
)
def test_a_path_that_is_no_entrys_is_refused(name: str, tmp_path: Path) -> None:
    files = {name: b"data"}
    path = crafted(tmp_path / "file", files, all_of(files))
    with pytest.raises(StoreError, match="not the path of an entry"):
        bundle.unpack(str(path), str(tmp_path / "store" / "v1"))
    assert not (tmp_path / "store").exists()


def test_members_that_are_there_twice_are_refused(shipped: Path, tmp_path: Path) -> None:
    files = contents(shipped)
    listed = [each for each in all_of(files) for _ in range(2)]
    path = crafted(tmp_path / "file", files, listed)
    with pytest.raises(StoreError, match="twice, or out of order"):
        bundle.read_bundle(str(path))


@pytest.mark.parametrize("size", [-1, 1 << 40, (4 << 30) - 5])
def test_sizes_that_cannot_be_are_refused(size: int, shipped: Path, tmp_path: Path) -> None:
    files = contents(shipped)
    name, _, sha256 = all_of(files)[0]
    path = crafted(tmp_path / "file", files, [(name, size, sha256), *all_of(files)[1:]])
    with pytest.raises(StoreError, match="is refused"):
        bundle.read_bundle(str(path))


def test_a_link_in_the_zip_directory_is_refused(shipped: Path, tmp_path: Path) -> None:
    """Its own index is right; only unzip would make a link of it."""
    path = tmp_path / "file"
    bundle.write_bundle(str(shipped), str(path))
    data = path.read_bytes()
    mode = (0o100644 << 16).to_bytes(4, "little")
    assert data.count(mode) == 7
    path.write_bytes(data.replace(mode, (0o120777 << 16).to_bytes(4, "little")))
    with pytest.raises(StoreError, match="zip directory"):
        bundle.read_bundle(str(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op": "other"}, "does not match its manifest"),
        ({"distribution": "other"}, "does not match its manifest"),
        ({"size": 3}, "does not match its manifest"),
        ({"sha256": "0" * 64}, "does not match its manifest"),
        ({"payload": "gone.so"}, "'gone.so' is missing"),
        ({"payload": None}, "manifest.json: payload is None, not a string"),
        ({"deps": {**layer.DEPS, "others": "x"}}, "does not match its manifest"),
        ({"deps": []}, "manifest.json: deps is \\[\\], not an object"),
        ({"schema": 99}, "unknown schema 99; this opkiln reads schema"),
    ],
)
def test_an_entry_whose_parts_disagree_is_refused_before_any_is_taken(
    changes: dict[str, object], message: str, shipped: Path, tmp_path: Path
) -> None:
    layer.add(shipped, "zzz", b"data", changes=changes)
    files = contents(shipped)
    path = crafted(tmp_path / "file", files, all_of(files))
    with pytest.raises(StoreError, match=message):
        bundle.unpack(str(path), str(tmp_path / "store" / "v1"))
    assert not (tmp_path / "store").exists()


def test_a_fifo_or_a_missing_file_is_an_error_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(StoreError, match="not a regular file"):
        bundle.read_bundle(str(tmp_path / "fifo"))
    with pytest.raises(StoreError, match="No such file"):
        bundle.read_bundle(str(tmp_path / "absent"))


# As a layer


def test_an_entry_is_read_into_sealed_memory(shipped: Path, file: Path) -> None:
    leaf = good(file)
    assert leaf.directory.startswith(f"{file}!v1/ops/somebody/one/")
    assert Path(leaf.payload).read_bytes() == next(shipped.rglob("one.so")).read_bytes()
    assert leaf.payload.startswith("/proc/")
    fd = int(leaf.payload.rpartition("/")[2])
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 1)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0)
    assert good(file) == leaf


def test_two_libraries_never_have_the_same_path(file: Path) -> None:
    """The dynamic linker would take the second for the first."""
    first = good(file)
    os.close(int(first.payload.rpartition("/")[2]))  # as a daemon closes all of its descriptors
    assert good(file, "two").payload != first.payload
    again = good(file)
    assert again.payload != first.payload
    assert Path(again.payload).read_bytes().startswith(b"\x7fELF")


def test_a_childs_own_path_leads_to_the_library(file: Path) -> None:
    code = (
        "import os, sys\n"
        "from opkiln.store import archive\n"
        "from opkiln.store.key import Hasher\n"
        "find = lambda: archive.examine(sys.argv[1], {}, Hasher()).payload\n"
        "mine = find()\n"
        "if os.fork() == 0:\n"
        "    os._exit(not (find() != mine and open(find(), 'rb').read(4) == b'\\x7fELF'))\n"
        "sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, good(file).directory], check=False)
    assert done.returncode == 0


def test_an_absent_op_is_no_refusal(file: Path) -> None:
    assert archive.leaves(str(file), "somebody", "on") == []
    assert archive.leaves(str(file), "somebody", "three") == []


def test_a_bundle_that_everybody_can_write_to_is_refused(file: Path) -> None:
    leaf = good(file).directory
    file.chmod(0o666)
    with pytest.raises(StoreError, match="writable by everybody"):
        archive.leaves(str(file), "somebody", "one")
    found = archive.examine(leaf, {}, Hasher())
    assert isinstance(found, Refused)
    assert "writable by everybody" in found.reason


def test_damage_to_an_entry_is_found_when_it_is_read(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[data.index(bytes(range(256)))] ^= 1
    file.write_bytes(data)
    found = find(file)
    assert isinstance(found, Refused)
    assert found.damaged
    assert "one.so has the SHA-256" in found.reason
    assert good(file, "two").manifest["op"] == "two"


def test_an_entry_of_other_sources_is_refused(tmp_path: Path) -> None:
    deps = {**layer.DEPS, "own": [["src", "op.cpp", hashlib.sha256(b"mine").hexdigest()]]}
    made = layer.add(tmp_path / "layer", "one", b"data", changes={"deps": deps})
    made.rename(made.with_name(deps_key(deps)))
    file = tmp_path / "file"
    bundle.write_bundle(str(tmp_path / "layer"), str(file))
    (leaf,) = archive.leaves(str(file), "somebody", "one")
    places = {"src": str(tmp_path)}
    (tmp_path / "op.cpp").write_text("mine")
    assert isinstance(archive.examine(leaf, places, Hasher()), Leaf)
    (tmp_path / "op.cpp").write_text("edited")
    found = archive.examine(leaf, places, Hasher())
    assert isinstance(found, Refused)
    assert found.reason == "op.cpp changed"
    assert isinstance(archive.examine(leaf, {}, Hasher(), own=False), Leaf)


def test_the_manifest_of_an_entry_is_read_alone(file: Path) -> None:
    (leaf,) = archive.leaves(str(file), "somebody", "two")
    assert leaf == f"{file}!v1/ops/somebody/two/{'a' * 40}/{'b' * 40}/{layer.NAME}"
    assert archive.manifest(leaf)["op"] == "two"


def test_a_file_that_is_no_bundle_is_no_layer(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"{__file__} is not a bundle\n.*{archive.INDEX}$"):
        archive.leaves(__file__, "somebody", "one")
    wheel = tmp_path / "ops-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as other:
        other.writestr("opkiln_prebuilt/ops/v1/x", b"")
    for reads in (bundle.read_bundle, archive.Bundle):
        with pytest.raises(StoreError, match=f"is not a bundle\n.*\nhint: pip install {wheel}$"):
            reads(str(wheel))
    with pytest.raises(StoreError, match="cannot be read"):
        archive.leaves(str(tmp_path / "absent"), "somebody", "one")
    found = archive.examine(f"{__file__}!v1/ops/x", {}, Hasher())
    assert found == Refused(f"{__file__}!v1/ops/x", f"{__file__} is not a bundle")


def test_a_listed_file_is_a_layer_and_a_listed_directory_is_one(file: Path, shipped: Path) -> None:
    with override(store_layers=(str(file), str(shipped))):
        listed = [layer for layer in layers.choose().layers if layer.listed]
    assert [(layer.root, layer.bundle) for layer in listed] == [
        (str(file), True),
        (str(shipped / "v1"), False),
    ]


def test_the_doctor_passes_a_listed_bundle_and_warns_of_one_that_is_gone(file: Path) -> None:
    from opkiln.report.doctor import directories
    from opkiln.report.doctor.terms import Facts

    with override(store_layers=(str(file),)):
        assert directories.layers(Facts()).verdict == "PASS"
    gone = f"{file}.gone"
    with override(store_layers=(str(file), gone)):
        told = directories.layers(Facts())
    assert (told.verdict, gone in told.evidence) == ("WARN", True)
    assert told.command == f"ls -ld {gone}"
