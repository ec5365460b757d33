"""Answers the library that is preloaded into ninja: one server for one run of ninja.

It gets each command before it is started. What the store has is put in place; what it has not is
run by a step, a child of ninja's, for which a thread here takes the turn, waits for a CPU of the
budget, and keeps what came of it. The library's file has the messages (``hook.c``), the step's file
those of the steps (``step.c``).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import struct
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from opkiln.building import kept, shell_text
from opkiln.building.prepared import MEMORY, ObservedCommand, Prepared
from opkiln.compat.ninja import front
from opkiln.errors import OpkilnError
from opkiln.machine import uname
from opkiln.machine.facts import Hasher
from opkiln.run import events, progress
from opkiln.settings import settings, whole_environment
from opkiln.store.layers import Store

if TYPE_CHECKING:
    from opkiln.building.attempt import Attempt
    from opkiln.store import lock
    from opkiln.store.entry import Leaf

_LARGEST = 1 << 18  # bytes of a message: more than a command can have
_AT_ONCE = 1 << 18  # bytes of outputs that are put in place while ninja waits
_MESSAGES = 4000  # bytes that fit into any pipe
_FAILED = (OSError, ValueError, KeyError)


def serve(fd: int) -> None:
    """Serve one ninja, until it and its steps have ended."""
    # What is inherited from ninja would keep its pipes open.
    for each in map(int, os.listdir("/proc/self/fd")):
        if each > 2 and each != fd:
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(each)
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=fd) as ninja, progress.show_builds():
        if settings.remotes:
            import site  # signatures need a package of this Python, and so do buckets

            site.main()
        server = _Server(ninja)
        ninja.send(b"R")
        server.run()


class _Missed(NamedTuple):
    """A command that the store does not have."""

    prepared: Prepared
    text: str  # as ninja gave it
    rebuilt: list[str]
    ago: int  # milliseconds since a command ended that was not served


class _Gone(Exception):
    """The step was ended while it waited."""


class _Later:
    """A command whose outputs are put in place by a thread."""

    def __init__(self, prepared: Prepared, leaf: Leaf, text: str) -> None:
        self.prepared, self.leaf, self.text = prepared, leaf, text
        self.status = 1
        self.done = threading.Event()


class _Server:
    def __init__(self, ninja: socket.socket) -> None:
        self._ninja = ninja
        self._store = Store()
        self._directory = os.getcwd()
        self._roots = find_roots(self._directory)
        self._ready = front.ready_directory()
        self._environment = tuple(whole_environment().items())
        self._missed: _Missed | None = None
        self._later: dict[int, _Later] = {}
        self._threads: list[threading.Thread] = []
        self._served = threading.local()  # the step that a thread serves
        warnings.showwarning = self._show_warning

    def run(self) -> None:
        while True:
            try:
                message, fds, _, _ = socket.recv_fds(self._ninja, _LARGEST, 1)
            except OSError:
                break
            if not message:
                break
            kind, number, rest = message[:1], struct.unpack("=I", message[1:5])[0], message[5:]
            if kind == b"q":
                self._answer(rest.decode("utf-8", "surrogateescape"), number)
            elif kind == b"w":
                later = self._later.pop(number)
                later.done.wait()
                self._ninja.send(b"S" + struct.pack("=i", later.status))
            elif kind == b"f":
                self._start(self._put_later, self._later[number], fds[0])
            elif kind == b"m":
                self._start(self._serve_step, self._missed, socket.socket(fileno=fds[0]))
        for thread in self._threads:
            thread.join()

    def _start(self, work: object, *about: object) -> None:
        self._threads = [each for each in self._threads if each.is_alive()]
        thread = threading.Thread(target=work, args=about)  # type: ignore[arg-type]
        thread.start()
        self._threads.append(thread)

    def _answer(self, text: str, ago: int) -> None:
        try:
            answer = self._find(text, ago)
        except (OpkilnError, *_FAILED):
            answer = b"P"
        self._ninja.send(answer)

    def _find(self, text: str, ago: int) -> bytes:
        read = shell_text.read(text)
        if read is None:
            return b"P"
        prepared = Prepared(
            ObservedCommand(
                "ninja", read.label, read.text, self._directory, read.outputs,
                os.path.basename(self._directory), self._roots, self._environment,
            ),
            read,
        )  # fmt: skip
        leaf, rebuilt = prepared.find(self._store, Hasher())
        if leaf is not None:
            size = sum(row[3] for row in leaf.manifest["files"])
            if size <= _AT_ONCE and len(leaf.manifest["messages"]) <= _MESSAGES // 4:
                with contextlib.suppress(*_FAILED):
                    messages = self._put(prepared, leaf)
                    if len(messages) <= _MESSAGES:
                        return b"H\0\0\0\0" + messages
            number = len(self._later) + 1
            while number in self._later:
                number += 1
            self._later[number] = _Later(prepared, leaf, text)
            return b"A" + struct.pack("=I", number)
        self._missed = _Missed(prepared, text, rebuilt, ago)
        return b"M"

    def _put(self, prepared: Prepared, leaf: Leaf) -> bytes:
        messages = prepared.put_in_place(leaf)
        command = prepared.command
        events.emit(events.STEP_END, op=command.group, label=command.label, step=prepared.name,
                    wall=0.0, max_rss=0, cached=True)  # fmt: skip
        return messages.encode("utf-8", "surrogateescape")

    def _put_later(self, later: _Later, pipe: int) -> None:
        try:
            try:
                messages, later.status = self._put(later.prepared, later.leaf), 0
            except _FAILED:  # it was collected just now, or the disk is full
                from opkiln.run import process

                argv = ("/bin/sh", "-c", later.text)
                done = process.run(argv, cwd=self._directory, env=whole_environment())
                messages = done.output.encode("utf-8", "surrogateescape")
                later.status = done.returncode
            with contextlib.suppress(BrokenPipeError):  # ninja was ended
                while messages:
                    messages = messages[os.write(pipe, messages) :]
        finally:
            later.done.set()
            os.close(pipe)

    def _show_warning(self, message: Warning | str, *_: Any, **__: Any) -> None:
        """Have the step print it, as part of what its command says: our own output is nobody's."""
        if (step := getattr(self._served, "step", None)) is not None:
            text = f"opkiln: {message}\n".encode()
            step.sendall(b"N" + struct.pack("=I", len(text)) + text, socket.MSG_NOSIGNAL)

    def _serve_step(self, missed: _Missed, step: socket.socket) -> None:
        with step:
            self._served.step = step
            try:
                self._take_turn(missed, step)
            except (OpkilnError, _Gone, *_FAILED):
                with contextlib.suppress(OSError):
                    step.send(b"P", socket.MSG_NOSIGNAL)

    def _take_turn(self, missed: _Missed, step: socket.socket) -> None:
        from opkiln.run import budget  # a build of hits does without
        from opkiln.store import lock

        prepared, store = missed.prepared, self._store

        def find() -> bytes | None:
            leaf, missed.rebuilt[:] = prepared.find(store, Hasher())
            with contextlib.suppress(*_FAILED):
                return None if leaf is None else self._put(prepared, leaf)
            return None

        def look_up(*_: object) -> None:
            with contextlib.suppress(BlockingIOError):
                if not step.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    raise _Gone

        def waiting(state: lock.Waiting) -> None:
            look_up()
            about = state.event_data(events.BUILD)
            events.emit(events.WAITING, op=prepared.command.label, **about)

        limit = settings.build_timeout
        what = prepared.command.label
        assert store.root is not None
        with lock.turn(store.root, prepared.name, find, waiting, what=what, limit=limit) as got:
            hit = got if isinstance(got, bytes) else None
            if isinstance(got, lock.Turn) and prepared.fetch(store, got):
                hit = find()
            if hit is not None:
                step.sendall(b"H" + struct.pack("=I", len(hit)) + hit)
                return
            with budget.shared_budget().hold(memory=MEMORY, limit=limit, waiting=look_up):
                done = self._run(missed, step)
            # Not within the budget: the next command can use the CPU meanwhile.
            if done is not None:
                attempt, messages, seconds = done
                if why := attempt.keep(messages, seconds, 0, missed.rebuilt):
                    events.emit(events.NOTE, text=f"{what} is not kept: {why}")
                step.send(b"k", socket.MSG_NOSIGNAL)

    def _run(self, missed: _Missed, step: socket.socket) -> tuple[Attempt, str, float] | None:
        """Have the step run the command. None if it failed."""
        from opkiln.building.attempt import Attempt
        from opkiln.building.observing import log
        from opkiln.store import publish

        # A file that an unserved command has just written could be written again within a tick.
        time.sleep(max(0.0, kept.TICK_NS / 1e9 - missed.ago / 1e3))
        command = missed.prepared.command
        stage = os.path.join(publish.scratch_root(), f"opkiln-ninja-{os.urandom(8).hex()}")
        os.mkdir(stage, 0o700)
        log.start(os.path.join(stage, "observed"))
        attempt = Attempt(missed.prepared, self._store, stage, (self._ready + "/",))
        about = {"op": command.group, "label": command.label, "step": missed.prepared.name}
        body = "\0".join((os.path.join(self._ready, "observer"), stage, str(command.command)))
        data = body.encode("utf-8", "surrogateescape")
        events.emit(events.STEP_START, **about)
        step.sendall(b"R" + struct.pack("=I", len(data)) + data)
        head = _receive(step, 17)
        length, status, took = struct.unpack("=xIiq", head)
        messages = _receive(step, length - 12).decode("utf-8", "surrogateescape")
        seconds = took / 1e6
        events.emit(events.STEP_END, **about, wall=seconds, max_rss=0, cached=False)
        return None if status else (attempt, messages, seconds)


def _receive(step: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = step.recv(length - len(data))
        if not part:
            raise _Gone
        data += part
    return data


def find_roots(directory: str) -> tuple[str, ...]:
    """The directory of the project that is built in this one, which may lie elsewhere next time."""
    cache = uname.read_text(os.path.join(directory, "CMakeCache.txt"))
    if found := re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(/.+)$", cache, re.MULTILINE):
        return (found[1],) if found[1] != directory else ()
    above = directory
    while above.count("/") > 1:
        if any(os.path.exists(f"{above}/{name}") for name in _PROJECT):
            return (above,) if above != directory else ()
        above = os.path.dirname(above)
    return ()


_PROJECT = (".git", ".hg", "setup.py", "pyproject.toml")
