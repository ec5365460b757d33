"""What a cache hit costs: no process, no write, no compiler, nothing third-party."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from sample import at_rest, child

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sample.package import Package

AUDIT = """
import sys
WRITE = 0o1 | 0o2 | 0o100 | 0o1000  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.system")
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.chmod",
           "os.chown", "os.truncate", "os.utime", "tempfile.mkdtemp", "tempfile.mkstemp",
           "os.mkfifo", "shutil.rmtree", "os.putenv", "os.unsetenv", "fcntl.flock", "fcntl.lockf")
seen = []
def hook(event, arguments):
    if event in STARTS or event in CHANGES:
        seen.append((event, str(arguments)))
    elif event == "open" and arguments[2] & WRITE:
        seen.append((event, str(arguments)))
sys.addaudithook(hook)
before = set(sys.modules)
"""
FOREIGN = """
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print("foreign", sorted(n for n in new if n not in sys.stdlib_module_names and n not in OWN))
print("seen", seen)
"""

# System calls that change a file system, start a process or take a lock on disk.
WRITES = re.compile(
    r"^(?:\d+ +)?(creat|mkdir\w*|rename\w*|unlink\w*|link|linkat|symlink\w*|f?truncate|chmod|"
    r"fchmod\w*|chown|fchown\w*|utime\w*|fsync|fdatasync|flock|pwrite64|rmdir|mknod\w*|"
    r"fork|vfork|execve|clone3?)\("
    r"|O_WRONLY|O_RDWR|O_CREAT|O_TRUNC|F_SETLK",
    re.MULTILINE,
)


def traced(code: str, tmp_path: Path, **arguments: object) -> list[str]:
    """What a child did between its two marks, as strace saw it."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed; the audit hook's tests say the same from inside")
    log = tmp_path / "strace.log"
    probe = subprocess.run([strace, "-o", os.devnull, "true"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip("strace may not trace here")
    child.run(code, prefix=[strace, "-f", "-o", str(log)], **arguments)  # type: ignore[arg-type]
    text = log.read_text()
    _, begun, rest = text.partition("/mark-begin")
    inside, ended, _ = rest.partition("/mark-end")
    assert begun
    assert ended
    return [line for line in inside.splitlines() if WRITES.search(line)]


@pytest.fixture(autouse=True)
def shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was at rest when it was built leaves a receipt that lasts."""
    at_rest.shorten(monkeypatch)


@pytest.fixture
def built(plain: Package) -> Package:
    at_rest.wait(plain.path)
    plain.load()
    return plain


def test_importing_opkiln_imports_nothing_else_makes_no_file_and_starts_no_process(
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    out = child.run(AUDIT + "OWN = {'opkiln'}\nimport opkiln\n" + FOREIGN,
                    bare=False, forked=False,
                    env={"HOME": str(home), "OPKILN_CACHE_DIR": None})  # fmt: skip
    assert out.split("\n")[:2] == ["foreign []", "seen []"]
    assert list(home.iterdir()) == []


def test_every_public_name_resolves_without_torch() -> None:
    out = child.run("""
        import sys, opkiln
        for name in opkiln.__all__:
            if name != "optim":
                getattr(opkiln, name)
        assert set(opkiln.__all__) <= set(dir(opkiln))
        try:
            opkiln.no_such_name
        except AttributeError as error:
            print(error)
        print("torch" in sys.modules)
    """, bare=False, forked=False)  # fmt: skip
    assert out.splitlines() == ["module 'opkiln' has no attribute 'no_such_name'", "False"]


def test_importing_opkiln_makes_no_system_call_that_writes_or_starts(tmp_path: Path) -> None:
    code = "import os\nos.path.exists('/mark-begin')\nimport opkiln\nos.path.exists('/mark-end')"
    assert traced(code, tmp_path, env={"PYTHONDONTWRITEBYTECODE": "1"}) == []


def test_a_hit_imports_nothing_third_party_writes_nothing_and_starts_nothing(
    built: Package,
) -> None:
    code = AUDIT + (
        f"OWN = {{'opkiln', '{built.name}', '_ctypes'}}\n"
        f"from {built.name}.op import PlainBuilder\n"
        "print(PlainBuilder().load().add(1, 2))\n"
    ) + FOREIGN  # fmt: skip
    out = child.run(code, path=[built.where], bare=False, forked=False)
    assert out.splitlines() == ["103", "foreign []", "seen []"]


def test_a_hit_of_a_torch_op_imports_writes_and_starts_nothing_either(
    package: Callable[..., Package],
) -> None:
    stable = package("stable")
    at_rest.wait(stable.path)
    stable.builder().jit_load()
    code = (
        f"import torch\n{AUDIT}OWN = {{'opkiln', '{stable.name}', 'torch'}}\n"
        f"from {stable.name}.op import StableBuilder\n"
        "print(StableBuilder().load().who(torch.ones(1)))\n"
    ) + FOREIGN  # fmt: skip
    out = child.run(code, path=[stable.where], bare=False)
    assert out.splitlines() == ["1", "foreign []", "seen []"]


def test_a_hit_makes_no_system_call_that_writes_or_starts(built: Package, tmp_path: Path) -> None:
    code = f"""
        import os
        os.path.exists("/mark-begin")
        from {built.name}.op import PlainBuilder
        library = PlainBuilder().load()
        os.path.exists("/mark-end")
        assert library.add(1, 2) == 103
    """
    environment = {"PYTHONDONTWRITEBYTECODE": "1"}
    assert traced(code, tmp_path, path=[built.where], env=environment) == []


def test_a_cold_load_would_be_seen_by_both_ways_of_looking(plain: Package, tmp_path: Path) -> None:
    code = AUDIT + (
        f"from {plain.name}.op import PlainBuilder\nPlainBuilder().load()\n"
        "print(sorted({event for event, _ in seen}))\n"
    )
    out = child.run(code, path=[plain.where])
    assert {"subprocess.Popen", "os.mkdir", "os.rename", "open"} <= set(eval(out))
    plain.edit("csrc/add.cpp", "a + b", "a - b")
    seen = traced(f"""
        import os
        from {plain.name}.op import PlainBuilder
        os.path.exists("/mark-begin")
        PlainBuilder().load()
        os.path.exists("/mark-end")
    """, tmp_path, path=[plain.where])  # fmt: skip
    assert any("execve(" in line for line in seen)
    assert any("O_WRONLY|O_CREAT" in line for line in seen)


def test_a_load_for_the_cpu_runs_few_files_of_opkiln_and_none_of_other_backends(
    plain: Package,
) -> None:
    code = at_rest.IN_CHILD + (
        f"import sys\nfrom {plain.name}.op import PlainBuilder\nPlainBuilder().load()\n"
        "ours = [name for name in sys.modules if name.partition('.')[0] == 'opkiln']\n"
        "print(*(name for name in ours if not hasattr(sys.modules[name], '__path__')))\n"
    )
    at_rest.wait(plain.path)
    cold, warm = (
        child.run(code, path=[plain.where], bare=False, forked=False).split() for _ in range(2)
    )
    assert len(warm) <= 18, warm
    assert len(cold) <= 60, cold
    others = re.compile("nvcc|nvrtc|cuda|hip|rocm|sycl|toolkits")
    assert not [name for name in cold if others.search(name)]


def test_a_full_search_that_hits_writes_a_receipt_and_nothing_else(
    built: Package, cache: Path, tmp_path: Path
) -> None:
    shutil.rmtree(cache / "v1" / "receipts", ignore_errors=True)
    before = set(cache.rglob("*"))
    code = f"""
        import os
        os.path.exists("/mark-begin")
        from {built.name}.op import PlainBuilder
        library = PlainBuilder().load()
        os.path.exists("/mark-end")
        assert library.add(1, 2) == 103
    """
    environment = {"PYTHONDONTWRITEBYTECODE": "1"}
    written = traced(code, tmp_path, path=[built.where], env=environment)
    assert all("/v1/receipts" in call for call in written), written
    new = [path for path in cache.rglob("*") if path.is_file() and path not in before]
    assert len(new) == 1
    assert new[0].is_relative_to(cache / "v1" / "receipts")


def test_a_warm_cache_loads_with_no_compiler_on_path(built: Package, tmp_path: Path) -> None:
    out = child.run(f"""
        from {built.name}.op import PlainBuilder
        builder = PlainBuilder()
        assert builder.is_compatible(), builder.error_log
        print(builder.load().add(1, 2))
    """, path=[built.where], env={"PATH": str(tmp_path)})  # fmt: skip
    assert out.strip() == "103"


def test_a_slim_image_is_served_by_a_compiler_it_does_not_have_but_never_by_other_sources(
    built: Package, tmp_path: Path
) -> None:
    built.edit("csrc/add.cpp", "a + b", "a - b")
    done = child.finish(child.start(f"""
        from {built.name}.op import PlainBuilder
        PlainBuilder().load()
    """, path=[built.where], env={"PATH": str(tmp_path)}))  # fmt: skip
    assert done.returncode != 0
    assert "no C++ compiler can be used here" in done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_cache_that_can_only_be_read_serves_another_user(
    built: Package, cache: Path, tmp_path: Path
) -> None:
    """Root's warm cache, no write permission, no home: what a container often is."""
    python = child.python_for(child.NOBODY)
    if python is None:
        pytest.skip("no interpreter that another user can start")
    import tempfile

    with tempfile.TemporaryDirectory() as base:
        os.chmod(base, 0o755)
        shutil.copytree(cache, f"{base}/cache")
        shutil.copytree(built.where, f"{base}/packages")
        os.mkdir(f"{base}/tmp")
        for directory, names, files in os.walk(base):
            for name in (*names, *files):
                path = os.path.join(directory, name)
                os.chmod(path, 0o755 if os.path.isdir(path) else 0o644)
        os.chmod(f"{base}/tmp", 0o1777)
        before = sorted(os.walk(base))
        code = AUDIT + (
            f"sys.path.insert(0, sys.argv[1])\nfrom {built.name}.op import PlainBuilder\n"
            "print(PlainBuilder().load().add(1, 2), seen)\n"
        )
        out = child.run(code, f"{base}/packages", python=python, user=child.NOBODY,
            env={"OPKILN_CACHE_DIR": f"{base}/cache", "HOME": "/nonexistent",
                 "TMPDIR": f"{base}/tmp", "OPKILN_RUNTIME_DIR": None,
                 "PYTHONDONTWRITEBYTECODE": "1"})  # fmt: skip
        assert out.strip() == "103 []"
        assert sorted(os.walk(base)) == before
