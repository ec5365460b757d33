"""``make mutants-drawn``: what the whole test suite notices of changes drawn over all of ``src``.

    drawn.py draw LIST [--seed 30] [--count 300] [--checkout DIR]
    drawn.py reach REACH [TESTS ...] [--checkout DIR] [--place DIR]
    drawn.py run LIST RESULTS --reach REACH [--checkout DIR] [--place DIR] [--limit 120] [--jobs 1]
    drawn.py branch REACH [--checkout DIR]
    drawn.py compare BEFORE AFTER --list LIST

``draw`` writes one change per line. ``reach`` runs tests (all but those marked ``full``) once and
adds to REACH which lines each of them reaches, in its process and in the Python processes that it
starts, and how long it takes. Give it one folder after another, or all. ``run`` makes one change
after another and runs the tests that reach it, the fastest first, until one fails; a test that
fails without the change as well does not count. It goes on where it was stopped. ``compare`` names
the changes that were noticed before and are not any more, with the test that noticed them.

Everything happens in private copies of the checkout and its ``.venv`` under ``--place``, so that
neither is touched, and no process of a test can find the unchanged sources. LIST suits every
checkout whose sources are nearly those that it was drawn from; a change whose statement is not
there is reported as gone. The pool of compiled objects that tests keep is REACH.pool: ``reach``
fills it, and each change starts with a copy, for changed sources may put wrong objects into it.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from changes import Change, draw, names_of, read_changes

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PLUGIN = "opkiln_reached"
PYTEST = ("-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", "-p", "no:xdist", "-m",
          "not full", "--tb=short", "--no-header")  # fmt: skip
# A copy leaves these out of the checkout's top directory.
LEFT_OUT = (".git", "*venv", ".*cache", ".hypothesis", ".deepspeed", "build", "dist")

KILLED, TIMED_OUT, GONE = "killed", "timed out", "gone"
SURVIVED, LIMITED, UNREACHED = "survived", "survived within the limit", "not reached"
BATCHES = (5, 30, 120)  # seconds of tests in one run of pytest; the last one again and again
# Added to the package while it is measured: with -S, Python reads no .pth file. Nothing that such a
# process could not import before stays importable.
WITHOUT_SITE = """
if __import__("sys").flags.no_site:
    __import__("sys").path.insert(0, {site!r})
    __import__({plugin!r}).start()
    __import__("sys").path.remove({site!r})
"""
SCHEMA = """
create table if not exists test (id text primary key, seconds real, outcome text, shared text);
create table if not exists reach (file text, context text, lines blob, primary key (file, context));
create table if not exists arc (file text, start int, stop int, primary key (file, start, stop));
"""


class Copy:
    """A private copy of a checkout and its environment, in which sources may be changed."""

    def __init__(self, checkout: Path, place: Path, pool: Path) -> None:
        self.checkout = checkout
        self.place = place
        self.pool = pool
        self.site = place / ".venv/lib" / f"python3.{sys.version_info.minor}" / "site-packages"
        self.sound: dict[str, bool] = {}  # tests and whether they pass without a change
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        for path in checkout.iterdir():
            if path.is_file():
                shutil.copy2(path, place)
            elif not any(path.match(pattern) for pattern in LEFT_OUT):
                ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
                shutil.copytree(path, place / path.name, ignore=ignored, symlinks=True)
        old = checkout / ".venv"
        shutil.copytree(old, place / ".venv", symlinks=True, copy_function=_link)
        # Files that name the environment's place. A new file each: the old one is a link.
        naming = (place / ".venv/pyvenv.cfg", *(place / ".venv/bin").iterdir(),
                  *self.site.glob("opkiln-*/direct_url.json"))  # fmt: skip
        for path in naming:
            text = path.read_bytes() if not path.is_symlink() else b""
            if os.fsencode(checkout) in text[:5000]:
                mode = path.stat().st_mode
                path.unlink()
                path.write_bytes(text.replace(os.fsencode(checkout), os.fsencode(place)))
                path.chmod(mode)
        for path in self.site.glob("__editable__*"):
            path.unlink()
        (self.site / "__editable__.opkiln.pth").write_text(f"{place / 'src'}\n")
        shutil.copy(HERE / "reached.py", self.site / f"{PLUGIN}.py")
        # With digests instead of times, so that Python never takes them for a changed source.
        self._python("-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "src")
        found = self._python("-c", "import opkiln; print(opkiln.__file__)")
        assert found.strip() == str(place / "src/opkiln/__init__.py"), found

    def _python(self, *words: str) -> str:
        argv = [str(self.place / ".venv/bin/python"), *words]
        return subprocess.run(
            argv,
            cwd=self.place,
            check=True,
            env=_environment(self.pool),
            stdout=subprocess.PIPE,
            text=True,
        ).stdout

    def pytest(self, words: Iterable[str], pool: Path, timeout: float | None = None) -> int | None:
        """pytest's exit code; None if it was stopped after ``timeout`` seconds. What it said is in
        the file ``log``."""
        (self.place / "failed").unlink(missing_ok=True)
        argv = [str(self.place / ".venv/bin/python"), *PYTEST, f"--basetemp={self.place / 'tmp'}"]
        with (self.place / "log").open("w") as log:
            running = subprocess.Popen(
                [*argv, *words], cwd=self.place, env=_environment(pool), stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            try:
                return running.wait(timeout)
            except BaseException as error:
                os.killpg(running.pid, signal.SIGKILL)
                running.wait()
                if isinstance(error, subprocess.TimeoutExpired):
                    return None
                raise

    def notices(self, tests: list[str], timeout: float) -> tuple[str, str] | None:
        """Run tests on the sources as they are now: a verdict and what failed, if anything did."""
        own = self.place / "pool"
        shutil.rmtree(own, ignore_errors=True)
        if self.pool.exists():
            shutil.copytree(self.pool, own, symlinks=True)
        (self.place / "chosen.json").write_text(json.dumps(tests))
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        code = self.pytest(["-x", *files], own, timeout)
        if code is None:
            return TIMED_OUT, ""
        if code in (0, 5):  # passed, or there is none of these tests any more
            return None
        failed = self.place / "failed"
        first = failed.read_text().splitlines()[0] if failed.exists() else ""
        return KILLED, first or f"pytest ended with {code}"

    def judge(
        self, change: Change, tests: list[tuple[str, float]], limit: float
    ) -> dict[str, object]:
        """Make a change, and run tests until one notices it."""
        path = self.place / change.file
        text = path.read_bytes()
        changed = change.apply(text)
        if changed is None:
            return {"verdict": GONE}
        left = list(tests)
        ran, size = 0, 0
        spent = 0.0
        while left:
            batch = _take(left, BATCHES[min(size, len(BATCHES) - 1)], limit - spent)
            size += 1
            if not batch:
                return {"verdict": LIMITED, "tests": ran, "left": len(left)}
            expected = sum(seconds for _, seconds in batch)
            names = [name for name, _ in batch if self.sound.get(name, True)]
            while names:
                path.write_bytes(changed)
                try:
                    found = self.notices(names, 4 * expected + 90)
                finally:
                    path.write_bytes(text)
                if found is None:
                    break
                if self._is_sound(_blame(names, found[1]) or names, 4 * expected + 90):
                    return {"verdict": found[0], "by": found[1], "tests": ran + len(names)}
                sound = [name for name in names if self.sound.get(name, True)]
                if sound == names:
                    break  # they fail without the change as well, and none is to blame
                names = sound
            left = left[len(batch) :]
            ran += len(names)
            spent += expected
        return {"verdict": SURVIVED if ran else UNREACHED, "tests": ran}

    def _is_sound(self, tests: list[str], timeout: float) -> bool:
        """Whether tests pass on the unchanged sources. A single test is asked once."""
        if len(tests) == 1 and tests[0] in self.sound:
            return self.sound[tests[0]]
        found = self.notices(tests, timeout)
        if len(tests) == 1:
            self.sound[tests[0]] = found is None
        elif found is not None:
            self.sound |= dict.fromkeys(_blame(tests, found[1]), False)
        return found is None


def _blame(tests: list[str], failed: str) -> list[str]:
    """What failed is a test, or a file that cannot be collected, or neither."""
    return [test for test in tests if f"{test}::".startswith(f"{failed}::")]


def _link(old: str, new: str) -> None:
    """Other file systems get copies."""
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError:
        shutil.copy2(old, new, follow_symlinks=False)


def _environment(pool: Path) -> dict[str, str]:
    dropped = ("PYTHONPATH", "VIRTUAL_ENV", "PYTEST_ADDOPTS")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, "PYTHONDONTWRITEBYTECODE": "1", "TEST_POOL": str(pool)}


def _take(tests: list[tuple[str, float]], seconds: float, most: float) -> list[tuple[str, float]]:
    """The first tests that take this long together; at least one, unless it takes more than
    ``most`` seconds."""
    total, count = 0.0, 0
    for _, each in tests:
        if total + each > (min(seconds, most) if count else most):
            break
        total += each
        count += 1
    return tests[:count]


def measure(copy: Copy, tests: list[str], reach: Path) -> int:
    """Run tests with coverage, and add to ``reach`` what they reached."""
    data = copy.place / "reach"
    data.mkdir()
    data.chmod(0o1777)  # some tests become another user
    (data / "current").write_text("")
    (copy.site / f"{PLUGIN}.pth").write_text(f"import {PLUGIN}; {PLUGIN}.start()\n")
    with (copy.place / "src/opkiln/__init__.py").open("a") as package:
        package.write(WITHOUT_SITE.format(site=str(copy.site), plugin=PLUGIN))
    code = copy.pytest(tests, copy.pool)
    print((copy.place / "log").read_text()[-2000:])
    with sqlite3.connect(reach) as base:
        base.executescript(SCHEMA)
        rows = json.loads((data / "tests.json").read_text())
        base.executemany(
            "insert or replace into test values (?, ?, ?, ?)",
            [(t["id"], t["seconds"], t["outcome"], json.dumps(t["shared"])) for t in rows],
        )
        for file, context, lines, arcs in _read_data(data, copy.place / "src"):
            where = (file, context)
            old = base.execute("select lines from reach where file=? and context=?", where)
            for (blob,) in old.fetchall():
                lines |= int.from_bytes(blob, "little")  # noqa: PLW2901
            blob = lines.to_bytes(lines.bit_length() // 8 + 1, "little")
            base.execute("insert or replace into reach values (?, ?, ?)", (*where, blob))
            base.executemany(
                "insert or ignore into arc values (?, ?, ?)", [(file, *arc) for arc in arcs]
            )
    return 0 if code in (0, 1) else 1


def _read_data(data: Path, source: Path) -> Iterator[tuple[str, str, int, list[tuple[int, int]]]]:
    """A file of ``src``, a context, its lines as bits, and arcs (once per process and file)."""
    from coverage import CoverageData

    for path in data.glob("coverage.*"):
        found = CoverageData(str(path))
        try:
            found.read()
        except Exception as error:
            print(f"drawn: {path.name} cannot be read, a process was killed: {error}")
            continue
        for measured in found.measured_files():
            file = "src/opkiln/" + measured.rpartition("/opkiln/")[2]
            if not (source.parent / file).exists():
                continue
            bits: dict[str, int] = defaultdict(int)
            for line, contexts in found.contexts_by_lineno(measured).items():
                for context in contexts:
                    bits[context] |= 1 << max(line, 0)
            arcs = found.arcs(measured) or []
            for context, lines in bits.items():
                yield file, context, lines, arcs
                arcs = []


class Reach:
    """What ``reach`` has kept: which tests reach a line."""

    def __init__(self, path: Path, checkout: Path) -> None:
        self.checkout = checkout
        self.base = sqlite3.connect(path, check_same_thread=False)
        self.seconds: dict[str, float] = {}
        self.users: dict[str, set[str]] = defaultdict(set)  # of a context: the tests it counts for
        query = "select id, seconds, outcome, shared from test"
        for test, seconds, outcome, shared in self.base.execute(query):
            if outcome != "skipped":
                self.seconds[test] = seconds
                for context in (test, *json.loads(shared)):
                    self.users[context].add(test)
        self.bits: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for file, context, blob in self.base.execute("select file, context, lines from reach"):
            self.bits[file].append((context, int.from_bytes(blob, "little")))
        self.sources = _read_lines(checkout, "src/**/*.py")
        self.tests = _read_lines(checkout, "tests/**/test_*.py")

    def tests_for(self, change: Change) -> list[tuple[str, float]]:
        """The tests that a change may fail, the fastest first."""
        text = (self.checkout / change.file).read_bytes()
        at = change.locate(text)
        if at is None:
            return []
        first = text.count(b"\n", 0, at) + 1
        lines = range(first, first + change.statement.count("\n"))
        contexts = self._contexts(change.file, lines)
        names, shared = names_of(ast.parse(text), first + change.line - change.first)
        # "" is the context of what runs before the first test.
        if shared or contexts == {""}:
            contexts |= self._naming(names)
        tests = set().union(*(self.users[context] for context in contexts))
        return sorted(((test, self.seconds[test]) for test in tests), key=lambda each: each[1])

    def _contexts(self, file: str, lines: Iterable[int]) -> set[str]:
        """The contexts that reach one of these lines."""
        wanted = sum(1 << line for line in lines)
        return {context for context, bits in self.bits[file] if bits & wanted}

    def _naming(self, names: set[str]) -> set[str]:
        """Contexts that reach a line with one of these names, and tests of files with one."""
        word = re.compile(rf"\b(?:{'|'.join(map(re.escape, names))})\b")
        found: set[str] = set()
        for file, lines in self.sources.items() if names else ():
            if numbers := [n for n, line in enumerate(lines, 1) if word.search(line)]:
                found |= self._contexts(file, numbers)
        files = {
            file for file, lines in self.tests.items() if names and any(map(word.search, lines))
        }
        return found | {test for test in self.seconds if test.partition("::")[0] in files}


def _read_lines(checkout: Path, pattern: str) -> dict[str, list[str]]:
    return {
        path.relative_to(checkout).as_posix(): path.read_text().splitlines()
        for path in checkout.glob(pattern)
    }


def run(arguments: argparse.Namespace) -> int:
    """Judge every change that has no result yet. 0, whatever survives."""
    changes = read_changes(arguments.list)
    done = read_results(arguments.results) if arguments.results.exists() else {}
    reach = Reach(arguments.reach, arguments.checkout)
    copies: SimpleQueue[Copy] = SimpleQueue()
    for number in range(arguments.jobs):
        copies.put(Copy(arguments.checkout, arguments.place / str(number), arguments.pool))

    def judge(change: Change) -> dict[str, object]:
        copy = copies.get()
        started = time.monotonic()
        try:
            result = copy.judge(change, reach.tests_for(change), arguments.limit)
        finally:
            copies.put(copy)
        return {"id": change.id, **result, "seconds": round(time.monotonic() - started, 1)}

    waiting = [change for change in changes if change.id not in done]
    with ThreadPoolExecutor(arguments.jobs) as pool, arguments.results.open("a") as out:
        try:
            for change, result in zip(waiting, pool.map(judge, waiting), strict=True):
                out.write(json.dumps(result) + "\n")
                out.flush()
                print(describe(change, result), flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # only those under way are finished
            raise
    verdicts = Counter(each["verdict"] for each in read_results(arguments.results).values())
    print(
        f"{len(changes)} changes:", ", ".join(f"{n} {name}" for name, n in verdicts.most_common())
    )
    return 0


def read_results(path: Path) -> dict[int, dict[str, object]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["id"]: row for row in rows}


def describe(change: Change, result: dict[str, object]) -> str:
    shown = f"{change.before!r} -> {change.after!r}"
    where = f"{change.file}:{change.line}:{change.col}"
    return f"{change.id} {where} {change.kind} {shown}: {result['verdict']} {result.get('by', '')}"


def compare(arguments: argparse.Namespace) -> int:
    """1 if a change survives that did not before."""
    before, after = read_results(arguments.before), read_results(arguments.after)
    changes = {change.id: change for change in read_changes(arguments.list)}
    lost = 0
    for number in sorted(before.keys() & after.keys()):
        noticed = [each[number]["verdict"] in (KILLED, TIMED_OUT) for each in (before, after)]
        if noticed == [True, False] and after[number]["verdict"] != GONE:
            lost += 1
            print(describe(changes[number], after[number]), "; before:", before[number].get("by"))
        elif noticed == [False, True] or after[number]["verdict"] == GONE:
            print(describe(changes[number], after[number]))
    print(f"{lost} new survivors of {len(before.keys() & after.keys())} that were run in both")
    return 1 if lost else 0


def branch(arguments: argparse.Namespace) -> int:
    """Print the coverage of lines and branches of all that was measured."""
    import coverage

    with tempfile.TemporaryDirectory() as scratch:
        kept = coverage.CoverageData(f"{scratch}/coverage")
        arcs: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for file, start, stop in sqlite3.connect(arguments.reach).execute("select * from arc"):
            arcs[str(arguments.checkout / file)].append((start, stop))
        kept.add_arcs(arcs)
        kept.touch_files([str(path) for path in (arguments.checkout / "src").rglob("*.py")])
        kept.write()
        report = coverage.Coverage(data_file=f"{scratch}/coverage", branch=True, config_file=False)
        report.load()
        report.json_report(outfile=f"{scratch}/report.json", ignore_errors=True)
        totals = json.loads(Path(scratch, "report.json").read_text())["totals"]
    for what in ("lines", "branches"):
        of = totals["num_statements" if what == "lines" else "num_branches"]
        print(f"{what}: {totals[f'covered_{what}']} of {of}, {totals[f'covered_{what}'] / of:.2%}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    options: dict[str, dict[str, object]] = {
        "list": {"type": Path}, "results": {"type": Path}, "reach": {"type": Path},
        "before": {"type": Path}, "after": {"type": Path}, "tests": {"nargs": "*"},
        "--reach": {"type": Path, "required": True}, "--list": {"type": Path, "required": True},
        "--seed": {"type": int, "default": 30}, "--count": {"type": int, "default": 300},
        "--limit": {"type": float, "default": 120}, "--jobs": {"type": int, "default": 1},
        "--checkout": {"type": Path, "default": ROOT},
        "--place": {"type": Path, "default": Path(tempfile.gettempdir(), "opkiln-mutants")},
    }  # fmt: skip
    for command, words in {
        "draw": "list --seed --count --checkout", "reach": "reach tests --checkout --place",
        "run": "list results --reach --checkout --place --limit --jobs",
        "branch": "reach --checkout", "compare": "before after --list",
    }.items():  # fmt: skip
        each = commands.add_parser(command)
        for word in words.split():
            each.add_argument(word, **options[word])  # type: ignore[arg-type]
    arguments = parser.parse_args()
    if "checkout" in arguments:
        arguments.checkout = arguments.checkout.resolve()
    if "reach" in arguments:
        arguments.pool = arguments.reach.resolve().with_name(f"{arguments.reach.name}.pool")
    if arguments.command == "draw":
        drawn = draw(arguments.checkout, arguments.count, arguments.seed)
        arguments.list.parent.mkdir(parents=True, exist_ok=True)
        arguments.list.write_text("".join(f"{line}\n" for line in drawn))
        return 0
    if arguments.command == "reach":
        arguments.reach.parent.mkdir(parents=True, exist_ok=True)
        copy = Copy(arguments.checkout, arguments.place / "0", arguments.pool)
        return measure(copy, arguments.tests, arguments.reach)
    return {"run": run, "branch": branch, "compare": compare}[arguments.command](arguments)


if __name__ == "__main__":
    sys.exit(main())
