"""Runs the coverage-guided fuzzers: every parser that reads a file from outside.

    python tests/faults/fuzz/run.py --seconds 60 [PARSER …]

Needs atheris (`pip install --group fuzz`). Each parser gets a process of its own, the files in
``corpus/<parser>`` and so many seconds; two run at a time. A parser may raise what its docstring
says and nothing else, within 10 seconds and 1 GiB. Prints executions and findings of each; exits
with 1 if there is a finding, which is kept below ``--keep``: mend the parser, and put the file into
the corpus, which a test replays.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus"
ROOT = HERE.parents[2]
PARSERS = tuple(sorted(path.name for path in CORPUS.iterdir()))

_LONGEST, _LARGEST = 10, 1024  # seconds, MiB
_EXECUTED = re.compile(r"stat::number_of_executed_units:\s*(\d+)")


class Outcome(NamedTuple):
    """What came of fuzzing one parser."""

    parser: str
    executions: int
    cpu_seconds: float
    findings: tuple[str, ...]
    log: str


def target(parser: str) -> object:
    """The function that takes one input."""
    for path in (HERE.parent, HERE.parents[1], ROOT / "src"):
        if str(path) not in sys.path:
            sys.path.insert(0, str(path))
    return importlib.import_module(f"fuzz.{parser}").one


def fuzz(parser: str, seconds: float, keep: Path) -> Outcome:
    """Fuzz one parser in a process of its own."""
    with tempfile.TemporaryDirectory() as found:
        artifacts = Path(found, "artifacts")
        artifacts.mkdir()
        corpus = shutil.copytree(CORPUS / parser, Path(found, "corpus"))
        said = Path(found, "log")
        with said.open("wb") as out:
            child = subprocess.Popen(
                [
                    sys.executable, str(HERE / "run.py"), "--inside", parser, str(corpus),
                    f"-max_total_time={max(1, round(seconds))}", f"-timeout={_LONGEST}",
                    f"-rss_limit_mb={_LARGEST}", f"-artifact_prefix={artifacts}/",
                    "-max_len=16384", "-print_final_stats=1", "-verbosity=0",
                ],
                stdout=out, stderr=out, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            )  # fmt: skip
            _, status, usage = os.wait4(child.pid, 0)  # which says what it took, of it alone
        child.returncode = os.waitstatus_to_exitcode(status)
        log = said.read_text(errors="replace")
        findings = []
        for artifact in sorted(artifacts.iterdir()):
            (keep / parser).mkdir(parents=True, exist_ok=True)
            findings.append(str(shutil.copy(artifact, keep / parser)))
    if child.returncode != 0 and not findings:
        findings.append(f"the fuzzer ended with {child.returncode}")
    counted = _EXECUTED.search(log)
    executions = int(counted[1]) if counted else 0
    return Outcome(parser, executions, usage.ru_utime + usage.ru_stime, tuple(findings), log)


def inside(parser: str, arguments: list[str]) -> None:
    """What the process of one fuzzer does. Does not return."""
    import atheris

    with atheris.instrument_imports(include=["opkiln", "fuzz"]):
        one = target(parser)
    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()


def main() -> int:
    if sys.argv[1:2] == ["--inside"]:
        inside(sys.argv[2], sys.argv[3:])
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("parsers", nargs="*", metavar="PARSER", help=", ".join(PARSERS))
    options.add_argument("--seconds", type=float, default=60, help="for each parser  [60]")
    options.add_argument("--jobs", type=int, default=2, help="parsers at a time  [2]")
    options.add_argument(
        "--keep", type=Path, default=Path("build", "fuzz"), help="for findings  [build/fuzz]"
    )
    options.add_argument("--record", type=Path, metavar="FILE", help="keep the figures, as JSON")
    asked = options.parse_args()
    if unknown := set(asked.parsers) - set(PARSERS):
        options.error(f"no such parser: {', '.join(unknown)}")
    try:
        import atheris  # noqa: F401
    except ImportError as error:
        print(f"{error}; hint: {sys.executable} -m pip install --group fuzz", file=sys.stderr)
        return 2
    chosen = asked.parsers or PARSERS
    print(f"{'parser':16}  {'executions':>10}  {'findings':>8}  {'CPU s':>7}")
    outcomes = []
    with ThreadPoolExecutor(asked.jobs) as pool:
        for done in pool.map(lambda each: fuzz(each, asked.seconds, asked.keep), chosen):
            print(
                f"{done.parser:16}  {done.executions:>10}  {len(done.findings):>8}  "
                f"{done.cpu_seconds:>7.1f}",
                flush=True,
            )
            for finding in done.findings:
                print(f"  {finding}")
            outcomes.append(done)
            if done.findings:
                print(done.log[-3000:], file=sys.stderr)
    if asked.record:
        rows = [
            {"parser": each.parser, "executions": each.executions,
             "cpu_seconds": round(each.cpu_seconds), "findings": len(each.findings)}
            for each in outcomes
        ]  # fmt: skip
        asked.record.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(each.findings for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
