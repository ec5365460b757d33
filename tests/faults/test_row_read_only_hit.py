"""Row 8: a hit writes nothing, starts nothing, and so needs no more than a readable cache."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import mounts
import pytest
from loaders import Loader, let_rest, returning, write
from sample.tracing import calls, strace

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.row(8), pytest.mark.timed]


def built(tmp_path: Path) -> Path:
    source = write(tmp_path / "op.cpp", returning(8, '#include "op.h"\n#include <vector>'))
    write(tmp_path / "op.h", "#pragma once\n")
    let_rest()  # so that the build leaves a receipt
    with Loader() as process:
        assert process.load("op", source, verbose=None).origin == "built"
    return source


def test_a_hit_makes_no_system_call_that_writes_and_starts_no_process(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = built(tmp_path)
    with Loader(forked=False) as process:  # so that all bytecode is there
        assert process.load("op", source, verbose=None).origin == "store"
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    log = cache.parent / "log"  # not beside the source: a new file there is looked at
    with Loader(prefix=strace(log)) as process:
        assert process.load("op", source, verbose=None).origin == "store"
    made = calls(log)
    assert any(call.path.endswith("op.so") for call in made)  # it saw the load at all
    written = [call for call in made if call.writes and not call.path.startswith("pipe:")]
    assert [call for call in written if call.path != "/dev/null"] == []
    assert len([call for call in made if call.name == "execve" and not call.failed]) == 1
    assert [call for call in made if call.name == "flock"] == []


def test_a_read_only_cache_serves_hits(tmp_path: Path, cache: Path) -> None:
    source = built(tmp_path)
    log = cache.parent / "log"  # not beside the source: a new file there is looked at
    with Loader(prefix=[*mounts.read_only(cache), *strace(log)]) as process:
        answer = process.load("op", source, verbose=None)
        assert (answer.value, answer.origin) == (8, "store")
        assert answer.path.is_relative_to(cache)
    written = [call for call in calls(log) if call.writes and call.path.startswith(str(cache))]
    assert written == []


def test_an_entry_serves_where_nothing_may_compile_and_the_compiler_is_not_known(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache restored on another machine: what was remembered of its compiler is worth nothing."""
    source = built(tmp_path)
    shutil.rmtree(cache / "v1" / "toolchains")
    monkeypatch.setenv("OPKILN_MODE", "cached")
    with Loader(prefix=mounts.read_only(cache)) as process:
        answer = process.load("op", source)
        assert (answer.value, answer.origin) == (8, "store")
        write(source, returning(9))
        assert process.load("op", source).error == "CompilingOff"


def test_a_miss_beside_a_read_only_cache_is_built_in_another_place(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    monkeypatch.setenv("XDG_CACHE_HOME", str(elsewhere))
    other = write(tmp_path / "other.cpp", returning(9))
    with Loader(prefix=mounts.read_only(cache)) as process:
        answer = process.load("other", other)
        assert answer.value == 9
        assert answer.path.is_relative_to(elsewhere)
        said = " ".join(answer.warnings)
        assert "read-only" in said
        assert str(elsewhere) in said
        again = process.load("other", other)
        assert (again.value, again.origin) == (9, "store")
