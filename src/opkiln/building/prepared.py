"""A command of another program, as it is known here: its key, and where its paths lead."""

from __future__ import annotations

import os
import shlex
from functools import cache, lru_cache
from typing import NamedTuple

from opkiln.base.digest import key
from opkiln.base.lazy import Record
from opkiln.building import kept, shell_text
from opkiln.building.kept import Anchors
from opkiln.building.shell_text import ShellText
from opkiln.machine import uname
from opkiln.machine.facts import Hasher
from opkiln.machine.toolchain.find import has_interpreter
from opkiln.settings import on_path, variables_of_others, whole_environment
from opkiln.store.entry import Leaf
from opkiln.store.layers import Store

_VERSION = 1  # of what the key means
MEMORY = 500 << 20  # bytes that a command is expected to use


class ObservedCommand(Record):
    """What is to be run, and what it shall write."""

    host: str  # the program whose command it is: "ninja", "tvm-ffi"
    label: str  # for people: the name of the source or of the output
    command: tuple[str, ...] | str  # an argv, or a text for /bin/sh
    directory: str  # that it works in
    outputs: tuple[str, ...] = ()  # what it must have written; what else it wrote is kept, too
    group: str = ""  # what it is a part of: a module, a build directory
    roots: tuple[str, ...] = ()  # directories besides its own that may lie elsewhere next time
    environment: tuple[tuple[str, str], ...] | None = None  # the child's; None: this process's


class CommandResult(NamedTuple):
    """What came of a command."""

    returncode: int
    messages: str  # its standard output and error together
    cached: bool = False  # nothing was started
    unkept: str = ""  # why it was not kept; empty if it was
    rebuilt: str = ""  # why what it made at other times did not fit
    seconds: float = 0.0


class Prepared:
    """A command on this machine: its key, and where its paths lead."""

    def __init__(self, command: ObservedCommand, read: ShellText | None = None) -> None:
        """``read`` is what a text says."""
        self.command = command
        whole = command.command
        if isinstance(whole, str):
            self.words = tuple(shlex.split(whole)) if read is None else read.words
        else:
            self.words = whole
        programs = self.words[:1] if read is None else read.programs
        given = tuple(whole_environment().items()) if command.environment is None else None
        self.environment = given or command.environment or ()
        roots = {f"root{number}": path for number, path in enumerate(command.roots)}
        self.anchors = Anchors({"dir": command.directory, **roots})
        self.outputs = tuple(
            os.path.normpath(os.path.join(command.directory, each)) for each in command.outputs
        )
        script = any(map(_is_script, programs))
        hide = self.anchors.hide
        self.name = key(
            "command",
            (
                _VERSION,
                hide(whole) if isinstance(whole, str) else tuple(map(hide, whole)),
                _variables(self.environment, script),
                uname.architecture(),
                uname.cpu_flags() if shell_text.is_for_this_cpu(self.words) else "",
            ),
        )

    @property
    def first(self) -> str:
        """The program that is started."""
        if isinstance(self.command.command, str):
            return "/bin/sh"
        return next(on_path(self.words[0]), self.words[0])

    def find(self, store: Store, hasher: Hasher) -> tuple[Leaf | None, list[str]]:
        """``kept.find``. An entry may only write where the command itself may."""
        leaf, reasons = kept.find(store, self.name, self.anchors.places, hasher)
        for anchor, path, *_ in () if leaf is None else leaf.manifest.get("files", []):
            full = os.path.join(self.anchors.places.get(anchor, ""), path)
            if os.path.normpath(full) != full or not self.owns(full):
                return None, [f"it would write {full}"]
        return leaf, reasons

    def put_in_place(self, leaf: Leaf, *, again: bool = True) -> str:
        """Put the files of an entry in place; if not ``again``, those that are not there. Returns
        the messages. Raises as ``kept.put_in_place``."""
        placed = kept.put_in_place(leaf, self.anchors, again=again)
        digests.update(placed)
        return self.anchors.show(leaf.manifest["messages"])

    def owns(self, path: str) -> bool:
        """Whether the command may have its result at a path: it is below an anchor, or named."""
        below = tuple(place + "/" for place in self.anchors.places.values())
        return path.startswith(below) or path in self.outputs


@cache
def _is_script(program: str) -> bool:
    return has_interpreter(next(on_path(program), program))


@lru_cache(maxsize=8)
def _variables(given: tuple[tuple[str, str], ...], script: bool) -> tuple[tuple[str, str], ...]:
    return variables_of_others(dict(given), script=script)


# What this process put in place or kept, by path: what comes next in a build reads it within the
# tick in which it was written, and knows by its digest that it was all there.
digests: dict[str, str] = {}
