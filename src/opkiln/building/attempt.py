"""One run of an observed command: what it read and wrote, and whether that can be kept."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from functools import partial

from opkiln.building import gather, kept, observed, shell_text
from opkiln.building.kept import Written
from opkiln.building.observing import observer
from opkiln.building.prepared import Prepared, digests
from opkiln.machine import facts
from opkiln.machine.facts import CHOICE, PLACE, UNSIGNED, Hasher
from opkiln.machine.toolchain.find import REMOTE
from opkiln.store.key import Fact
from opkiln.store.layers import Store

_SCANNED = 4 << 20  # bytes of a file that may be a source
_DATES = re.compile(rb"__(?:DATE|TIME|TIMESTAMP)__")
_OWN_NAME = re.compile(rb"__FILE__|__builtin_FILE|source_location|(?i:assert)")


class Attempt:
    """One run of a command, observed."""

    def __init__(
        self, prepared: Prepared, store: Store, stage: str, covered: tuple[str, ...] = ()
    ) -> None:
        """``stage`` is a directory of its own, and what begins with ``covered`` is ours.

        Old outputs are removed: a linker that finds one may read it first, and then nobody knows
        what the new one was made from.
        """
        self.prepared, self.store, self.stage = prepared, store, stage
        self.covered = covered
        self.log = os.path.join(stage, "observed")
        for path in prepared.outputs:
            with contextlib.suppress(OSError):
                if stat.S_ISREG(os.lstat(path).st_mode):
                    os.unlink(path)
        directory = prepared.command.directory
        named = (os.path.join(directory, word.lstrip("@")) for word in prepared.words[1:])
        now = kept.kernel_time(stage)
        fresh = (each for each in named if _changed_since(each, now - 2 * kept.TICK_NS))
        self.snapshot = {**digests, **kept.snapshot_of(fresh)}
        self.began = kept.kernel_time(stage)

    def keep(self, messages: str, wall: float, max_rss: int, rebuilt: Sequence[str]) -> str:
        """Keep what the command made, which has succeeded. Returns why not; empty if it was."""
        prepared, ours = self.prepared, self.prepared.command
        record = observed.read_log(
            self.log, None, self.stage, prepared.first, self.store.memory, self.covered
        )
        if record is None:
            return observed.UNSEEN
        try:
            why = self._find_fault(record)
            if why:
                return why
            paths = list(self._list_written(record))
            found = record.inputs()
            if not kept.surely_read(found.files, found.unseen, self.began, self.snapshot):
                return "a file was edited while it was read"
            hasher = Hasher(partial(observer.digest, memory=self.store.memory))
            known = gather.facts_of(gather.Places(prepared.anchors.places), found, hasher)
            if not record.is_unchanged():
                return "a file was edited while it was read"
            bound = self._scan_sources(found.files)
            written, bound = self._read_written(paths, messages, bound)
            text = messages if bound else prepared.anchors.hide(messages)
            manifest = {
                "source": ours.label, "host": ours.host, "group": ours.group,
                "places": prepared.anchors.places, "messages": text, "wall": round(wall, 3),
                "max_rss": max_rss, "created": time.time(), "rebuilt": "; ".join(rebuilt[:1]),
            }  # fmt: skip
            every = (*known, *self._place_facts(bound), *self._choice_facts())
            made = kept.keep(
                self.store, prepared.name, written, tuple(sorted(set(every))), manifest, self.stage,
                prepared.named,
            )  # fmt: skip
        except _Unkept as error:
            return str(error)
        except gather.Appeared:
            return "a file appeared that had been looked for"
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
        digests.update(made)
        return "" if self.store.root is not None else "no store can be written"

    def _find_fault(self, record: observed.StepRecord) -> str:
        seen = record.seen
        if record.gap:
            return record.gap
        for each in seen.started:
            if os.path.basename(each.program) in REMOTE:
                return f"{each.program} compiles on other hosts"
        ours = os.path.join(self.stage, "")
        for path in seen.extended:
            if not path.startswith(ours) and not _is_device(path):
                return f"{path} was changed, not made anew"
        made = {os.path.normpath(path): path for path in seen.written}
        for path in self.prepared.outputs:
            if path not in made:
                return f"no program was seen to write {path}"
            if not record.conduct.made(made[path]):
                return f"{path} came from a launcher"
        return ""

    def _list_written(self, record: observed.StepRecord) -> Iterator[str]:
        """What is there of all that was written."""
        ours = os.path.join(self.stage, "")
        for path in sorted(set(map(os.path.normpath, record.seen.written))):
            if path.startswith(ours) or _is_device(path):
                continue
            try:
                mode = os.lstat(path).st_mode
            except FileNotFoundError:
                continue  # its own, and gone
            if not stat.S_ISREG(mode):
                raise _Unkept(f"{path} was made, which is not a file")
            if not self.prepared.owns(path):
                raise _Unkept(f"{path} was written, outside of {self.prepared.command.directory}")
            yield path

    def _read_written(
        self, paths: Sequence[str], messages: str, bound: set[str]
    ) -> tuple[list[Written], set[str]]:
        """(the files as they are kept, the anchors whose paths are in one of them or in the
        messages, where they cannot be replaced, besides those that are ``bound``)."""
        anchors = self.prepared.anchors
        bound |= set(anchors.odd)
        if shell_text.hides_paths(self.prepared.words) or "\0" in messages:
            bound = set(anchors.places)
        bound |= anchors.named_in(os.fsencode(anchors.hide(messages)))
        places, written = gather.Places(anchors.places), []
        for path in paths:
            with open(path, "rb") as file:
                large = os.fstat(file.fileno()).st_size > _SCANNED
                data = (
                    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if large else file.read()
                )
            text = None
            named = anchors.named_in(data)
            if named and not bound and isinstance(data, bytes) and _is_depfile(path, data):
                text = anchors.hide(data.decode("utf-8", "surrogateescape")).encode(
                    "utf-8", "surrogateescape"
                )
                named = anchors.named_in(text)
            bound |= named
            written.append(Written(*places.locate(path), path, text))
        return written, bound

    def _place_facts(self, bound: set[str]) -> Iterator[Fact]:
        for name in bound:
            yield Fact(PLACE, name, "", self.prepared.anchors.places[name], UNSIGNED)

    def _choice_facts(self) -> Iterator[Fact]:
        """Which program the first word of an argv leads to; a shell's look-ups are observed."""
        word = self.prepared.words[0]
        if not isinstance(self.prepared.command.command, str) and "/" not in word:
            first = next(facts.choices(word), "")
            yield Fact(CHOICE, "path", word, first, UNSIGNED)

    def _scan_sources(self, files: Sequence[str]) -> set[str]:
        """The anchors below which a source names itself, where device code may hide that."""
        prepared, bound = self.prepared, set[str]()
        dated = any(name == "SOURCE_DATE_EPOCH" for name, _ in prepared.environment)
        hidden = shell_text.has_device_code(prepared.words)
        mapped = {word.partition("-prefix-map=")[2].partition("=")[0] for word in prepared.words}
        named = {os.path.join(prepared.command.directory, each) for each in prepared.words}
        for path in files:
            own = {
                name for name, place in prepared.anchors.places.items()
                if path.startswith(place + "/")
            }  # fmt: skip
            if not (own or path in named) or path.endswith((".o", ".a", ".so")):
                continue
            with open(path, "rb") as file:
                text = file.read(_SCANNED)
            if text.startswith(b"\x7fELF"):
                continue  # the compiler, if it is named by its path
            if not dated and _DATES.search(text):
                raise _Unkept(f"{path} asks for the time of the build")
            if hidden and _OWN_NAME.search(text):
                bound |= {name for name in own if prepared.anchors.places[name] not in mapped}
        return bound


def _is_device(path: str) -> bool:
    return path.startswith(("/dev/", "/proc/")) and not os.path.isfile(path)


class _Unkept(Exception):
    """Why a command is not kept."""


def _changed_since(path: str, when: int) -> bool:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(found.st_mode) and found.st_ctime_ns >= when


def _is_depfile(path: str, data: bytes) -> bool:
    return path.endswith(kept.DEPFILES) and b"\0" not in data and b":" in data[:65536]
