"""A receipt without a compiler: an entry and the facts it rests on, made by hand."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import stat
import sys
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sample import layer
from sample.signed_files import at_rest, just_saved, sha256

from opkiln.base import digest, model
from opkiln.base.digest import Signature, current_signatures
from opkiln.base.model import ABI_NONE, ABI_STABLE, CPU, CUDA, PACKAGE, PLAIN, Artifact, Op, OpSpec
from opkiln.decision import receipt
from opkiln.decision.archs import Wanted
from opkiln.decision.terms import Request
from opkiln.machine import facts, uname
from opkiln.machine.facts import ABSENT, FILE, LINK, LISTING, PROGRAM
from opkiln.machine.toolchain import torch_sdk
from opkiln.settings import LAYOUT, override

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from opkiln.machine.facts import Evidence

pytestmark = pytest.mark.timed

LIBRARY = b"a library"
HOUR = 3600


class Shop:
    """A store with an entry, and what its search read."""

    def __init__(self, base: Path, cache: Path) -> None:
        self.base, self.cache, self.root = base, cache, cache / LAYOUT
        self.leaf = layer.add(cache, "op", LIBRARY, distribution="dist")
        for path in (self.cache, self.root):
            path.chmod(0o700)
        self.library = self.leaf / "op.so"
        self.source = self.write("src/a.cpp", "int a;")
        self.saved = self.write("src/saved.cpp", "int saved;")  # it has not come to rest
        os.utime(self.saved, (time.time() + HOUR,) * 2)
        self.tool = self.write("tools/cc1plus", "a program")
        self.link = base / "tools" / "link"
        self.link.symlink_to("cc1plus")
        self.include = base / "include"
        self.write("include/a.h", "// a")
        self.plain = self.write("plain/file", "")  # of which it was asked whether it is a link
        self.absent = base / "plain" / "gone"
        self.program = self.write("bin/translator", "#!/bin/sh\n")
        self.program.chmod(0o755)
        (base / "first").mkdir()
        self.read = self.collect()

    def write(self, name: str, text: str) -> Path:
        path = self.base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def collect(self) -> Evidence:
        with facts.collect() as read:
            facts.note_file(str(self.tool), at_rest(self.tool))
            self.note(FILE, self.source)
            self.note(PROGRAM, self.program)
            self.note(LISTING, self.include)
            self.note(ABSENT, self.base / "src", "none.h")
            self.note(FILE, self.saved, signature=just_saved(self.saved))
            facts.note_entry(LINK, str(self.link), "cc1plus", facts.UNSIGNED)
            facts.note_entry(LINK, str(self.plain), "", facts.UNSIGNED)
            facts.note_programs("translator", [str(self.program)])
            facts.note_program(str(self.tool), str(self.tool))
            facts.note_absent(str(self.absent))
        return read

    def note(
        self, kind: str, path: Path, then: str = "", signature: list[int] | None = None
    ) -> None:
        """A fact of the entry holds, of a file that is at rest unless its signature is given."""
        value = facts.value(kind, str(path), then, facts.Hasher())
        facts.note_entry(kind, str(path), value, Signature(*(signature or at_rest(path))))

    @property
    def artifact(self) -> Artifact:
        return Artifact(str(self.library), hashlib.sha256(LIBRARY).hexdigest(), "store")

    def request(self, **changes: Any) -> Request:
        spec = OpSpec("op", "dist", str(self.base / "src"), ("a.cpp",), kind=PLAIN, abi=ABI_NONE)
        return Request(Op(spec._replace(**changes)))

    def keep(self, read: Evidence | None = None, **changes: Any) -> None:
        receipt.write(self.request(**changes), self.artifact, self.read if read is None else read)

    @property
    def receipts(self) -> list[Path]:
        return [path for path in (self.root / "receipts").rglob("*") if path.is_file()]


@pytest.fixture
def shop(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    monkeypatch.setenv("PATH", f"{tmp_path}/first:{tmp_path}/bin:{os.environ['PATH']}")
    cache.mkdir(parents=True)
    return Shop(tmp_path, cache)


def test_receipt_serves_the_entry_that_the_search_found(shop: Shop) -> None:
    assert receipt.recall(shop.request()) is None
    shop.keep()
    assert receipt.recall(shop.request()) == shop.artifact


def test_receipt_is_one_private_file_in_a_place_of_the_ops_own(shop: Shop) -> None:
    shop.keep()
    shop.keep()
    (file,) = shop.receipts
    assert file.parent == shop.root / "receipts" / "dist" / "op"
    assert file.suffix == ".json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def _touch(path: Path) -> None:
    os.utime(path, (1, 1))


def _replace(path: Path, text: str) -> None:
    path.write_text(text)


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _lead(link: Path, text: str) -> None:
    link.unlink()
    link.symlink_to(text)


CHANGES: dict[str, Callable[[Shop], object]] = {
    "a source was edited": lambda shop: _replace(shop.source, "int b;"),
    "a source was saved again": lambda shop: _touch(shop.source),
    "a source that was just saved was edited": lambda shop: _replace(shop.saved, "int edited"),
    "a source that was just saved is gone": lambda shop: shop.saved.unlink(),
    "a source is gone": lambda shop: shop.source.unlink(),
    "a program was replaced": lambda shop: _replace(shop.tool, "A program"),
    "a program was touched": lambda shop: _touch(shop.tool),
    "a program may not be run": lambda shop: shop.program.chmod(0o644),
    "a listed directory has another name": lambda shop: shop.write("include/b.h", ""),
    "a listed directory lacks a name": lambda shop: (shop.include / "a.h").unlink(),
    "the directory is gone": lambda shop: shutil.rmtree(shop.include),
    "a name that was looked for is there": lambda shop: shop.write("src/none.h", ""),
    "another name is where one was looked for": lambda shop: shop.write("src/notes.txt", ""),
    "a link leads elsewhere": lambda shop: _lead(shop.link, "other"),
    "a link is gone": lambda shop: shop.link.unlink(),
    "a link is a file": lambda shop: os.replace(shop.source, shop.link),
    "a file that was no link is one": lambda shop: _link(shop.plain),
    "a name that was missing is there": lambda shop: shop.write("plain/gone", ""),
    "a link to nothing has a name that was missing": lambda shop: shop.absent.symlink_to("/none"),
    "another program is first on PATH": lambda shop: shutil.copy2(
        shop.program, shop.base / "first/translator"
    ),
    "a program is no longer on PATH": lambda shop: shop.program.unlink(),
    "a second program is on PATH": lambda shop: (
        (shop.base / "first/translator").write_text(""),
        shop.program.rename(shop.base / "first/translator"),
    ),
    "the library has other bytes": lambda shop: shop.library.write_bytes(b"A LIBRARY"),
    "the library was cut": lambda shop: shop.library.write_bytes(LIBRARY[:-1]),
    "the library is a link": lambda shop: _link(shop.library),
    "the library is gone": lambda shop: shop.library.unlink(),
    "others may write to the library": lambda shop: shop.library.chmod(0o666),
    "others may write to the entry": lambda shop: shop.leaf.chmod(0o777),
    "others may write to the store": lambda shop: shop.root.chmod(0o777),
    "others may write to the store's place": lambda shop: shop.cache.chmod(0o777),
    "others may write to the receipt": lambda shop: shop.receipts[0].chmod(0o666),
    "the receipt is a link": lambda shop: _link(shop.receipts[0]),
    "the receipt is cut": lambda shop: _replace(shop.receipts[0], "{"),
    "the receipt is something else": lambda shop: _replace(shop.receipts[0], "[]"),
    "the receipt lacks a part": lambda shop: _replace(shop.receipts[0], "{}"),
    "the receipt is nested deeply": lambda shop: _replace(shop.receipts[0], "[" * 100_000),
}


@pytest.mark.parametrize("change", CHANGES)
def test_receipt_does_not_serve_when_something_it_rests_on_has_changed(
    shop: Shop, change: str
) -> None:
    shop.keep()
    CHANGES[change](shop)
    kept = {path: path.read_bytes() for path in shop.receipts}
    assert receipt.recall(shop.request()) is None
    assert {path: path.read_bytes() for path in shop.receipts} == kept, "it writes nothing"


KEPT: dict[str, Callable[[Shop], object]] = {
    "nothing": lambda shop: None,
    "a source that was just saved was saved again": lambda shop: _touch(shop.saved),
    "a directory is new on PATH": lambda shop: os.environ.__setitem__(
        "PATH", f"{shop.base}/nowhere:{os.environ['PATH']}"
    ),
}


@pytest.mark.parametrize("change", KEPT)
def test_receipt_serves_when_the_change_does_not_matter(
    shop: Shop, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"])  # restored afterwards
    shop.keep()
    KEPT[change](shop)
    assert receipt.recall(shop.request()) == shop.artifact


def contents(shop: Shop) -> dict[str, Any]:
    (file,) = shop.receipts
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_file_that_was_just_saved_is_compared_by_its_value_until_it_has_come_to_rest(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then one full search gives it a signature that holds."""
    shop.keep()
    assert contents(shop)["fresh"] == [[FILE, str(shop.saved), sha256(shop.saved)]]
    assert str(shop.saved) not in contents(shop)["files"]
    later = contents(shop)["until"]
    assert later == shop.saved.stat().st_mtime_ns + digest._SETTLED_NS
    monkeypatch.setattr(time, "time_ns", lambda: later - 1)
    assert receipt.recall(shop.request()) == shop.artifact
    monkeypatch.setattr(time, "time_ns", lambda: later)
    assert receipt.recall(shop.request()) is None
    with facts.collect() as read:
        shop.note(FILE, shop.saved, signature=[*Signature.of(str(shop.saved))])
    shop.keep(read)
    assert contents(shop)["fresh"] == []
    assert receipt.recall(shop.request()) == shop.artifact


def test_file_whose_times_do_not_count_is_compared_by_its_value_for_ever(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        source, mark = str(shop.source), digest.change_mark
        patch.setattr(
            digest,
            "change_mark",
            lambda path, found: None if path == source else mark(path, found),
        )
        with facts.collect() as read:
            shop.note(FILE, shop.source, signature=[*Signature.of(str(shop.source))])
        shop.keep(read)
    ahead = time.time_ns() + 10**18
    monkeypatch.setattr(time, "time_ns", lambda: ahead)
    assert receipt.recall(shop.request()) == shop.artifact
    before = shop.source.stat()
    shop.source.write_text("int b;")
    os.utime(shop.source, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert receipt.recall(shop.request()) is None


def test_a_directory_that_is_not_there_is_looked_for_anew_for_ever(shop: Shop) -> None:
    nowhere = str(shop.base / "nowhere")
    with facts.collect() as read:
        facts.note_entry(ABSENT, nowhere, "a.h", facts.UNSIGNED)
    shop.keep(read)
    assert contents(shop)["until"] > time.time_ns()
    assert receipt.recall(shop.request()) == shop.artifact
    shop.write("nowhere/a.h", "")
    assert receipt.recall(shop.request()) is None


# PATH


@pytest.fixture
def calm(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> Shop:
    """A shop in which everything has come to rest, with ``first`` and ``bin`` on PATH."""
    monkeypatch.setattr(digest, "_SETTLED_NS", -60_000_000_000)
    monkeypatch.setenv("PATH", f"{shop.base}/first:{shop.base}/bin:{shop.base}/last")
    return shop


def kept_path(shop: Shop) -> dict[str, Any]:
    shop.keep()
    kept = contents(shop)
    return {name: kept[name] for name in ("programs", "path", "path_homes", "path_signatures")}


def test_path_is_known_by_its_directories_up_to_the_last_program(calm: Shop) -> None:
    calm.read.programs["translator"] = [str(calm.program)]
    first, second = str(calm.base / "first"), str(calm.base / "bin")
    assert kept_path(calm) == {
        "programs": [["translator", [str(calm.program)]]],
        "path": [first, second], "path_homes": [first, second],
        "path_signatures": current_signatures((first, second)),
    }  # fmt: skip
    assert receipt.recall(calm.request()) == calm.artifact


def test_path_is_known_to_its_end_where_a_name_was_looked_for_in_all_of_it(calm: Shop) -> None:
    first, second, last = (str(calm.base / name) for name in ("first", "bin", "last"))
    kept = kept_path(calm)
    assert kept["programs"] == [["translator", [str(calm.program), None]]]
    assert kept["path"] == [first, second, last]
    assert kept["path_homes"] == [first, second, str(calm.base)], "the nearest that exists"
    assert kept["path_signatures"] == current_signatures((first, second, str(calm.base)))
    assert receipt.recall(calm.request()) == calm.artifact


def test_search_that_looked_up_no_program_rests_on_no_directory_of_path(
    calm: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm.read.programs.clear()
    assert kept_path(calm) == {
        "programs": [], "path": [], "path_homes": [], "path_signatures": [],
    }  # fmt: skip
    monkeypatch.setenv("PATH", str(calm.base / "first"))
    assert receipt.recall(calm.request()) == calm.artifact


def a_program(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


def test_program_that_is_new_on_path_ends_it_also_in_a_directory_that_was_not_there(
    calm: Shop,
) -> None:
    shutil.rmtree(calm.base / "first")
    calm.keep()
    assert receipt.recall(calm.request()) == calm.artifact
    a_program(calm.base / "first" / "translator")
    assert receipt.recall(calm.request()) is None
    shutil.rmtree(calm.base / "first")
    calm.keep()
    assert receipt.recall(calm.request()) == calm.artifact
    a_program(calm.base / "last" / "translator")
    assert receipt.recall(calm.request()) is None


def test_another_path_that_leads_to_the_same_programs_does_not_end_it(
    calm: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm.keep()
    monkeypatch.setenv("PATH", str(calm.base / "bin"))
    assert receipt.recall(calm.request()) == calm.artifact
    monkeypatch.setenv("PATH", str(calm.base / "last"))
    assert receipt.recall(calm.request()) is None


def test_program_in_a_directory_that_is_new_in_front_of_path_ends_it(
    calm: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_program(calm.base / "front" / "translator")
    calm.keep()
    assert receipt.recall(calm.request()) == calm.artifact
    monkeypatch.setenv("PATH", f"{calm.base}/front:{os.environ['PATH']}")
    assert receipt.recall(calm.request()) is None


@pytest.mark.parametrize("name", ["first", "bin"])
def test_change_in_a_directory_of_path_ends_it(calm: Shop, name: str) -> None:
    calm.keep()
    (calm.base / name / "notes.txt").write_text("")
    assert receipt.recall(calm.request()) is None
    calm.keep()
    assert receipt.recall(calm.request()) == calm.artifact
    shutil.rmtree(calm.base / name)
    assert receipt.recall(calm.request()) is None


def test_programs_are_not_looked_up_where_the_directories_of_path_are_as_they_were(
    calm: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm.keep()
    looked_up = receipt.on_path

    def on_path(name: str) -> Iterator[str]:
        assert name != "translator"
        return looked_up(name)

    monkeypatch.setattr(receipt, "on_path", on_path)
    assert receipt.recall(calm.request()) == calm.artifact


def test_file_that_may_become_a_program_has_the_programs_looked_up(calm: Shop) -> None:
    sleeping = calm.base / "first" / "translator"
    sleeping.write_text("#!/bin/sh\n")
    assert kept_path(calm)["path_signatures"] == []
    assert receipt.recall(calm.request()) == calm.artifact
    sleeping.chmod(0o755)
    assert receipt.recall(calm.request()) is None


@pytest.mark.parametrize("odd", ["relative", "just changed"])
def test_path_that_cannot_be_known_by_its_directories_has_the_programs_looked_up(
    calm: Shop, odd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if odd == "relative":
        monkeypatch.chdir(calm.base)
        monkeypatch.setenv("PATH", f"nowhere/bin:first:{calm.base}/bin")
    else:
        ahead = time.time() + 10_000  # by a clock that is ahead, which is no better
        os.utime(calm.base / "first", (ahead, ahead))
    assert kept_path(calm)["path_signatures"] == []
    assert receipt.recall(calm.request()) == calm.artifact


def test_program_that_is_new_or_gone_on_path_since_the_search_leaves_no_receipt(calm: Shop) -> None:
    a_program(calm.base / "first" / "translator")
    calm.keep()
    assert calm.receipts == []
    (calm.base / "first" / "translator").unlink()
    calm.program.unlink()
    calm.keep()
    assert calm.receipts == []


def test_programs_that_two_parts_of_a_search_saw_differently_leave_no_receipt(calm: Shop) -> None:
    chosen = facts.join_names(
        [str(calm.program), "/nowhere/translator", "/nowhere/else/translator"]
    )
    calm.read.entry.append((facts.CHOICE, "translator", chosen, facts.UNSIGNED))
    calm.keep()
    assert calm.receipts == []


def test_program_that_the_entrys_script_chose_is_looked_up_like_one_of_the_search(
    calm: Shop,
) -> None:
    calm.read.programs.clear()
    calm.read.entry.insert(0, (facts.CHOICE, "translator", str(calm.program), facts.UNSIGNED))
    assert kept_path(calm)["programs"] == [["translator", [str(calm.program)]]]
    assert str(calm.source) in contents(calm)["files"]  # what came after it counts, too
    assert receipt.recall(calm.request()) == calm.artifact
    a_program(calm.base / "first" / "translator")
    assert receipt.recall(calm.request()) is None


def test_file_that_has_come_to_rest_since_it_was_read_is_known_by_its_signature(calm: Shop) -> None:
    path = str(calm.source)
    just = Signature(*current_signatures((path,)), calm.source.stat().st_ctime_ns - 61_000_000_000)
    calm.read.entry = [(FILE, path, sha256(calm.source), just)]
    calm.keep()
    assert (contents(calm)["fresh"], contents(calm)["until"]) == ([], 0)
    assert str(calm.source) in contents(calm)["files"]


# Images


def test_file_in_an_image_is_known_by_its_mount(
    calm: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount, change = digest._FIRST - 5, digest.change_mark
    source = str(calm.source)
    monkeypatch.setattr(
        digest, "change_mark", lambda path, found: mount if path == source else change(path, found)
    )
    signature = Signature.of(source)
    assert signature.in_image
    calm.read = calm.collect()
    others = [each for each in calm.read.entry if each[1] != source]
    calm.read.entry = [*others, (FILE, source, sha256(calm.source), signature)]
    calm.keep()
    kept = contents(calm)
    assert kept["images"] == [[source, *signature]]
    assert source not in kept["files"]
    assert receipt.recall(calm.request()) == calm.artifact
    mount -= 1  # another image is mounted there, or the same one again
    assert receipt.recall(calm.request()) is None


def test_what_cannot_be_told_from_an_edit_leaves_no_receipt(shop: Shop) -> None:
    shop.read.files[str(shop.tool)] = tuple(just_saved(shop.tool))  # nothing else is known of it
    shop.keep()
    assert shop.receipts == []


def test_an_edit_between_the_search_and_the_receipt_leaves_none(shop: Shop) -> None:
    shop.source.write_text("int b;")
    shop.keep()
    assert shop.receipts == []


@pytest.mark.parametrize("changed", [0, 1])
def test_a_path_that_changed_between_two_looks_leaves_none(calm: Shop, changed: int) -> None:
    """Names were missing from a directory at first; then it changed, and then it was listed."""
    place = str(calm.source.parent)
    now = Signature.of(place)._replace(read_at=1 << 62)
    before = now._replace(size=now.size + changed)
    calm.read = calm.collect()
    calm.read.entry = [(ABSENT, place, "a.h", before), (LISTING, place, "", now)]
    calm.keep()
    assert len(calm.receipts) == 1 - changed


def test_a_search_that_rests_on_more_than_files_leaves_no_receipt(shop: Shop) -> None:
    shop.read.complete = False
    shop.keep()
    assert shop.receipts == []


def test_an_entry_of_another_layer_leaves_no_receipt(shop: Shop, tmp_path: Path) -> None:
    beside = shop.root.with_name(f"{LAYOUT}-more") / "op.so"
    beside.parent.mkdir()
    beside.write_bytes(LIBRARY)
    receipt.write(shop.request(), shop.artifact._replace(path=str(beside)), shop.read)
    assert shop.receipts == []


def test_a_store_that_is_not_written_to_gets_no_receipt(shop: Shop) -> None:
    shop.cache.chmod(0o777)  # anybody's: another place is the store
    request = shop.request()
    assert request.store.root != str(shop.root)
    receipt.write(request, shop.artifact, shop.read)
    assert shop.receipts == []


def test_a_store_that_cannot_take_a_receipt_is_left_as_it_was(shop: Shop) -> None:
    shop.keep()
    (file,) = shop.receipts
    file.unlink()
    file.mkdir()
    shop.keep()
    assert os.listdir(file.parent) == [file.name]
    assert os.listdir(file) == []
    shutil.rmtree(shop.root / "receipts")
    (shop.root / "receipts").write_text("in the way")
    shop.keep()
    assert (shop.root / "receipts").read_text() == "in the way"


def test_a_library_that_is_gone_leaves_no_receipt(shop: Shop) -> None:
    shop.library.unlink()
    shop.keep()
    assert shop.receipts == []


def _name(request: Request, torch: str | None = "") -> str:
    place = receipt._place(request, torch)
    assert place is not None
    return place[1]


OTHERS: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "a flag": lambda patch: patch.setenv("CXXFLAGS", "-DX"),
    "another CPU": lambda patch: patch.setattr(uname, "cpu_flags", lambda: "mmx"),
    "another architecture": lambda patch: patch.setattr(uname, "architecture", lambda: "riscv"),
    "another system": lambda patch: patch.setattr(uname, "system", lambda: "plan9"),
    "another Python": lambda patch: patch.setattr(sys, "version", "4.0"),
    "another opkiln": lambda patch: patch.setattr(receipt, "__version__", "other"),
    "another form of receipts": lambda patch: patch.setattr(receipt, "SCHEMA", 0),
    "another plan": lambda patch: patch.setattr(receipt, "PLAN_VERSION", model.PLAN_VERSION + 1),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_is_not_a_file_is_in_the_receipts_name(
    shop: Shop, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _name(shop.request())
    OTHERS[other](monkeypatch)
    assert _name(shop.request()) != before


def test_two_declarations_of_an_op_have_receipts_of_their_own(shop: Shop) -> None:
    shop.keep()
    assert receipt.recall(shop.request(cxx_args=("-DX",))) is None
    assert receipt.recall(shop.request(name="other")) is None
    assert receipt.recall(shop.request()) == shop.artifact


def test_two_architectures_of_a_gpu_have_receipts_of_their_own_and_a_cpu_op_none_of_them(
    shop: Shop,
) -> None:
    def named(backend: str, *archs: str) -> str:
        request = shop.request(backend=backend)
        request.__dict__["wanted"] = Wanted(archs=archs)
        return _name(request)

    assert named(CUDA, "9.0") != named(CUDA, "10.0")
    assert named(CPU, "9.0") == named(CPU, "10.0")


@pytest.mark.parametrize("variable", ["", "mycxx", "launcher mycxx", "env launcher mycxx"])
def test_two_compilers_of_a_name_have_receipts_of_their_own(
    shop: Shop, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv("CXX", variable)
    before = _name(shop.request())
    compiler = shop.write("first/mycxx" if variable else "first/g++", "#!/bin/sh\n")
    compiler.chmod(0o755)
    assert _name(shop.request()) != before
    launcher = shop.write("first/launcher", "#!/bin/sh\n")
    with_compiler = _name(shop.request())
    launcher.chmod(0o755)
    assert _name(shop.request()) == with_compiler


def test_no_receipt_is_looked_for_where_a_setting_is_overridden(shop: Shop) -> None:
    shop.keep()
    with override(debug=True):
        assert receipt.recall(shop.request()) is None
        shop.read = shop.collect()
        shop.keep()
    assert len(shop.receipts) == 1
    assert receipt.recall(shop.request()) == shop.artifact


def test_an_op_on_torch_has_a_receipt_for_each_torch_and_none_before_torch_is_imported(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdk = torch_sdk.find()
    assert sdk is not None
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    shop.keep(abi=ABI_STABLE)  # a build before torch is imported: the one that would be
    assert receipt.recall(shop.request(abi=ABI_STABLE)) is None
    torch = types.ModuleType("torch")
    torch.__file__ = os.path.join(sdk.path, "__init__.py")
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert receipt.recall(shop.request(abi=ABI_STABLE)) == shop.artifact
    torch.__file__ = "/elsewhere/torch/__init__.py"
    assert receipt.recall(shop.request(abi=ABI_STABLE)) is None
    shop.keep(abi=ABI_STABLE)
    assert receipt.recall(shop.request(abi=ABI_STABLE)) == shop.artifact
    assert receipt.recall(shop.request()) is None


def test_an_op_without_torch_has_the_same_receipt_whichever_torch_is_imported(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.keep()
    torch = types.ModuleType("torch")
    torch.__file__ = "/elsewhere/torch/__init__.py"
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert receipt.recall(shop.request()) == shop.artifact


def test_receipt_rests_on_the_code_that_decides(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opkiln.store.bare", types.ModuleType("bare"))
    for name, file in (
        ("opkiln.store.absent", None),
        ("opkiln.store.planted", "/elsewhere/planted.py"),
        ("opkiln_more.store", f"{PACKAGE}/more.py"),
    ):
        module = types.ModuleType(name)
        module.__file__ = file
        monkeypatch.setitem(sys.modules, name, module)
    shop.keep()
    (kept,) = shop.receipts
    files = json.loads(kept.read_text())["files"]
    ours = {os.path.relpath(file, PACKAGE) for file in files if file.startswith(f"{PACKAGE}/")}
    assert {
        "decision/receipt.py", "machine/facts.py", "machine/toolchain/torch_sdk.py",
        "machine/arch/cpu.py", "base/digest.py", "base/model.py", "settings.py",
    } <= ours  # fmt: skip
    assert not {"errors.py", "more.py", "__init__.py"} & ours
    assert "/elsewhere/planted.py" not in files


def test_module_of_a_room_has_no_code_and_is_not_looked_at(shop: Shop) -> None:
    shop.keep()
    (kept,) = shop.receipts
    looked_at = json.loads(kept.read_text())["files"]
    for path in (
        each for room in receipt._ROOMS for each in Path(PACKAGE, room).rglob("__init__.py")
    ):
        (docstring,) = ast.parse(path.read_text()).body
        assert isinstance(docstring, ast.Expr), path
        assert str(path) not in looked_at
