"""A sink that writes a trace for ``chrome://tracing`` and Perfetto."""

from __future__ import annotations

import json
import os
import warnings
from typing import TYPE_CHECKING, Any

from opkiln.base import forks
from opkiln.base.digest import replace
from opkiln.errors import SettingError, SettingWarning
from opkiln.run import events

if TYPE_CHECKING:
    from opkiln.run.events import Event

_BUILD_LANES = 1000  # the first lane for builds; steps are drawn in the lanes below


class ChromeTrace:
    """Collects events. ``close`` writes the whole file, or nothing and a warning. Each step is
    drawn in the lowest free lane, so there are as many lanes as steps ran at once. Raises
    SettingError if the file's directory is not writable."""

    def __init__(self, path: str) -> None:
        self._path = os.path.realpath(path)  # the file is replaced; a link to it stays
        directory, reason, why = os.path.dirname(self._path), "", ""
        if not os.access(directory, os.W_OK | os.X_OK):
            reason = f"{directory} is not a writable directory"
        elif os.path.exists(self._path) and not os.path.isfile(self._path):
            reason, why = "that is not a regular file", "the trace would replace it"
        if reason:
            what, hint = f"the trace {path!r} cannot be written", "/tmp/opkiln-trace.json"
            raise SettingError(f"{what}: {reason}", why=why, hint=f"OPKILN_TRACE={hint}")
        self._lock = forks.lock()  # a signal handler may emit an event, too
        self._processes = {"": _TracedProcess(os.getpid())}

    def __call__(self, event: Event, worker: str = "") -> None:
        """Add an event of this process, or of a worker, which is drawn as a process of its own."""
        with self._lock:
            if worker not in self._processes:
                number = os.getpid() + len(self._processes)  # hosts may have equal process ids
                self._processes[worker] = _TracedProcess(number, worker)
            self._processes[worker].add(event)

    def close(self) -> None:
        """Write the file. Steps that have not ended are drawn up to the last event. A file that
        cannot be written (the disk is full) is a SettingWarning: the build is done."""
        with self._lock:
            records = [each for process in self._processes.values() for each in process.records()]
            document = {"traceEvents": records, "displayTimeUnit": "ms"}
        try:
            replace(self._path, json.dumps(document).encode())
        except OSError as error:
            warnings.warn(
                f"the trace {self._path!r} was not written: {error.strerror or error}",
                SettingWarning,
                stacklevel=2,
            )


class _TracedProcess:
    """The builds and steps of one process, in lanes."""

    def __init__(self, number: int, name: str = "") -> None:
        self._number = number
        self._records: list[dict[str, Any]] = []
        # The steps and builds that run: the lane of each, and its start.
        self._started: dict[tuple[str, str, str], tuple[int, Event]] = {}
        self._named: set[int] = set()
        self._last = 0.0
        if name:
            self._add("process_name", "", "M", 0.0, lane=0, args={"name": name})

    def add(self, event: Event) -> None:
        self._last = max(self._last, event.at)
        data = dict(event.data)
        if event.kind == events.STEP_START:
            self._begin(("step", data["op"], data["step"]), event, 1)
        elif event.kind == events.BUILD_START:
            self._begin(("build", data["op"], ""), event, _BUILD_LANES)
        elif event.kind == events.STEP_END:
            start = ("step", data["op"], data["step"])
            args = {"max_rss": data["max_rss"], "cached": data["cached"]}
            if start not in self._started:  # it came from the store and never ran
                self._begin(start, event._replace(at=event.at - data["wall"]), 1)
            self._end(start, event.at, args)
        elif event.kind == events.BUILD_END:
            start = ("build", data["op"], "")
            if start in self._started:
                self._end(start, event.at, {"ok": data["ok"]})
        else:
            name = data.get("text") or f"waiting for {data['what']}"
            self._add(name, data.get("op", ""), "i", event.at, lane=0, args=data, s="p")

    def records(self) -> list[dict[str, Any]]:
        """All of them. What has not ended is drawn up to the last event."""
        for key in list(self._started):
            self._end(key, self._last, {"unfinished": True})
        return self._records

    def _begin(self, key: tuple[str, str, str], event: Event, first: int) -> None:
        lane, taken = first, {lane for lane, _ in self._started.values()}
        while lane in taken:
            lane += 1
        self._started[key] = lane, event
        if lane not in self._named:
            self._named.add(lane)
            title = f"{key[0]} {lane - first + 1}"
            self._add("thread_name", "", "M", event.at, lane=lane, args={"name": title})

    def _end(self, key: tuple[str, str, str], at: float, args: dict[str, Any]) -> None:
        lane, start = self._started.pop(key)
        name = start.data.get("label") or start.data["op"]
        duration = (at - start.at) * 1e6
        self._add(name, start.data["op"], "X", start.at, lane=lane, args=args, dur=duration)

    def _add(
        self, name: str, op: str, phase: str, at: float, *, lane: int, args: Any, **more: Any
    ) -> None:
        record = {"name": name, "cat": op or "opkiln", "ph": phase, "ts": at * 1e6}
        self._records.append({**record, "pid": self._number, "tid": lane, "args": args, **more})
