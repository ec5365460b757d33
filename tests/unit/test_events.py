"""Events, the sinks that show them to people, and the trace file."""

from __future__ import annotations

import contextvars
import fcntl
import io
import json
import logging
import os
import pty
import re
import struct
import termios
import threading
from typing import TYPE_CHECKING

import pytest
from sample.quiet import within

from opkiln.errors import SettingError, SettingWarning
from opkiln.run import chrome, events, progress
from opkiln.settings import override

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from opkiln.run.events import Event, Sink


def step_end(op: str, label: str, *, cached: bool = False, wall: float = 0.5) -> None:
    events.emit(
        "step-end", op=op, label=label, step=label, wall=wall, max_rss=7 << 20, cached=cached
    )


def waiting(seconds: float, pid: int = 4312) -> None:
    events.emit("waiting", op="cpu_adam", pid=pid, host="n7", seconds=seconds, what="a free CPU")


def test_a_sink_hears_every_thread_and_only_within_its_block() -> None:
    heard: list[Event] = []
    events.emit("note", text="before")
    with events.listen(heard.append):
        threads = [
            threading.Thread(target=events.emit, args=("note",), kwargs={"text": str(number)})
            for number in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    events.emit("note", text="after")
    assert sorted(event.data["text"] for event in heard) == list("01234567")


def test_sinks_are_closed_when_the_block_ends_badly() -> None:
    class Closing:
        closed = False

        def __call__(self, event: Event) -> None:
            pass

        def close(self) -> None:
            self.closed = True

    sink = Closing()
    with pytest.raises(KeyboardInterrupt), events.listen(sink):
        raise KeyboardInterrupt
    assert sink.closed


def test_a_forked_child_does_not_close_its_parents_sink(tmp_path: Path) -> None:
    class Writing:
        def __call__(self, event: Event) -> None: ...

        def close(self) -> None:
            (tmp_path / str(os.getpid())).touch()

    def leave_in_child() -> None:
        with events.listen(Writing()):
            if (child := os.fork()) == 0:
                return
            os.waitpid(child, 0)

    parent = os.getpid()
    leave_in_child()
    if os.getpid() != parent:
        os._exit(0)
    assert os.listdir(tmp_path) == [str(parent)]


def test_a_forked_child_has_no_sinks() -> None:
    heard: list[Event] = []
    with events.listen(heard.append):
        child = os.fork()
        if child == 0:
            events.emit("note", text="from the child")
            os._exit(len(heard))
        assert os.waitpid(child, 0)[1] == 0


def a_build() -> None:
    events.emit("build-start", op="cpu_adam", steps=3)
    step_end("cpu_adam", "old.cpp", cached=True, wall=0.0)
    events.emit("step-start", op="cpu_adam", label="cpu.cpp", step="cpu.cpp")
    step_end("cpu_adam", "cpu.cpp")
    events.emit("step-start", op="cpu_adam", label="link", step="link")
    step_end("cpu_adam", "link")
    events.emit("build-end", op="cpu_adam", ok=True, wall=1.8)


def test_lines_say_when_a_build_starts_and_what_it_came_to() -> None:
    stream = io.StringIO()
    with events.listen(progress.Lines(stream)):
        a_build()
    assert stream.getvalue() == (
        "building cpu_adam (3 steps)\nbuilt cpu_adam in 1.8 s (1 compiled, 1 cached)\n"
    )


def test_lines_name_ops_and_not_the_libraries_of_their_parts() -> None:
    stream = io.StringIO()
    with events.listen(progress.Lines(stream)):
        events.emit("build-start", op="transformer__norms__float32", steps=1)
        events.emit("build-end", op="transformer__norms__float32", ok=False, wall=1.0)
    assert stream.getvalue() == (
        "building transformer (norms, float32) (1 step)\n"
        "failed transformer (norms, float32) after 1.0 s\n"
    )


def test_threads_that_build_at_once_tell_each_event_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    both = threading.Barrier(2)

    def build(name: str, first_to_leave: bool) -> None:
        with override(progress="lines"), progress.show_builds():
            both.wait()
            events.emit("note", text=name)
            both.wait()
            if not first_to_leave:
                both.wait()
                events.emit("note", text=f"{name} alone")
        if first_to_leave:
            both.wait()

    threads = [
        threading.Thread(target=build, args=each) for each in (("one", True), ("two", False))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(capsys.readouterr().err.splitlines()) == ["one", "two", "two alone"]
    events.emit("note", text="after")
    assert capsys.readouterr().err == ""


def test_a_forked_child_opens_sinks_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    with override(progress="lines"), progress.show_builds():
        child = os.fork()
        if child == 0:
            context = contextvars.Context()  # as that of a new thread
            context.run(_tell_in_a_block, "from the child")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert capfd.readouterr().err == "from the child\n"


def _tell_in_a_block(text: str) -> None:
    with override(progress="lines"), progress.show_builds():
        events.emit("note", text=text)


def test_lines_about_waiting_come_after_two_seconds_and_then_every_thirty() -> None:
    stream = io.StringIO()
    with events.listen(progress.Lines(stream)):
        for seconds in (0.2, 1.2, 2.2, 3.2, 20.0, 32.0, 33.0, 63.0):
            waiting(seconds)
        waiting(95.0, pid=0)
    lines = stream.getvalue().splitlines()
    assert lines == [
        "cpu_adam  waiting for pid 4312 on host n7, 2.2 s (a free CPU)",
        "cpu_adam  waiting for pid 4312 on host n7, 33 s (a free CPU)",
        "cpu_adam  waiting for pid 4312 on host n7, 63 s (a free CPU)",
        "cpu_adam  waiting for another process on host n7, 95 s (a free CPU)",
    ]


def waits_for_build(*moments: float) -> None:
    for seconds in moments:
        events.emit(
            "waiting", op="cpu_adam", pid=4312, host="n7", seconds=seconds, what=events.BUILD
        )


def test_a_wait_for_a_build_is_told_at_once() -> None:
    stream = io.StringIO()
    with events.listen(progress.Lines(stream)):
        waits_for_build(0.0, 0.3, 1.0, 29.0)
    assert stream.getvalue() == "cpu_adam  waiting for pid 4312 on host n7, 0.3 s (build)\n"


def test_quiet_tells_only_of_a_wait_of_five_seconds() -> None:
    stream = io.StringIO()
    with override(progress="quiet"), events.listen(progress.people_sink(stream)):
        waits_for_build(0.3, 4.9)
        a_build()
        events.emit("note", text="by the way")
        assert stream.getvalue() == ""
        waits_for_build(4.9, 5.2, 6.0, 36.0)
    assert stream.getvalue().splitlines() == [
        "cpu_adam  waiting for pid 4312 on host n7, 5.2 s (build)",
        "cpu_adam  waiting for pid 4312 on host n7, 36 s (build)",
    ]


def test_a_failed_build_is_said_to_have_failed() -> None:
    stream = io.StringIO()
    with events.listen(progress.Lines(stream)):
        events.emit("build-end", op="x", ok=False, wall=12.3)
    assert stream.getvalue() == "failed x after 12 s\n"


@pytest.mark.timed
def test_the_bar_counts_over_all_ops_moves_by_itself_and_leaves_the_summaries() -> None:
    stream = io.StringIO()
    bar = progress.Bar(stream, colour=False)
    with events.listen(bar):
        events.emit("build-start", op="one", steps=3)
        events.emit("build-start", op="two", steps=4)
        step_end("one", "a.cpp")
        events.emit("step-start", op="two", label="b.cpp", step="b.cpp")
        assert re.search(r"\[1/7\] two  b\.cpp  \d+\.\d s$", stream.getvalue())
        times = re.compile(r"\[1/7\] two  b\.cpp  (\d+\.\d) s")
        assert within(10, lambda: len(set(times.findall(stream.getvalue()))) > 2)
        events.emit("build-end", op="two", ok=True, wall=1.0)
        events.emit("note", text="by the way")
    shown = [part for part in stream.getvalue().split("\r\x1b[2K") if part.endswith("\n")]
    assert shown == ["built two in 1.0 s (0 compiled, 0 cached)\n", "by the way\n"]
    assert stream.getvalue().endswith("\r\x1b[2K")


def test_the_bar_says_whom_it_waits_for() -> None:
    stream = io.StringIO()
    with events.listen(progress.Bar(stream, colour=False)):
        events.emit("build-start", op="cpu_adam", steps=1)
        waiting(38.0)
        assert "waiting for pid 4312 on host n7, 38 s" in stream.getvalue()


def test_the_bar_keeps_to_the_width_of_its_terminal() -> None:
    reader, writer = pty.openpty()
    with open(writer, "w") as stream:
        fcntl.ioctl(stream, termios.TIOCSWINSZ, struct.pack("hhhh", 24, 20, 0, 0))
        with events.listen(progress.Bar(stream)):
            events.emit("build-start", op="x" * 50, steps=1)
        os.set_blocking(reader, False)  # a bar that draws nothing fails here instead of hanging
        seen = os.read(reader, 4096)
    os.close(reader)
    assert seen.split(b"\r\x1b[2K")[1] == b"[0/1] " + b"x" * 13


def test_names_cannot_steer_the_terminal() -> None:
    stream = io.StringIO()
    with events.listen(progress.Lines(stream)):
        events.emit("build-start", op="a\x1b]0;b\n\rc", steps=1)
    assert stream.getvalue() == "building a?]0;b??c (1 step)\n"


class Gone(io.StringIO):
    """A pipe that nobody reads, or a stream that was closed (ValueError)."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error
        self.tried = 0

    def write(self, text: str) -> int:
        self.tried += 1
        raise self.error


@pytest.mark.parametrize(
    "error", [BrokenPipeError(), ValueError("closed")], ids=["broken", "closed"]
)
@pytest.mark.parametrize("choice", ["bar", "lines"])
def test_a_stream_that_went_away_does_not_disturb_the_build(error: Exception, choice: str) -> None:
    stream = Gone(error)
    heard: list[str] = []
    with (
        override(progress=choice),
        events.listen(progress.people_sink(stream)),
        events.listen(lambda event: heard.append(event.kind)),
    ):
        a_build()
    assert stream.tried
    assert (heard[0], heard[-1]) == ("build-start", "build-end")


def kind_of(sink: Sink | None) -> str:
    return type(sink).__name__


def test_who_is_told_and_how() -> None:
    reader, writer = pty.openpty()
    with open(writer, "w") as terminal:
        with override(progress="auto", rank=None):
            assert kind_of(progress.people_sink(terminal)) == "Bar"
            assert kind_of(progress.people_sink(io.StringIO())) == "Lines"
        with override(progress="auto", rank=0):
            assert kind_of(progress.people_sink(terminal)) == "Bar"
        with override(progress="auto", rank=3):
            assert progress.people_sink(terminal) is None
        with override(progress="lines", rank=3):
            assert kind_of(progress.people_sink(terminal)) == "Lines"
        with override(progress="bar", rank=3):
            assert kind_of(progress.people_sink(io.StringIO())) == "Bar"
        with override(progress="off", rank=None):
            assert progress.people_sink(terminal) is None
    os.close(reader)


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """The logger of opkiln, with what a test gives it taken away after it."""
    found = logging.getLogger("opkiln")
    before = found.level, list(found.handlers), found.propagate
    yield found
    found.level, found.handlers, found.propagate = before


def test_a_logger_takes_the_place_of_lines_and_of_a_bar_only_on_its_own_terminal(
    logger: logging.Logger,
) -> None:
    reader, writer = pty.openpty()
    with open(writer, "w") as terminal, override(progress="auto", rank=None):
        logger.propagate = False  # of the handlers that pytest gives the root
        logger.setLevel(logging.INFO)
        assert progress.logging_sink() is None, "nobody would take the records"
        assert kind_of(progress.people_sink(io.StringIO())) == "Lines"
        logger.addHandler(logging.StreamHandler(io.StringIO()))
        assert kind_of(progress.logging_sink()) == "Log"
        assert progress.people_sink(io.StringIO()) is None
        assert kind_of(progress.people_sink(terminal)) == "Bar"
        logger.addHandler(logging.StreamHandler(terminal))
        assert progress.people_sink(terminal) is None
        logger.setLevel(logging.WARNING)
        assert progress.logging_sink() is None
        assert kind_of(progress.people_sink(terminal)) == "Bar"
    os.close(reader)


@pytest.mark.parametrize("no_color", [False, True])
def test_colour_is_for_terminals_whose_owner_wants_it(no_color: bool) -> None:
    reader, writer = pty.openpty()
    with open(writer, "w") as terminal, override(progress="lines", rank=None, no_color=no_color):
        with events.listen(progress.people_sink(terminal)):
            events.emit("build-end", op="x", ok=True, wall=1)
        os.set_blocking(reader, False)  # a bar that draws nothing fails here instead of hanging
        seen = os.read(reader, 4096)
    os.close(reader)
    assert (b"\x1b[32mbuilt\x1b[0m x" in seen) is not no_color


def test_the_trace_has_one_lane_per_step_that_ran_at_once(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with events.listen(chrome.ChromeTrace(str(path))):
        events.emit("build-start", op="x", steps=4)
        step_end("x", "old.cpp", cached=True, wall=0.0)
        for label in ("a.cpp", "b.cpp"):
            events.emit("step-start", op="x", label=label, step=label)
        step_end("x", "a.cpp")
        events.emit("step-start", op="x", label="c.cpp", step="c.cpp")
        step_end("x", "b.cpp")
        waiting(1.0)
        assert not path.exists()
    records = json.loads(path.read_text())["traceEvents"]
    steps = {record["name"]: record for record in records if record["ph"] == "X"}
    assert {name: step["tid"] for name, step in steps.items()} == {
        "old.cpp": 1, "a.cpp": 1, "b.cpp": 2, "c.cpp": 1, "x": 1000,
    }  # fmt: skip
    assert steps["a.cpp"]["args"] == {"max_rss": 7 << 20, "cached": False}
    assert steps["old.cpp"]["args"]["cached"] is True
    assert steps["c.cpp"]["args"] == {"unfinished": True}
    assert all(step["dur"] >= 0 for step in steps.values())
    assert [r["name"] for r in records if r["ph"] == "i"] == ["waiting for a free CPU"]
    assert os.listdir(tmp_path) == ["trace.json"]


def test_a_trace_whose_directory_is_gone_at_the_end_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    trace = chrome.ChromeTrace(str(tmp_path / "gone" / "trace.json"))
    (tmp_path / "gone").rmdir()
    with pytest.warns(SettingWarning, match=r"trace\.json' was not written: No such file"):
        trace.close()


def test_a_trace_that_cannot_be_written_is_refused_before_the_build(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="cannot be written"):
        chrome.ChromeTrace(str(tmp_path / "missing" / "trace.json"))
