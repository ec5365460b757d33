"""A module of another program as it can be built without that program: its commands, and the
sources that the program wrote for them. Paths in it are marked (``kept.Anchors``), so it is built
in any directory; what that makes, the program's own commands find in the store.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from opkiln.building import kept
from opkiln.building.command import run_commands
from opkiln.building.kept import Anchors
from opkiln.building.prepared import ObservedCommand, Prepared
from opkiln.errors import CompileError, StoreError
from opkiln.machine.facts import FILE, PROGRAM, Hasher
from opkiln.store.layers import Store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.store.entry import Leaf

HOSTS = ("tvm-ffi", "flashinfer", "sglang")  # whose modules are recorded
Levels = Sequence[Sequence[ObservedCommand]]


class RecordedModule(NamedTuple):
    """What can be written as JSON: lists in the place of tuples."""

    host: str  # "flashinfer"
    group: str  # what the module is called there: "norm"
    roots: int
    levels: list[list[list[Any]]]  # [label, text, outputs] of commands that need no other's outputs
    files: dict[str, str]

    @classmethod
    def parse(cls, record: dict[str, Any]) -> RecordedModule:
        """The module of a record. Raises ValueError, TypeError, KeyError, AttributeError."""
        found = cls(*(record[name] for name in cls._fields))
        for label, text, outputs in (each for level in found.levels for each in level):
            marked = "".join([text, *outputs, *found.files])
            "".join([found.host, found.group, label, *found.files.values()])
            if not set(marked.split("\0")[1::2]) <= {"dir", *found._root_names()}:
                raise ValueError("it names a directory that it does not have")
        return found

    @property
    def name(self) -> str:
        return f"{self.host}:{self.group}"

    def restore(self, stage: str) -> Levels:
        """The commands in a directory of ours, with their sources there. Raises StoreError for a
        record that names another place."""
        places = {name: os.path.join(stage, name) for name in ("dir", *self._root_names())}
        anchors = Anchors(places)
        outputs = [path for level in self.levels for each in level for path in each[2]]
        for marked in (*outputs, *self.files):
            path = os.path.normpath(anchors.show(marked))
            if not path.startswith(stage + "/"):
                raise StoreError(f"the record of {self.name} is refused: it names {path}")
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if (text := self.files.get(marked)) is not None:
                with open(path, "w", encoding="utf-8", errors="surrogateescape", newline="") as out:
                    out.write(text)
        # What is written just before a command might change while that reads it, for all one knows.
        time.sleep(2 * kept.TICK_NS / 1e9)
        roots = tuple(map(places.__getitem__, self._root_names()))
        return [
            [
                ObservedCommand(
                    self.host, label, anchors.show(text), places["dir"],
                    tuple(map(anchors.show, named)), self.group, roots,
                )
                for label, text, named in level
            ]
            for level in self.levels
        ]  # fmt: skip

    def _root_names(self) -> Iterator[str]:
        return (f"root{number}" for number in range(self.roots))


def describe(levels: Levels, store: Store) -> Iterator[RecordedModule]:
    """The modules that these commands have made; none for what is not kept in the store."""
    for group in dict.fromkeys(each.group for level in levels for each in level):
        own = [[each for each in level if each.group == group] for level in levels]
        flat = [Prepared(each) for level in own for each in level]
        anchors, made = flat[0].anchors, {path for each in flat for path in each.outputs}
        leaves = [each.find(store, Hasher())[0] for each in flat]
        if anchors.odd or None in leaves:
            continue
        facts = (fact for leaf in filter(None, leaves) for fact in kept.read_facts(leaf))
        read = {
            os.path.join(anchors.places[fact.anchor], fact.path)
            for fact in facts
            if fact.kind in (FILE, PROGRAM) and fact.anchor in anchors.places
        }
        marked = [
            [
                [each.label, anchors.hide(str(each.command)), list(map(anchors.hide, each.outputs))]
                for each in level
            ]
            for level in own
            if level
        ]
        files = {anchors.hide(path): _read(path) for path in sorted(read - made)}
        first = flat[0].command
        yield RecordedModule(first.host, group, len(first.roots), marked, files)


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        return file.read()


def find(levels: Levels, store: Store) -> list[Leaf] | None:
    """What the store has of a module, put in place; None if a part is missing."""
    leaves = []
    for prepared in (Prepared(each) for level in levels for each in level):
        leaf, _ = prepared.find(store, Hasher())
        if leaf is None:
            return None
        prepared.put_in_place(leaf)
        leaves.append(leaf)
    return leaves


def build(module: RecordedModule, levels: Levels, store: Store) -> bool:
    """Run what the store lacks of a module. Returns whether anything was run. Raises
    CompileError."""
    ran = False
    for level in levels:
        for done in run_commands(level, store):
            if done.returncode:
                raise CompileError(f"{module.name} was not compiled", why=done.messages.strip())
            ran |= not done.cached
    return ran
