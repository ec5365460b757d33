"""``make mutants MODULE=facts``: what the tests that need no compiler notice of a module.

mutmut changes one thing after another in the module (a comparison, a constant, an argument), and
runs the tests that reach it. A change that no test notices survives, and is shown. Then a test is
missing, or the code is not needed, or the change makes no difference. Changes that mypy refuses are
counted apart. mutmut does not change decorated functions, nor what runs when a module is imported.

Without a module, all of them, in the order of the table. ``--again`` before it tries only what
survived the last run, and what has changed since. Nothing is written outside ``build/mutants``.
``README.md`` here has the scores.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

# A module, and the tests that are for it.
MODULES = {
    "machine/facts": ("test_facts.py", "test_gather.py", "test_linker.py", "test_receipt.py"),
    "store/key": ("test_key.py", "test_plan.py", "test_facts.py"),
    "decision/receipt": ("test_receipt.py",),
    "decision/decide": ("test_decide.py",),
    "run/budget": ("test_budget_limits.py",),
    "building/observing/log": ("test_observer_log.py",),
    "building/asking": ("test_asking.py", "test_search.py"),
    "building/gather": ("test_gather.py", "test_linker.py", "test_observer_log.py"),
    "decision/terms": ("test_trace.py", "test_decide.py", "test_search.py"),
    "decision/prebuilt": ("test_layers_by_fit.py", "test_fit.py", "test_abi_tags.py"),
    "decision/search": ("test_search.py", "test_decide.py"),
    "decision/archs": ("test_archs.py", "test_target.py", "test_decide.py", "test_fit.py"),
}

CONFIG = """
[tool.mutmut]
source_paths = ["src"]
only_mutate = ["src/opkiln/{module}.py"]
also_copy = ["docs", "examples", "CHANGELOG.md", "README.md", "LICENSE"]
pytest_add_cli_args = {options}
pytest_add_cli_args_test_selection = {tests}
type_check_command = {types}
"""
OPTIONS = ("-p", "tests.mutants.node_ids", "-p", "no:cacheprovider", "-p", "no:xdist",
           "-m", "not slow and not full")  # fmt: skip
# A mutant is a copy of its method, so what a method declares is declared again.
TYPES = ("mypy", "--output=json", "--no-warn-unused-ignores", "--no-error-summary",
         "--disable-error-code=no-redef")  # fmt: skip

KILLED, TYPED, SURVIVED, UNTESTED = "killed", "refused by mypy", "survived", "not reached"
ENDED = "timed out or crashed"
COLUMNS = (KILLED, ENDED, TYPED, SURVIVED, UNTESTED)
VERDICTS = {1: KILLED, 3: KILLED, 0: SURVIVED, 33: UNTESTED, 5: UNTESTED, 37: TYPED}
TIMED_OUT = (36, 24, -24, 152, 255)  # the exit codes that mutmut takes for a time-out
CRASHED = (-11, -9)  # and for a crash


def main() -> int:
    """0 if every module could be examined, whatever survived."""
    again = sys.argv[1:2] == ["--again"]
    chosen = sys.argv[2 if again else 1 :] or list(MODULES)
    for module in chosen:
        if module not in MODULES:
            print(f"mutants: no module {module!r}; there are: {' '.join(MODULES)}")
            return 2
    rows = []
    for module in chosen:
        print(f"mutants: {module}", flush=True)
        started = time.monotonic()
        place = directory_of(module)
        if again:
            # Which tests reach which function. mutmut adds new tests to it, and does not look
            # again at tests that were edited.
            (place / "mutants" / "mutmut-stats.json").unlink(missing_ok=True)
        else:
            prepare(module, place)
        if (not again or changed(place, module)) and not mutate(place):
            return 1
        if again and (left := survivors(place, module)) and not mutate(place, *left):
            return 1
        verdicts = results(place, module)
        show(place, survivors(place, module))
        rows.append(row(module, verdicts, time.monotonic() - started))
        print(rows[-1], flush=True)
    print("\n| module | mutants |", " | ".join(COLUMNS), "| score | seconds |")
    print("|---" * (len(COLUMNS) + 4) + "|", *rows, sep="\n")
    return 0


def directory_of(module: str) -> Path:
    return ROOT / "build" / "mutants" / module.replace("/", "-")


def prepare(module: str, place: Path) -> None:
    """Make a fresh directory for mutmut: links to the sources and tests, and its configuration."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for name in ("src", "tests", "docs", "examples", "CHANGELOG.md", "README.md", "LICENSE"):
        (place / name).symlink_to(ROOT / name)
    tests = [f"tests/unit/{name}" for name in MODULES[module]]
    cache = f"--cache-dir={place.parent / 'mypy'}"
    types = [sys.executable, "-m", *TYPES, cache, f"src/opkiln/{module}.py"]
    config = CONFIG.format(
        module=module,
        tests=json.dumps(tests),
        options=json.dumps(OPTIONS),
        types=json.dumps(types),
    )
    (place / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + config)


def changed(place: Path, module: str) -> bool:
    """Whether a module was edited since its last run."""
    name = f"src/opkiln/{module}.py"
    return (ROOT / name).stat().st_mtime > (place / "mutants" / name).stat().st_mtime


def mutate(place: Path, *names: str) -> bool:
    """Run mutmut on these mutants, or on those that have no result yet. False if it fails."""
    command = [*mutmut(), "run", "--max-children", "1", *names]
    with (place / "log").open("w") as log:
        if subprocess.run(command, cwd=place, check=False, stdout=log).returncode == 0:
            return True
    print((place / "log").read_text().rpartition("\r")[2])
    return False


def mutmut() -> list[str]:
    """Not ``-m mutmut``, which runs its main module twice."""
    return [sys.executable, str(Path(sys.executable).parent / "mutmut")]


def results(place: Path, module: str) -> dict[str, str]:
    """Every mutant's name and what became of it."""
    meta = json.loads((place / "mutants/src/opkiln" / f"{module}.py.meta").read_text())
    return {
        name: ENDED if code in (*TIMED_OUT, *CRASHED) else VERDICTS.get(code, f"exit code {code}")
        for name, code in meta["exit_code_by_key"].items()
    }


def survivors(place: Path, module: str) -> list[str]:
    """The mutants that no test noticed."""
    found = results(place, module)
    return [name for name, verdict in found.items() if verdict in (SURVIVED, UNTESTED)]


SHOW = """
import sys
from mutmut.mutation.diff_apply import find_mutant, get_diff_for_mutant
for name in sys.argv[1:]:
    print("#", name)
    for line in get_diff_for_mutant(name, path=find_mutant(name).path).splitlines()[2:]:
        if line[:1] in "+-":
            print(line)
"""


def show(place: Path, names: list[str]) -> None:
    """Print the changes."""
    subprocess.run([sys.executable, "-c", SHOW, *names], cwd=place, check=True)


def row(module: str, verdicts: dict[str, str], seconds: float) -> str:
    """A module's line of the table."""
    counts = Counter(verdicts.values())
    noticed = counts[KILLED] + counts[ENDED] + counts[TYPED]
    odd = [verdict for verdict in counts if verdict.startswith("exit code")]
    assert not odd, f"{module}: {odd}"
    numbers = (len(verdicts), *(counts[each] for each in COLUMNS), f"{noticed / len(verdicts):.1%}",
               round(seconds))  # fmt: skip
    return f"| `{module}` | " + " | ".join(map(str, numbers)) + " |"


if __name__ == "__main__":
    sys.exit(main())
