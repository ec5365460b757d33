"""Looking through a store, checking it and making it smaller, while others use it."""

from __future__ import annotations

import json
import mmap
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sample.levels import X86_V3

from opkiln.building import gather
from opkiln.errors import StoreError
from opkiln.machine import facts
from opkiln.settings import override
from opkiln.store import entry, gc, inventory, key, publish

if TYPE_CHECKING:
    from collections.abc import Callable

    from opkiln.store.inventory import StoreEntry

DAY = 24 * 3600.0
KEY = "0123456789abcdef0123456789abcdef01234567"


class Shelf:
    """A store with leaves that are made as builds make them, but for their contents."""

    def __init__(self, tmp_path: Path) -> None:
        self.root = str(tmp_path / "store" / "v1")
        self._made = tmp_path / "made"
        self._made.mkdir()

    def op(self, name: str, *, size: int = 1000, days: float = 0, source: str = "") -> Path:
        """Publish an entry that was last used some days ago."""
        lists = {
            "inputs": {"spec": {"sources": [source]}, "toolchain": {"gcc": {"version": "g++ 12"}}},
        }  # fmt: skip
        target = {"backend": "cpu", "archs": [], "cpu": X86_V3, "cpu_features": ["avxvnni"]}
        manifest = {"kind": "plain", "op": name, "target": target}
        return self._put(f"ops/acme/{name}/{KEY}/{KEY}", f"{name}.so", manifest, lists, size, days)

    def object(self, source: str, *, size: int = 1000, days: float = 0) -> Path:
        """Publish a compiled object."""
        key = f"{abs(hash(source)):040x}"[:40]
        manifest = {"kind": "object", "source": source}
        return self._put(f"objects/{key[:2]}/{key}", "a.o", manifest, {}, size, days)

    def _put(
        self, where: str, payload: str, manifest: dict, lists: dict, size: int, days: float
    ) -> Path:
        number = len(list(self._made.iterdir()))
        read = (key.Fact("file", "src", f"{number}.cpp", KEY, facts.UNSIGNED),)
        made = self._made / str(number)
        made.mkdir()
        (made / payload).write_bytes(os.urandom(size))
        leaf = str(made / "leaf")
        name = gather.write(leaf, str(made / payload), manifest, read, lists)
        final = publish.publish(leaf, self.root, f"{where}/{name}")
        self.age(Path(final), days)
        return Path(final)

    @staticmethod
    def age(directory: Path, days: float) -> None:
        then = time.time() - days * DAY
        for path in (*directory.iterdir(), directory):
            os.utime(path, (then, then))

    def names(self) -> list[str]:
        return [each.name for each in inventory.entries(self.root) if each.kind == inventory.OP]

    def only(self) -> StoreEntry:
        (found,) = inventory.entries(self.root)
        return found

    def faults(self) -> list[inventory.Fault]:
        return [fault for _, fault in inventory.verify(self.root) if fault is not None]

    def staged(self) -> list[str]:
        return os.listdir(os.path.join(self.root, "staging"))


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


@pytest.fixture(autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory) -> object:
    """No test sweeps the machine's own temporary directory."""
    directory = tmp_path_factory.mktemp("scratch")
    with override(tmpdir=str(directory)):
        yield directory


# Looking


def test_an_entry_is_listed_with_what_its_files_say(shelf: Shelf) -> None:
    leaf = shelf.op("adam", size=5000, source="adam.cpp")
    found = shelf.only()
    assert (found.directory, found.name, found.kind) == (str(leaf), "adam", inventory.OP)
    assert found.payload == str(leaf / "adam.so")
    assert found.size == sum(file.stat().st_size for file in leaf.iterdir()) > 5000
    details = inventory.details(found)
    assert (details.made_for, details.compiler) == (f"{X86_V3}+avxvnni", "g++ 12")
    assert details.sources == ("adam.cpp",)


def test_an_entry_without_a_manifest_is_listed_all_the_same(shelf: Shelf) -> None:
    leaf = shelf.op("adam")
    (leaf / entry.MANIFEST).unlink()
    assert shelf.names() == ["adam"]
    assert inventory.details(shelf.only()).damaged


def test_sizes_count_ops_objects_and_the_rest(shelf: Shelf) -> None:
    shelf.op("adam", size=3000)
    shelf.object("a.cpp", size=7000)
    logs = Path(shelf.root, "logs")
    logs.mkdir()
    (logs / "x.log").write_text("x" * 11)
    found = inventory.sizes(shelf.root)
    assert (found.ops, found.objects, found.other_bytes) == (1, 1, 11)
    assert found.op_bytes > 3000
    assert found.object_bytes > 7000
    assert found.total == found.op_bytes + found.object_bytes + 11


def test_a_store_that_was_never_made_is_empty(tmp_path: Path) -> None:
    root = str(tmp_path / "absent")
    assert inventory.sizes(root).total == 0
    assert gc.collect(root, 1).removed == ()
    assert gc.clear(root) == []
    assert not os.path.exists(root)


def test_a_directory_that_cannot_be_read_is_an_error_that_names_it(shelf: Shelf) -> None:
    shelf.op("adam")
    loop = Path(shelf.root, "ops", "loop")
    loop.symlink_to(loop)
    with pytest.raises(StoreError, match="loop cannot be read"):
        list(inventory.entries(shelf.root))


# Verifying


def _flip(leaf: Path) -> None:
    data = bytearray((leaf / "adam.so").read_bytes())
    data[500] ^= 1
    (leaf / "adam.so").write_bytes(data)


def _rename(leaf: Path) -> None:
    leaf.rename(leaf.with_name(KEY))


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (_flip, "digest"),
        (_rename, "its name does not match"),
        (lambda leaf: (leaf / "adam.so").unlink(), "missing"),
        (lambda leaf: (leaf / entry.MANIFEST).unlink(), "manifest.json is missing"),
        (lambda leaf: (leaf / entry.MANIFEST).write_bytes(b""), "manifest"),
        (lambda leaf: (leaf / entry.SIDECAR).write_bytes(b"{}"), "manifest"),
        (lambda leaf: (leaf / entry.SIDECAR).unlink(), "inputs.json"),
    ],
)
def test_damage_of_any_file_of_an_entry_is_found(
    shelf: Shelf, harm: Callable[[Path], None], reason: str
) -> None:
    leaf = shelf.op("adam")
    assert shelf.faults() == []
    harm(leaf)
    (fault,) = shelf.faults()
    assert fault.damaged
    assert reason in fault.reason


def test_an_entry_that_others_can_write_to_is_refused_but_not_damaged(shelf: Shelf) -> None:
    (shelf.op("adam") / "adam.so").chmod(0o666)
    (fault,) = shelf.faults()
    assert not fault.damaged
    assert "writable by others" in fault.reason


def test_verifying_does_not_count_as_use(shelf: Shelf) -> None:
    shelf.op("adam", days=5)
    before = shelf.only().used
    assert shelf.faults() == []
    assert shelf.only().used == pytest.approx(before, abs=0.01)


# Collecting


def test_what_was_not_used_for_the_longest_time_goes_first_and_only_as_much_as_needed(
    shelf: Shelf,
) -> None:
    for name, days in (("middle", 20), ("oldest", 30), ("newest", 10)):
        shelf.op(name, size=10_000, days=days)
    total = inventory.sizes(shelf.root).op_bytes
    done = gc.collect(shelf.root, total - 1)
    assert [each.name for each in done.removed] == ["oldest"]
    assert shelf.names() == ["middle", "newest"]
    assert done.after == inventory.sizes(shelf.root).op_bytes <= total - 1


def test_reading_a_payload_counts_as_use(shelf: Shelf) -> None:
    read, other = shelf.op("read", days=30), shelf.op("other", days=20)
    # As a mount with relatime does when a library is loaded.
    os.utime(read / "read.so", (time.time() - 10 * DAY, (read / "read.so").stat().st_mtime))
    total = inventory.sizes(shelf.root).op_bytes
    done = gc.collect(shelf.root, total - 1)
    assert [each.directory for each in done.removed] == [str(other)]


def test_nothing_is_removed_while_the_store_is_small_enough(shelf: Shelf) -> None:
    shelf.op("adam", days=300)
    assert gc.collect(shelf.root, 1 << 20).removed == ()


def test_what_was_used_within_a_day_is_spared_unless_now(shelf: Shelf) -> None:
    shelf.op("fresh", days=0.5)
    shelf.op("old", days=1.5)
    done = gc.collect(shelf.root, 1)
    assert [each.name for each in done.removed] == ["old"]
    assert done.recent == 1
    assert [each.name for each in gc.collect(shelf.root, 1, now=True).removed] == ["fresh"]


def test_an_entry_that_is_mapped_here_is_never_removed(shelf: Shelf) -> None:
    leaf = shelf.op("loaded", days=30)
    shelf.op("idle", days=20)
    with open(leaf / "loaded.so", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    os.utime(leaf / "loaded.so", (0, 0))
    done = gc.collect(shelf.root, 1, now=True)
    assert [each.name for each in done.removed] == ["idle"]
    assert (done.in_use, shelf.names()) == (1, ["loaded"])
    mapped.close()
    assert [each.name for each in gc.collect(shelf.root, 1, now=True).removed] == ["loaded"]


def test_an_entry_mapped_by_another_path_is_recognised(shelf: Shelf, tmp_path: Path) -> None:
    leaf = shelf.op("loaded")
    link = tmp_path / "elsewhere"
    link.symlink_to(Path(shelf.root))
    hard = tmp_path / "other" / "loaded.so"  # as another mount of the directory would look
    hard.parent.mkdir()
    os.link(leaf / "loaded.so", hard)
    with open(hard, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    (found,) = inventory.entries(str(link))
    assert gc.processes().uses(found)
    mapped.close()
    assert not gc.processes().uses(found)


def test_removing_leaves_no_half_entry_and_no_empty_directory(shelf: Shelf) -> None:
    shelf.op("adam", days=30)
    shelf.object("a.cpp", days=30)
    gc.collect(shelf.root, 1)
    assert shelf.staged() == []
    assert [files for _, _, files in os.walk(shelf.root) if files] == []
    assert os.listdir(os.path.join(shelf.root, "ops")) == []


@pytest.mark.timed
def test_a_reader_finds_an_entry_whole_or_not_at_all(shelf: Shelf) -> None:
    leaves = [shelf.op(f"op{number}", size=200_000, days=30) for number in range(40)]
    wrong: list[object] = []
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            for leaf in leaves:
                names = {file.name for file in leaf.iterdir()} if leaf.is_dir() else set()
                # A listing is not atomic: empty means that the rename came in between.
                if names and len(names) != 4 and leaf.is_dir():
                    wrong.append((leaf, names))

    reader = threading.Thread(target=_quiet(read, wrong))
    reader.start()
    try:
        gc.collect(shelf.root, 1)
    finally:
        ended.set()
        reader.join()
    assert wrong == []


def _quiet(work: Callable[[], None], wrong: list[object]) -> Callable[[], None]:
    def run() -> None:
        while True:
            try:
                return work()
            except FileNotFoundError:
                continue  # removed between two looks
            except BaseException as error:
                wrong.append(error)
                raise

    return run


def test_a_publisher_never_loses_its_directory_to_a_collector(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[gc.Collected] = []
    make_private = publish.make_private

    def made_and_collected(path: str) -> None:
        # A collector runs at the worst moment: the parent is made and still empty.
        make_private(path)
        if "/ops/" in path and len(runs) < 3:
            runs.append(gc.collect(shelf.root, 1, now=True))
            assert not os.path.exists(path)

    monkeypatch.setattr(publish, "make_private", made_and_collected)
    assert shelf.op("adam").is_dir()
    assert len(runs) == 3


def test_leftovers_of_dead_publishers_are_swept_and_live_ones_are_not(shelf: Shelf) -> None:
    shelf.op("adam")
    staging = Path(shelf.root, "staging")
    for name, hours in (("dead", 2), ("live", 0.5)):
        (staging / name).mkdir()
        (staging / name / "file").write_text("x")
        shelf.age(staging / name, hours / 24)
    done = gc.collect(shelf.root, 1 << 30)
    assert done.swept == (str(staging / "dead"),)
    assert shelf.staged() == ["live"]


def test_records_that_were_never_finished_are_swept_and_the_others_are_not(shelf: Shelf) -> None:
    """A process that is killed between the write and the rename leaves one, whole or half."""
    payload = os.path.relpath(shelf.op("adam") / "adam.so", shelf.root)
    text = json.dumps({"payload": payload})
    left = set()
    for top, final in (("toolchains", "a.json"), ("toolchains", "observer-0123"),
                       ("failures", "a.json"), ("logs", "a.log"),
                       ("receipts/acme/adam", "a.json")):  # fmt: skip
        Path(shelf.root, top).mkdir(parents=True, exist_ok=True)
        dead, live = f"{final}.123-00000000dead", f"{final}.123-000000000000"
        for name, hours in ((final, 2), (dead, 2), (live, 0.5)):
            path = Path(shelf.root, top, name)
            path.write_text(text)
            os.utime(path, (time.time() - hours * 3600,) * 2)
            left |= set() if "dead" in name else {str(path)}
    done = gc.collect(shelf.root, 1 << 30)
    assert len(done.swept) == 5
    assert all(path.endswith("dead") for path in done.swept)
    tops = ("toolchains", "failures", "logs", "receipts")
    found = {str(path) for top in tops for path in Path(shelf.root, top).rglob("*")
             if path.is_file()}  # fmt: skip
    assert found == left


def test_old_build_directories_are_swept_unless_somebody_works_there(
    shelf: Shelf, scratch: Path
) -> None:
    dead, live, used = (Path(publish.make_scratch(name)) for name in ("adam", "adam", "private"))
    foreign = [scratch / "opkiln-1000", Path(tempfile.mkdtemp(prefix="opkiln-mine-", dir=scratch))]
    foreign[0].mkdir(mode=0o700)
    for directory in (dead, live, used, *foreign):
        (directory / "file").write_bytes(b"x" * 100)
        shelf.age(directory, 0 if directory is live else 2 / 24)
    with open(used / "file", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    done = gc.collect(shelf.root, 1 << 30)
    assert done.swept == (str(dead),)
    assert sorted(scratch.iterdir()) == sorted([live, used, *foreign])
    mapped.close()


def test_a_long_build_timeout_lengthens_the_life_of_build_directories(
    shelf: Shelf, scratch: Path
) -> None:
    directory = Path(publish.make_scratch("adam"))
    shelf.age(directory, 5 / 24)
    with override(build_timeout=4 * 3600.0):
        assert gc.collect(shelf.root, 1 << 30).swept == ()
    assert gc.collect(shelf.root, 1 << 30).swept == (str(directory),)


def test_receipts_of_removed_entries_go_with_them(shelf: Shelf) -> None:
    kept, gone = shelf.op("kept", days=0.1), shelf.op("gone", days=30)
    receipts = Path(shelf.root, "receipts", "acme", "op")
    receipts.mkdir(parents=True)
    for name, leaf in (("kept", kept), ("gone", gone)):
        payload = os.path.relpath(leaf / f"{name}.so", shelf.root)
        (receipts / f"{name}.json").write_text(json.dumps({"payload": payload}))
    gc.collect(shelf.root, 1)
    assert os.listdir(receipts) == ["kept.json"]


# Clearing


def test_clear_removes_everything_that_can_be_rebuilt(shelf: Shelf) -> None:
    shelf.op("adam")
    shelf.object("a.cpp")
    toolchains = Path(shelf.root, "toolchains")
    toolchains.mkdir()
    (toolchains / "gcc.json").write_text("{}")
    removed = gc.clear(shelf.root)
    assert len(removed) == 2
    assert [files for _, _, files in os.walk(shelf.root) if files] == []


def test_clear_of_one_op_takes_its_objects_and_leaves_the_others(shelf: Shelf) -> None:
    shelf.op("adam", source="adam.cpp")
    shelf.op("lion", source="lion.cpp")
    shelf.object("adam.cpp")
    shelf.object("lion.cpp")
    removed = gc.clear(shelf.root, lambda each: each.name == "adam")
    assert sorted(each.kind for each in removed) == ["object", "op"]
    left = [inventory.details(each) for each in inventory.entries(shelf.root)]
    assert sorted(each.source or each.sources[0] for each in left) == ["lion.cpp", "lion.cpp"]
