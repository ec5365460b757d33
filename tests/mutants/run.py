"""``make mutants MODULE=store/recheck``: what the tests that need no compiler notice of a module.

mutmut changes one thing after another in the module (a comparison, a constant, an argument), and
runs the tests that reach it. A change that no test notices survives, and is shown. Then a test is
missing, or the code is not needed, or the change makes no difference. Changes that mypy refuses are
counted apart. mutmut does not change decorated functions, nor what runs when a module is imported.

Without a module, all of them, in the order of the table. Nothing is written outside
``build/mutants``. ``docs/reliability.md`` has the scores.
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
    "store/recheck": ("test_deps.py", "test_recheck.py"),
    "store/key": ("test_key.py", "test_plan.py"),
    "decision/receipt": ("test_receipt.py",),
    "decision/decide": ("test_decide.py",),
    "decision/fit": ("test_fit.py", "test_abi_tags.py"),
    "engine/budget": ("test_budget.py",),
    "observing/log": ("test_observer_log.py",),
    "observing/inputs": ("test_observer_log.py",),
    "store/deps": ("test_gathered.py", "test_deps.py"),
    "decision/policy": ("test_decide.py",),
    "decision/terms": ("test_trace.py", "test_decide.py"),
    "decision/target": ("test_target.py", "test_decide.py"),
    "decision/prebuilt": ("test_decide.py", "test_hostile_places.py", "test_damaged_manifests.py"),
    "decision/search": ("test_search.py", "test_decide.py"),
    "decision/archs": ("test_archs.py", "test_decide.py", "test_fit.py"),
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
VERDICTS = {1: KILLED, 3: KILLED, 0: SURVIVED, 33: UNTESTED, 5: UNTESTED, 37: TYPED}
TIMED_OUT = (36, 24, -24, 152, 255)  # the exit codes that mutmut takes for a time-out


def main() -> int:
    """0 if every module could be examined, whatever survived."""
    chosen = sys.argv[1:] or list(MODULES)
    for module in chosen:
        if module not in MODULES:
            print(f"mutants: no module {module!r}; there are: {' '.join(MODULES)}")
            return 2
    rows = []
    for module in chosen:
        print(f"mutants: {module}", flush=True)
        started = time.monotonic()
        place = prepare(module)
        if subprocess.run([*mutmut(), "run", "--max-children", "1"], cwd=place, check=False,
                          stdout=(place / "log").open("w")).returncode:  # fmt: skip
            print((place / "log").read_text().rpartition("\r")[2])
            return 1
        verdicts = results(place, module)
        show(place, [name for name, each in verdicts.items() if each in (SURVIVED, UNTESTED)])
        rows.append(row(module, verdicts, time.monotonic() - started))
        print(rows[-1], flush=True)
    print("\n| module | mutants | killed | timed out | refused by mypy | survived | not reached | "
          "score | seconds |\n|---|---|---|---|---|---|---|---|---|", *rows, sep="\n")  # fmt: skip
    return 0


def prepare(module: str) -> Path:
    """A fresh directory for mutmut: links to the sources and the tests, and its configuration."""
    place = ROOT / "build" / "mutants" / module.replace("/", "-")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for name in ("src", "tests", "docs", "examples", "CHANGELOG.md", "README.md", "LICENSE"):
        (place / name).symlink_to(ROOT / name)
    tests = [
        f"tests/unit/{name}" for name in MODULES[module] if (ROOT / "tests/unit" / name).exists()
    ]
    cache = f"--cache-dir={place.parent / 'mypy'}"
    types = [sys.executable, "-m", *TYPES, cache, f"src/opkiln/{module}.py"]
    config = CONFIG.format(
        module=module,
        tests=json.dumps(tests),
        options=json.dumps(OPTIONS),
        types=json.dumps(types),
    )
    (place / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + config)
    return place


def mutmut() -> list[str]:
    """Not ``-m mutmut``, which runs its main module twice."""
    return [sys.executable, str(Path(sys.executable).parent / "mutmut")]


def results(place: Path, module: str) -> dict[str, str]:
    """Every mutant's name and what became of it."""
    meta = json.loads((place / "mutants/src/opkiln" / f"{module}.py.meta").read_text())
    return {
        name: "timed out" if code in TIMED_OUT else VERDICTS.get(code, f"exit code {code}")
        for name, code in meta["exit_code_by_key"].items()
    }


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
    noticed = counts[KILLED] + counts["timed out"] + counts[TYPED]
    odd = [verdict for verdict in counts if verdict.startswith("exit code")]
    assert not odd, f"{module}: {odd}"
    numbers = (len(verdicts), counts[KILLED], counts["timed out"], counts[TYPED], counts[SURVIVED],
               counts[UNTESTED], f"{noticed / len(verdicts):.1%}", round(seconds))  # fmt: skip
    return f"| `{module}` | " + " | ".join(map(str, numbers)) + " |"


if __name__ == "__main__":
    sys.exit(main())
