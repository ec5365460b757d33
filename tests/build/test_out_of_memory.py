"""A compiler that is killed: by the kernel for want of memory, or by somebody."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sample import child
from sample.compiler import Compiler

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timed

_LIMIT = 192 << 20

_CHILD = """
    import json, sys
    import opkiln
    from opkiln.errors import BuildError
    try:
        opkiln.load("hungry", [sys.argv[1]], abi="none", is_python_module=False)
    except BuildError as error:
        print(json.dumps({"kind": type(error).__name__, "what": error.what, "why": error.why,
                          "hint": error.hint, "text": str(error)}))
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of this machine, with a limit of memory."""
    tops = [line.split(":") for line in Path("/proc/self/cgroup").read_text().splitlines()]
    if "memory" in [name for _, name, _ in tops]:
        place, limit = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
    else:
        place, limit = Path("/sys/fs/cgroup"), "memory.max"
    made = place / f"opkiln-memory-{os.getpid()}"
    try:
        made.mkdir()
        (made / limit).write_text(str(_LIMIT))
    except OSError as error:
        if made.is_dir():
            made.rmdir()
        pytest.skip(f"no control group with a limit of memory can be made here: {error}")
    yield made
    deadline = time.monotonic() + 10
    while made.is_dir():
        try:
            made.rmdir()
        except OSError:
            assert time.monotonic() < deadline, f"{made} is still in use"
            time.sleep(0.05)


def failed(source: Path, prefix: list[str] | None = None, **env: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(child.run(_CHILD, str(source), prefix=prefix or [], env=env))
    return found


def test_out_of_memory_kill_names_the_limit_of_the_control_group(
    group: Path, tmp_path: Path
) -> None:
    source = tmp_path / "hungry.cpp"
    source.write_text("int numbers[] = {" + "1," * 4_000_000 + "};\n")
    inside = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
    error = failed(source, inside)
    assert error["kind"] == "BuildError"  # it says nothing of the source
    assert error["what"] == "op hungry: hungry.cpp: the compiler ran out of memory and was killed"
    assert "the control group's limit is 192 MiB" in error["why"]
    assert "MAX_JOBS=1" in error["hint"]
    assert "signal" not in error["why"].splitlines()[0]


def test_kill_that_was_not_for_want_of_memory_does_not_blame_memory(tmp_path: Path) -> None:
    compiler = Compiler(tmp_path)
    compiler.write(before="case \"$*\" in *' -c '*) kill -9 $$;; esac")
    source = tmp_path / "a.cpp"
    source.write_text("int x;\n")
    error = failed(source, CXX=str(compiler.path))
    assert error["kind"] == "BuildError"
    assert error["what"] == "op hungry: a.cpp: the compiler was killed by SIGKILL"
    assert "the kernel counted no out-of-memory kill" in error["why"]
    assert "MAX_JOBS" not in error["text"]
