"""Programs: which of them have system calls of their own, and that a digest is made once."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from sample.levels import HERE, OTHER, OTHER_CXX

from opkiln.base import digest
from opkiln.building.observing import observer
from opkiln.machine import facts

# Each function makes a system call by itself, with arguments from another place.
RAW = r"""
#include <sys/syscall.h>
#ifdef __ARM_ARCH
#define CALL(number, a, b, c) ({                                                              \
  register long x8 __asm__("x8") = (number), x0 __asm__("x0") = (long)(a),                    \
                x1 __asm__("x1") = (long)(b), x2 __asm__("x2") = (long)(c);                   \
  __asm__ volatile("svc #0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2) : "memory"); x0; })
#else
#define CALL(number, a, b, c) ({ long got;                                                    \
  __asm__ volatile("syscall" : "=a"(got) : "a"((long)(number)), "D"(a), "S"(b),               \
                   "d"((long)(c)) : "rcx", "r11", "memory"); got; })
#endif
struct place { const char* path; long flags; };
const char* name = "file";
long constants(void) { return CALL(SYS_openat, -100, "file", 0); }
long from_memory(void) { return CALL(SYS_openat, -100, name, 02000000); }
long arguments(long number, long a, long b, long c) { return CALL(number, a, b, c); }
long fields(struct place* at) { return CALL(SYS_openat, -100, at->path, at->flags); }
long items(struct place* at, long i) {
  return CALL(SYS_openat, at[i].flags, at[i].path, at[i + 1].flags);
}
long computed(int* at) { return CALL(SYS_openat, at[1], at, at[3] & 7); }
long next(const char* path) { return CALL(SYS_openat, -100, path + 8, path[3]); }
long each(const char** paths, int count) {
  long sum = 0;
  for (int i = 0; i < count; i++) sum += CALL(SYS_openat, -100, paths[i], 0);
  return sum;
}
long checked(long a, const char* path) {
  long got = CALL(SYS_openat, a * 3, path, a + 5);
  return (unsigned long)got > -4096UL ? -1 : got;
}
int main(int count, char** given) {
  char text[64];
  long file = CALL(SYS_openat, -100, given[1], 0);
  return CALL(SYS_read, file, text, count) == text[0];
}
"""
PLAIN = r"""
#define _GNU_SOURCE
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>
long number(void) { return syscall(SYS_getpid); }
int main(int count, char** given) {
  FILE* file = fopen(given[count - 1], "r");
  printf("%d\n", file ? fgetc(file) : 0x050f);
  return 0;
}
"""


def compiled(where: Path, text: str, *flags: str, cxx: str = "g++") -> str:
    source, output = where / "source.c", where / "output"
    source.write_text(text)
    subprocess.run([cxx, "-x", "c", source, "-o", output, *flags], check=True)
    return str(output)


def functions(path: str) -> list[bool]:
    """Of each function in an object, whether it has a system call."""
    data = Path(path).read_bytes()
    code = [each for each in observer._code(data) if each[1] < each[2]]  # type: ignore[arg-type]
    return [observer._has_system_call(data, *each) for each in code]  # type: ignore[arg-type]


@pytest.mark.parametrize("level", ["-O0", "-O1", "-O2", "-O3", "-Os"])
@pytest.mark.parametrize("machine", [HERE, OTHER])
def test_system_calls_in_a_programs_own_code_are_found(
    machine: str, level: str, tmp_path: Path
) -> None:
    cxx = "g++" if machine == HERE else OTHER_CXX
    if shutil.which(cxx) is None:
        pytest.skip(f"{cxx} is not installed")
    flags = (level, "-c", "-ffunction-sections", "-fPIC")
    assert functions(compiled(tmp_path, RAW, *flags, cxx=cxx)) == [True] * 10
    assert functions(compiled(tmp_path, PLAIN, *flags, cxx=cxx)) == [False] * 2


def test_static_program_is_opaque_and_one_that_uses_the_c_library_is_not(tmp_path: Path) -> None:
    assert not observer.is_opaque(compiled(tmp_path, PLAIN))
    assert not observer.is_opaque(compiled(tmp_path, PLAIN, "-shared", "-fPIC"))
    assert observer.is_opaque(compiled(tmp_path, PLAIN, "-static"))
    assert observer.is_opaque(compiled(tmp_path, RAW))


def test_program_of_which_nothing_is_known_is_opaque(tmp_path: Path) -> None:
    data = Path(compiled(tmp_path, RAW, "-c")).read_bytes()
    path = tmp_path / "changed"
    path.write_bytes(data[:40] + bytes(8) + data[48:])  # without a table of its sections
    assert observer.is_opaque(str(path))
    path.write_bytes(data[:60] + bytes(2) + data[62:])  # with an empty one
    assert observer.is_opaque(str(path))
    path.write_bytes(data[:18] + b"\x01\x01" + data[20:])  # for another machine
    assert observer.is_opaque(str(path))


@pytest.mark.parametrize("text", [b"", b"#!/bin/sh\n", b"\x7fELF", b"\x0f\x05" * 40])
def test_file_that_is_no_program_is_not_opaque(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(text)
    assert not observer.is_opaque(str(path))


def loaded(program: str) -> list[str]:
    """A program and the libraries that it loads."""
    done = subprocess.run(
        [program], env={"LD_TRACE_LOADED_OBJECTS": "1"}, capture_output=True, text=True, check=True
    )
    words = done.stdout.split()
    return [program, *(word for word in words if word.startswith("/"))]


def test_no_program_that_the_compiler_here_loads_is_opaque() -> None:
    cxx = shutil.which("g++")
    assert cxx is not None
    found = {cxx}
    for name in ("cc1plus", "collect2", "as", "ld"):
        told = subprocess.check_output([cxx, f"-print-prog-name={name}"], text=True).strip()
        path = shutil.which(told)
        assert path is not None, told
        found.update(loaded(path))
    assert len(found) > 8
    assert [path for path in sorted(found) if observer.is_opaque(path)] == []


# Their digests


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that is worth remembering, and at rest: the clock is ahead."""
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + 10_000_000_000)
    path = tmp_path / "cc1plus"
    path.write_bytes(b"one" + bytes(observer._LARGE))
    return path


def known_anew(path: Path, memory: Path) -> str:
    """A program's digest, as a process finds it that has not looked at it before."""
    observer._known.clear()
    facts._read.clear()
    return observer.digest(str(path), (str(memory),))


def test_large_program_is_hashed_once_and_again_when_it_has_changed(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, hashed = large.parent / "store" / "toolchains", []

    def counted(path: str) -> str:
        hashed.append(path)
        return digest.sha256_file(path)

    monkeypatch.setattr(facts, "sha256_file", counted)
    for text in (b"one", b"two"):
        large.write_bytes(text + bytes(observer._LARGE))
        hashed.clear()
        wanted = hashlib.sha256(large.read_bytes()).hexdigest()
        for _ in range(2):
            assert known_anew(large, memory) == wanted
            assert observer.identify(str(large), (str(memory),)) == (False, ())
        assert hashed == [str(large)]


def test_program_that_is_replaced_while_it_is_hashed_is_not_remembered(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, real = large.parent / "store" / "toolchains", digest.sha256_file

    def overtaken(path: str) -> str:
        found = real(path)
        large.write_bytes(b"two" + bytes(observer._LARGE))
        os.utime(path, (time.time() + 20,) * 2)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(facts, "sha256_file", overtaken)
        known_anew(large, memory)
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + 40_000_000_000)
    assert known_anew(large, memory) == hashlib.sha256(large.read_bytes()).hexdigest()


def test_small_file_is_hashed_each_time(tmp_path: Path) -> None:
    path = tmp_path / "a.h"
    for text in ("one", "two"):
        path.write_text(text)
        assert observer.digest(str(path), (str(tmp_path),)) == digest.sha256_file(str(path))
    assert [each.name for each in tmp_path.iterdir()] == ["a.h"]
