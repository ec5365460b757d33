"""Starting, following and ending processes."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import threading
from typing import TYPE_CHECKING

import pytest
from sample import signals
from sample.child import SOURCE
from sample.quiet import needs_quiet, within

from opkiln.errors import BuildCancelled, BuildError, BuildTimeout, InputError, ToolchainError
from opkiln.run import child, process
from opkiln.settings import override

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timed

PYTHON = (sys.executable, "-I", "-S", "-c")


def python(code: str) -> list[str]:
    return [*PYTHON, textwrap.dedent(code)]


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except FileNotFoundError:
        return False


FAMILY = """
    import os, sys, time
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    with open(sys.argv[1] + ".new", "w") as file:
        file.write(f"{os.getpid()} {child}")
    os.rename(sys.argv[1] + ".new", sys.argv[1])
    time.sleep(60)
"""


def test_a_nonzero_exit_is_returned_with_both_streams_in_order() -> None:
    argv = python(
        """
        import os
        os.write(1, b"one "); os.write(2, b"two "); os.write(1, "drei ü".encode() + b"\\xff")
        os._exit(3)
        """
    )
    done = process.run(argv)
    assert done.returncode == 3
    assert done.output == "one two drei ü�"
    assert done.argv == tuple(argv)
    assert done.wall > 0


def test_a_process_ended_by_a_signal_has_its_negative_number() -> None:
    code = "import os, signal; signal.signal(15, signal.SIG_DFL); os.kill(os.getpid(), 15)"
    assert process.run(python(code)).returncode == -signal.SIGTERM


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (40, "signal 40")])
def test_a_signal_has_a_name_to_show_even_a_real_time_one(number: int, name: str) -> None:
    done = process.run(["sh", "-c", f"kill -{number} $$"])
    assert process.signal_name(done.returncode) == name


def test_output_larger_than_any_pipe_does_not_block_the_child() -> None:
    size = 4 << 20
    done = process.run(python(f"import sys; sys.stdout.write('x' * {size}); sys.stderr.write('y')"))
    assert done.output.count("x") == size
    assert done.output.count("y") == 1


def test_a_child_sees_only_the_allowed_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("CPATH", "GCC_EXEC_PREFIX", "LC_MESSAGES", "LANGUAGE", "TMPDIR", "ANYTHING"):
        monkeypatch.setenv(name, "/nowhere")
    code = "import os; print(sorted(os.environ.items()))"
    done = process.run(python(code), tmpdir=str(tmp_path), env={"EXTRA": "1"})
    seen = dict(eval(done.output))
    assert seen["LC_ALL"] == "C"
    assert seen["TMPDIR"] == str(tmp_path)
    assert seen["EXTRA"] == "1"
    assert len(seen["OPKILN_BUILD_TOKEN"]) == 32
    assert not {"CPATH", "GCC_EXEC_PREFIX", "LC_MESSAGES", "LANGUAGE", "ANYTHING"} & seen.keys()


def test_a_program_without_a_directory_of_its_own_writes_to_that_of_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code = "import tempfile; print(tempfile.gettempdir())"
    assert process.run(python(code)).output.strip() == str(tmp_path)
    assert process.capture(python(code)).output.strip() == str(tmp_path)


def test_a_probe_carries_no_token() -> None:
    code = "import os; print('OPKILN_BUILD_TOKEN' in os.environ)"
    assert process.capture(python(code)).output == "False\n"


def test_a_child_has_its_own_session_no_input_and_no_descriptor_of_ours() -> None:
    leaked = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(leaked, True)
    try:
        code = """
            import os, sys
            print(os.getsid(0) == os.getpid(), sys.stdin.read() == "", os.listdir("/proc/self/fd"))
        """
        session, no_input, fds = process.run(python(code)).output.split(maxsplit=2)
    finally:
        os.close(leaked)
    assert (session, no_input) == ("True", "True")
    assert len(eval(fds)) == 4  # the three, and the one that lists them


def test_a_missing_program_names_itself_and_how_to_look_for_it() -> None:
    with pytest.raises(ToolchainError) as caught:
        process.run(["no-such-compiler", "-c"])
    assert "no-such-compiler could not be started" in str(caught.value)
    assert caught.value.hint == "command -v no-such-compiler"


def test_a_missing_working_directory_is_named_and_not_the_program() -> None:
    with pytest.raises(ToolchainError, match="working directory /no/such/place"):
        process.run(["true"], cwd="/no/such/place")


def test_a_script_whose_interpreter_is_missing_says_so(tmp_path: Path) -> None:
    script = tmp_path / "wrapper"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    with pytest.raises(ToolchainError, match="interpreter or loader that it names does not"):
        process.run([str(script)])


def test_an_argument_with_a_nul_is_an_error_of_ours() -> None:
    with pytest.raises(ToolchainError, match="could not be started"):
        process.run(["true", "a\0b"])


def test_a_timeout_ends_the_child_and_what_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    for seconds in (0.4, 8, 32):  # a busy machine may not have started the family yet
        with pytest.raises(BuildTimeout, match=f"did not end within {seconds} s"):
            process.run([*python(FAMILY), str(pids)], timeout=seconds)
        if pids.exists():
            break
    assert [alive(int(pid)) for pid in pids.read_text().split()] == [False, False]


def test_a_cancelled_child_is_dead_with_its_family_when_the_call_returns(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    cancelled = threading.Event()

    def cancel() -> None:
        within(5, pids.exists)
        cancelled.set()

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(BuildCancelled):
        process.run([*python(FAMILY), str(pids)], cancelled=cancelled)
    thread.join()
    assert [alive(int(pid)) for pid in pids.read_text().split()] == [False, False]


def test_nothing_is_started_once_cancelled(tmp_path: Path) -> None:
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(BuildCancelled):
        process.run(["touch", str(tmp_path / "trace")], cancelled=cancelled)
    assert not (tmp_path / "trace").exists()


def test_an_interrupt_ends_the_family_and_reaches_the_caller(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def interrupt() -> None:
        within(5, pids.exists)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with signals.interruptible(), pytest.raises(KeyboardInterrupt):
        process.run([*python(FAMILY), str(pids)])
    thread.join()
    assert [alive(int(pid)) for pid in pids.read_text().split()] == [False, False]


def test_an_interrupt_while_it_starts_ends_the_family_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"

    def interrupt(_: int) -> None:
        within(5, pids.exists)
        raise KeyboardInterrupt

    monkeypatch.setattr(child, "open_pidfd", interrupt)
    with pytest.raises(KeyboardInterrupt):
        process.run([*python(FAMILY), str(pids)])
    assert [alive(int(pid)) for pid in pids.read_text().split()] == [False, False]


def test_what_a_killed_leader_leaves_in_its_group_is_ended_too(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def kill_leader() -> None:
        within(5, pids.exists)
        os.kill(int(pids.read_text().split()[0]), signal.SIGKILL)

    thread = threading.Thread(target=kill_leader)
    thread.start()
    assert process.run([*python(FAMILY), str(pids)]).returncode == -signal.SIGKILL
    thread.join()
    child = int(pids.read_text().split()[1])
    assert within(5, lambda: not alive(child))


def test_a_server_that_inherits_the_output_does_not_hold_up_the_call() -> None:
    code = """
        import os, time
        told, tell = os.pipe()
        server = os.fork()
        if server == 0:
            os.setsid()  # as the server of a compiler cache does
            os.write(tell, b"1")
            time.sleep(600)
        os.read(told, 1)  # before that, it would be killed with the group of this process
        os.write(1, b"%d" % server)
        os._exit(0)
    """
    server = int(process.run(python(code)).output)
    assert alive(server)
    os.kill(server, signal.SIGKILL)


@needs_quiet
def test_the_peak_memory_is_that_of_the_largest_descendant_not_of_this_process() -> None:
    ballast = bytearray(600 << 20)  # wait4 alone would report at least this
    grandchild = "import time; x = bytearray(150 << 20); time.sleep(0.3)"
    code = f"""
        import os, sys
        os.spawnv(os.P_WAIT, sys.executable, ["p", "-I", "-S", "-c", {grandchild!r}])
    """
    done = process.run(python(code))
    del ballast
    assert done.returncode == 0
    assert 150 << 20 < done.max_rss < 400 << 20


def test_a_lost_exit_status_is_an_error_and_not_a_success() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(BuildError, match=r"exit status of .* is lost") as caught:
            process.run(python("raise SystemExit(1)"))
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert "this process ignores SIGCHLD" in caught.value.why
    assert caught.value.hint.startswith("signal.signal(signal.SIGCHLD, signal.SIG_DFL)")


def test_a_probe_keeps_its_streams_apart_and_a_hanging_one_is_a_toolchain_error() -> None:
    said = process.capture(
        python("import os; os.write(1, b'out'); os.write(2, b'err'); os._exit(4)")
    )
    assert (said.returncode, said.output, said.stderr) == (4, "out", "err")
    with pytest.raises(ToolchainError, match=r"did not end within 0\.2 s"):
        process.capture(python("import time; time.sleep(60)"), timeout=0.2)


def test_no_program_with_a_limit_runs_longer_than_the_build_timeout() -> None:
    hangs = python("import time; time.sleep(60)")
    with override(build_timeout=0.2):
        with pytest.raises(ToolchainError, match=r"did not end within 0\.2 s"):
            process.capture(hangs)
        with pytest.raises(BuildTimeout, match=r"did not end within 0\.2 s"):
            process.run(hangs, timeout=60)
        assert process.run(["sleep", "0.3"]).returncode == 0  # no limit


def test_descriptors_do_not_pile_up() -> None:
    process.run(["true"])
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(20):
        process.run(["true"])
        with pytest.raises(BuildTimeout):
            process.run(["sleep", "60"], timeout=0.001)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_many_threads_run_at_once_and_get_their_own_output() -> None:
    results: dict[int, str] = {}

    def one(number: int) -> None:
        results[number] = process.run(["echo", str(number)]).output

    threads = [threading.Thread(target=one, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: f"{number}\n" for number in range(16)}


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that a child reads are looked at sooner."""
    monkeypatch.setattr(child, "_LOOK", 0.1)


@pytest.mark.usefixtures("looks")
@pytest.mark.parametrize("opened", ["by its writer, too", "by nobody else"])
def test_a_child_that_waits_for_a_fifo_is_ended_with_its_name(opened: str, tmp_path: Path) -> None:
    fifo = tmp_path / "header.h"
    os.mkfifo(fifo)
    held = os.open(fifo, os.O_RDWR) if opened == "by its writer, too" else None
    try:
        with pytest.raises(InputError) as caught:
            process.run(
                ["sh", "-c", "cat header.h; true"], cwd=str(tmp_path), watch_files=True, timeout=60
            )
    finally:
        if held is not None:
            os.close(held)
    assert f"cat reads {fifo}, a FIFO that nobody writes to" in caught.value.what
    assert caught.value.hint == f"ls -lL {fifo}"


@pytest.mark.usefixtures("looks")
def test_a_child_that_reads_a_device_without_an_end_is_ended(tmp_path: Path) -> None:
    (tmp_path / "header.h").symlink_to("/dev/zero")
    argv = ["sh", "-c", f"cat {tmp_path}/header.h > /dev/null; true"]
    with pytest.raises(InputError, match="cat reads /dev/zero, a device without an end") as caught:
        process.run(argv, watch_files=True, timeout=60)
    assert "find -L" in caught.value.hint


@pytest.mark.usefixtures("looks")
def test_a_child_may_use_a_fifo_of_its_own(tmp_path: Path) -> None:
    script = 'mkfifo "$TMPDIR/own"; (sleep 0.4; echo through > "$TMPDIR/own") & cat "$TMPDIR/own"'
    done = process.run(["sh", "-c", script], tmpdir=str(tmp_path), watch_files=True, timeout=60)
    assert done.output == "through\n"


def test_a_long_output_is_kept_to_its_start_and_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_HEAD", 100_000)
    monkeypatch.setattr(child, "_TAIL", 20_000)
    code = "for n in range(100_000): print(f'line {n} \u00e9')"
    lines = process.run([sys.executable, "-X", "utf8", "-c", code]).output.splitlines()
    (gap,) = (place for place, line in enumerate(lines) if not line.startswith("line "))
    assert lines[:gap] == [f"line {n} \u00e9" for n in range(gap)]
    kept = len(lines) - gap - 1
    assert lines[gap + 1 :] == [f"line {n} \u00e9" for n in range(100_000 - kept, 100_000)]
    words = lines[gap].split()
    left_out = sum(len(f"line {n} \u00e9\n".encode()) for n in range(gap, 100_000 - kept))
    assert words[:3] == ["[opkiln", "left", "out"]
    assert int(words[3]) == left_out
    assert 90_000 < len("\n".join(lines[:gap]).encode()) <= 100_000


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 120, 140, 141, 1000])
def test_output_of_one_line_loses_only_what_does_not_fit(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "_HEAD", 100)
    monkeypatch.setattr(child, "_TAIL", 20)
    output = process.run(["head", "-c", str(size), "/dev/zero"]).output
    if size <= 120:
        assert output == "\0" * size
    else:
        middle = f"\n[opkiln left out {size - 120} bytes of output here]\n"
        assert output == "\0" * 100 + middle + "\0" * 20


def test_output_without_end_takes_little_memory() -> None:
    code = textwrap.dedent("""
        import resource
        from opkiln.run import process
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        done = process.run(["head", "-c", str(1 << 28), "/dev/zero"])
        assert len(done.output) < 6 << 20
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """)
    done = process.run([sys.executable, "-c", code], env={"PYTHONPATH": str(SOURCE)})
    assert done.returncode == 0, done.output
    assert int(done.output) < 64 << 10  # KiB
