"""The same inputs give the same bytes: in two directories, for two users, on two dates."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sample import child, known
from sample.package import Package

if TYPE_CHECKING:
    from collections.abc import Iterator

BUILD = """
    import sys
    sys.path.insert(0, sys.argv[1])
    from repro.op import {kind}Builder
    from opkiln.decision.terms import BUILD, Request
    from opkiln.loading import loader
    made, _ = loader.obtain(Request({kind}Builder().op(), BUILD))
    assert made.origin == "built"
"""
pytestmark = pytest.mark.counts_compiles  # an object from the pool would always be the same

# A source that tries: the file's name, the date, an anonymous namespace, static objects.
TELLTALE = """
#include "shared.h"
#include <string>
namespace { struct Hidden { std::string name = __FILE__ __DATE__ __TIME__; } hidden; }
extern "C" const char* told() { return hidden.name.c_str(); }
"""


# Preloaded, it lets a compiler live 40 days ago.
CLOCK = """
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
constexpr long kShift = 40 * 86400;
extern "C" int clock_gettime(clockid_t id, timespec* at) {
  const int status = syscall(SYS_clock_gettime, id, at);
  if (id == CLOCK_REALTIME) at->tv_sec -= kShift;
  return status;
}
extern "C" int gettimeofday(timeval* at, void*) {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  *at = {now.tv_sec, now.tv_nsec / 1000};
  return 0;
}
extern "C" time_t time(time_t* at) {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at != nullptr) *at = now.tv_sec;
  return now.tv_sec;
}
"""


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory that other users can reach."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@functools.cache
def usual() -> list[str]:
    """The digests of a build with nothing unusual."""
    with tempfile.TemporaryDirectory() as name:
        return build(Path(name), "one", "cache", when=1_000_000_000)


def build(
    base: Path,
    directory: str,
    cache: str,
    *,
    when: float | None = None,
    kind: str = "plain",
    user: int | None = None,
    python: str | None = None,
    env: dict[str, str | None] | None = None,
) -> list[str]:
    """Build the package below ``directory`` into a new cache: the digests of all it made."""
    package = Package(kind, base / directory, "repro")
    if kind == "plain":
        (package / "csrc/add.cpp").write_text((package / "csrc/add.cpp").read_text() + TELLTALE)
    for path in [package.path, *package.path.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
        if when is not None:
            os.utime(path, (when, when))
    store = known.make_store(base / cache)
    for path in () if user is None else (store, *store.rglob("*")):
        os.chown(path, user, user)
    environment = {"OPKILN_CACHE_DIR": str(base / cache), "OPKILN_DEBUG": None, **(env or {})}
    child.run(
        BUILD.format(kind=kind.capitalize()), str(package.where), env=environment, user=user,
        bare=kind == "plain", **({} if python is None else {"python": python}),
    )  # fmt: skip
    found = [*(base / cache).rglob("objects/**/0"), *(base / cache).rglob("ops/**/*.so")]
    assert len(found) == (4 if kind == "plain" else 2)
    return sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in found)


def test_debug_information_holds_no_path_of_the_machine(base: Path) -> None:
    debug: dict[str, str | None] = {"OPKILN_DEBUG": "1"}
    one = build(base, "one", "cache1", env=debug)
    other = build(base, "a much longer/directory", "cache2", env=debug)
    assert one == other
    for path in (base / "cache1").rglob("objects/**/0"):
        assert str(base).encode() not in path.read_bytes()


def test_other_directories_caches_dates_locales_and_time_zones_give_the_same_bytes(
    base: Path,
) -> None:
    (base / "tmp").mkdir()
    env = {"TMPDIR": str(base / "tmp"), "LANG": "tr_TR.UTF-8", "LC_ALL": "de_DE.UTF-8",
           "TZ": "Asia/Tokyo", "SOURCE_DATE_EPOCH": "12345"}  # fmt: skip
    assert build(base, "a much longer/directory", "cache2", when=1_900_000_000, env=env) == usual()


def test_a_clock_on_another_day_gives_the_same_bytes(base: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None
    (base / "shim.cpp").write_text(CLOCK)
    shim = base / "shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", base / "shim.cpp", "-o", shim], check=True)
    ask = [sys.executable, "-S", "-c", "import time; print(time.time())"]
    shifted = subprocess.run(
        ask, env={**os.environ, "LD_PRELOAD": str(shim)}, capture_output=True, check=True
    )
    assert float(shifted.stdout) < time.time() - 39 * 86400, "the shim shifts no clock"
    wrapper = base / "g++-of-last-month"
    wrapper.write_text(f'#!/bin/sh\nexport LD_PRELOAD="{shim} $LD_PRELOAD"\nexec {compiler} "$@"\n')
    wrapper.chmod(0o755)
    assert build(base, "one", "cache1", env={"CXX": str(wrapper)}) == usual()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_two_users_get_the_same_bytes(base: Path) -> None:
    python = child.python_for(child.NOBODY)
    if python is None:
        pytest.skip("no interpreter that another user can start")
    (base / "tmp").mkdir(mode=0o777)
    os.chmod(base / "tmp", 0o1777)
    theirs = build(base, "one", "cache1", user=child.NOBODY, python=python,
                   env={"HOME": "/nonexistent", "TMPDIR": str(base / "tmp"),
                        "OPKILN_RUNTIME_DIR": None})  # fmt: skip
    assert theirs == usual()
    assert {path.stat().st_uid for path in (base / "cache1").rglob("*.so")} == {child.NOBODY}


@pytest.mark.full  # by the flags of the plain op, above
def test_an_op_on_the_stable_abi_gives_the_same_bytes(base: Path) -> None:
    one = build(base, "one", "cache1", kind="stable")
    assert one == build(base, "a much longer/directory", "cache2", kind="stable")
