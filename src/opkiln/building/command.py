"""An observed command: what another program compiles or links, kept by what it really read.

The key of a command has its words, the directory that it works in and the variables that change
what compilers do. Paths below the directory, and below roots that its program names, are in the key
as paths below these. PATH is not in the key: the programs that it led to are among the facts.

A command is kept if nothing is missing in the observer's log, if all that it wrote is known, and if
no file was changed while it was read. Otherwise it runs as it would without opkiln.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import stat
import time
from functools import cache, lru_cache, partial
from typing import NamedTuple

from opkiln.base.digest import key
from opkiln.base.lazy import Record
from opkiln.building import gather, kept, observed, shell_text
from opkiln.building.kept import Anchors, Written
from opkiln.building.observing import observer
from opkiln.errors import StoreError
from opkiln.machine import facts, uname
from opkiln.machine.facts import CHOICE, PLACE, UNSIGNED, Hasher
from opkiln.machine.toolchain.find import REMOTE, has_interpreter
from opkiln.run import events, schedule
from opkiln.settings import on_path, settings, variables_of_others, whole_environment
from opkiln.store import lock, publish
from opkiln.store.key import Fact
from opkiln.store.layers import Store, claim

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from opkiln.building.shell_text import ShellText
    from opkiln.run.child import Completed
    from opkiln.store.entry import Leaf

_VERSION = 1  # of what the key means
MEMORY = 500 << 20  # bytes that a command is expected to use
_NOT_RUN = 125  # the status of a command that was not started because another one failed
_DEVICES = ("/dev/", "/proc/")
_SCANNED = 4 << 20  # bytes of a file that may be a source
_DATES = re.compile(rb"__(?:DATE|TIME|TIMESTAMP)__")


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
        """``kept.find``."""
        return kept.find(store, self.name, self.anchors.places, hasher)

    def put_in_place(self, leaf: Leaf) -> str:
        """Put the files of an entry in place. Returns the messages. Raises as
        ``kept.put_in_place``."""
        digests = kept.put_in_place(leaf, self.anchors)
        _digests.update(digests)
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
_digests: dict[str, str] = {}


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
        self.snapshot = {**_digests, **kept.snapshot_of(fresh)}
        self.began = kept.kernel_time(stage)

    def keep(self, messages: str, wall: float, max_rss: int, rebuilt: Sequence[str]) -> str:
        """Keep what the command made, which has succeeded. Returns why not; empty if it was."""
        prepared, command = self.prepared, self.prepared.command
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
            if why := self._find_date(found.files):
                return why
            written, bound = self._read_written(paths, messages)
            text = messages if bound else prepared.anchors.hide(messages)
            manifest = {
                "source": command.label, "host": command.host, "group": command.group,
                "places": prepared.anchors.places, "messages": text, "wall": round(wall, 3),
                "max_rss": max_rss, "created": time.time(), "rebuilt": "; ".join(rebuilt[:1]),
            }  # fmt: skip
            every = (*known, *self._place_facts(bound), *self._choice_facts())
            digests = kept.keep(
                self.store, prepared.name, written, tuple(sorted(set(every))), manifest, self.stage
            )
        except _Unkept as error:
            return str(error)
        except gather.Appeared:
            return "a file appeared that had been looked for"
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
        _digests.update(digests)
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
            if not path.startswith((ours, *_DEVICES)):
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
            if path.startswith((ours, *_DEVICES)):
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

    def _read_written(self, paths: Sequence[str], messages: str) -> tuple[list[Written], set[str]]:
        """(the files as they are kept, the anchors whose paths are in one of them or in the
        messages, where they cannot be replaced)."""
        anchors = self.prepared.anchors
        bound = set(anchors.odd)
        if shell_text.hides_paths(self.prepared.words) or "\0" in messages:
            bound = set(anchors.places)
        bound |= anchors.named_in(os.fsencode(anchors.hide(messages)))
        places, written = gather.Places(anchors.places), []
        for path in paths:
            with open(path, "rb") as file:
                data = file.read()
            text = None
            named = anchors.named_in(data)
            if named and not bound and _is_depfile(path, data):
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

    def _find_date(self, files: Sequence[str]) -> str:
        if any(name == "SOURCE_DATE_EPOCH" for name, _ in self.prepared.environment):
            return ""
        below = tuple(place + "/" for place in self.prepared.anchors.places.values())
        named = {
            os.path.join(self.prepared.command.directory, each) for each in self.prepared.words
        }
        for path in files:
            source = path.startswith(below) or path in named
            if source and not path.endswith((".o", ".a", ".so")):
                with open(path, "rb") as file:
                    if _DATES.search(file.read(_SCANNED)):
                        return f"{path} asks for the time of the build"
        return ""


class _Unkept(Exception):
    """Why a command is not kept."""


def _changed_since(path: str, when: int) -> bool:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(found.st_mode) and found.st_ctime_ns >= when


def _is_depfile(path: str, data: bytes) -> bool:
    return path.endswith((".d", ".dep")) and b"\0" not in data and b":" in data[:65536]


def run_command(command: ObservedCommand, store: Store | None = None) -> CommandResult:
    """What the command made at another time, put in place; or it is run, and kept.

    A failing command is returned, not raised. Raises BuildTimeout, BuildCancelled, and
    ToolchainError if it cannot be started.
    """
    store = Store() if store is None else store
    prepared = Prepared(command)
    rebuilt: list[str] = []

    def find() -> CommandResult | None:
        leaf, reasons = prepared.find(store, Hasher())
        rebuilt[:] = reasons
        if leaf is None:
            return None
        try:
            messages = prepared.put_in_place(leaf)
        except (OSError, ValueError, KeyError):
            return None  # it was collected just now, or the disk is full
        events.emit(events.STEP_END, op=command.group or command.host, label=command.label,
                    step=prepared.name, wall=0.0, max_rss=0, cached=True)  # fmt: skip
        return CommandResult(0, messages, cached=True)

    def waiting(state: lock.Waiting) -> None:
        events.emit(events.WAITING, op=command.label, **state.event_data(events.BUILD))

    if (done := find()) is not None:
        return done
    with contextlib.suppress(StoreError):  # it is not ours: publishing says so
        claim(store.root)
    if store.root is None:
        return _run(prepared, store, rebuilt)
    limit = settings.build_timeout
    with lock.turn(
        store.root, prepared.name, find, waiting, what=command.label, limit=limit
    ) as got:
        return got if isinstance(got, CommandResult) else _run(prepared, store, rebuilt)


def _run(prepared: Prepared, store: Store, rebuilt: Sequence[str]) -> CommandResult:
    command = prepared.command
    with publish.scratch("command") as stage:
        library = observer.library(store.memory, None, stage)
        attempt = Attempt(prepared, store, stage)
        observing = observer.environment(library, attempt.log)
        argv = (
            ("/bin/sh", "-c", command.command)
            if isinstance(command.command, str)
            else (prepared.words)
        )
        done: list[Completed] = []
        task = schedule.Task(
            name=prepared.name, op=command.group or command.host, label=command.label, argv=argv,
            cwd=command.directory, env={**_unset_locale(prepared), **observing}, tmpdir=stage,
            after=(), memory=MEMORY, finish=done.append, may_fail=True,
        )  # fmt: skip
        schedule.execute([task], timeout=settings.build_timeout)
        (completed,) = done
        unkept = f"it failed with {completed.returncode}"
        if completed.returncode == 0:
            wall, rss = completed.wall, completed.max_rss
            unkept = attempt.keep(completed.output, wall, rss, rebuilt)
    return CommandResult(completed.returncode, completed.output, unkept=unkept,
                         rebuilt="; ".join(rebuilt[:1]), seconds=completed.wall)  # fmt: skip


def _unset_locale(prepared: Prepared) -> dict[str, str]:
    """The child's environment. An empty LC_ALL is as none: the locale is the host program's."""
    return {"LC_ALL": "", **dict(prepared.environment)}


def run_commands(
    commands: Sequence[ObservedCommand], store: Store | None = None
) -> list[CommandResult]:
    """``run_command`` of each, in parallel. If one fails, those that were not started are not run.
    Raises as ``run_command``."""
    store = Store() if store is None else store
    found: dict[int, CommandResult] = {}
    errors: list[BaseException] = []

    def work(number: int, command: ObservedCommand) -> None:
        if errors or any(each.returncode for each in tuple(found.values())):
            return
        try:
            found[number] = run_command(command, store)
        except BaseException as error:
            errors.append(error)

    schedule.call_in_threads(work, enumerate(commands))
    for error in errors:
        raise error
    return [found.get(number, _NEVER_RUN) for number in range(len(commands))]


_NEVER_RUN = CommandResult(_NOT_RUN, "", unkept="another command failed")
