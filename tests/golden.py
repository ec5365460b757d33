"""What users see of two commits, recorded on one machine and compared.

    python tests/golden.py BEFORE AFTER

Each is an interpreter with a checkout of opkiln installed: ``.venv/bin/python`` of two clones. Only
the command line and public names are used, so that a record survives any move inside: the plans of
all ops for all targets, public names with their signatures, ``--help``, exit codes and messages of
mistakes, the events of a cold and a warm build, and the digests of libraries. Keys may differ, and
paths and times are left out. It prints what differs, and exits with 1 if anything does.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TARGETS = ("cpu", "cuda:8.0,9.0a+PTX", "rocm:gfx90a")
BUILT = ("packbits", "utils", "cpu_lion", "random_ltd")
MODULES = ("opkiln", "opkiln.accelerator", "opkiln.comm", "opkiln.compat.deepspeed",
           "opkiln.compat.torch", "opkiln.errors", "opkiln.io", "opkiln.nn", "opkiln.nn.core",
           "opkiln.nn.inference", "opkiln.nn.ragged", "opkiln.nn.random_ltd",
           "opkiln.nn.sparse_attention", "opkiln.nn.spatial", "opkiln.optim", "opkiln.quant",
           "opkiln.settings", "opkiln.testing", "opkiln.utils")  # fmt: skip

NAMES = """
import importlib, inspect, sys
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for each in sorted(getattr(module, "__all__", ())):
        found = getattr(module, each)
        own = [(each, found)]
        if isinstance(found, type):
            own += [(f"{each}.{k}", v) for k, v in sorted(vars(found).items()) if k[:1] != "_"]
        for full, value in own:
            try:
                form = str(inspect.signature(value)) if callable(value) else type(value).__name__
            except (TypeError, ValueError):
                form = type(value).__name__
            print(f"{name}.{full} {form}")
"""

# A mistake: the variables, and the command. ``SCRIPT`` is a file with the text that follows.
MISTAKES: tuple[tuple[dict[str, str], tuple[str, ...], str], ...] = (
    ({}, ("biuld", "packbits"), ""),
    ({}, ("build", "no_such_op"), ""),
    ({}, ("build", "packbits", "--target", "cuda:99"), ""),
    ({}, ("build", "packbits", "--target", "nothing"), ""),
    ({}, ("plan", "packbits", "--target", "cpu:z80"), ""),
    ({"CXX": "/no/such/compiler"}, ("build", "packbits"), ""),
    ({"CXX": "/bin/true"}, ("build", "packbits"), ""),
    ({"OPKILN_MODE": "sometimes"}, ("build", "packbits"), ""),
    ({"OPKILN_MODE": "sealed"}, ("build", "packbits"), ""),
    ({"OPKILN_CACHE_DIR": "/proc/nowhere"}, ("build", "packbits"), ""),
    ({"OPKILN_CXXFLAGS": "-o /tmp/x"}, ("build", "packbits"), ""),
    ({"OPKILN_CXXFLAGS": "-fplugin=x.so"}, ("build", "packbits"), ""),
    ({"OPKILN_CXXFLAGS": "--no-such-flag"}, ("build", "packbits"), ""),
    ({"OPKILN_CACH_DIR": "/tmp"}, ("check", "packbits"), ""),
    ({}, ("check", "packbits"), ""),
    ({}, ("cache", "import", "/no/such/file"), ""),
    ({}, ("cache", "verify"), ""),
    ({}, ("lock", "--check"), ""),
    ({}, ("new", "1bad"), ""),
    ({}, ("run", "SCRIPT"), "import opkiln; opkiln.get_builder('no_such_op')"),
    ({}, ("run", "SCRIPT"), ("import opkiln, torch\n@opkiln.op('missing.cpp')\n"
     "def twice(x: torch.Tensor) -> torch.Tensor:\n    return x * 2\nprint(twice(torch.ones(2)))")),
    ({}, ("run", "SCRIPT"), ("import opkiln, torch\n@opkiln.op(source='int main( {')\n"
     "def twice(x: torch.Tensor) -> torch.Tensor:\n    return x * 2\nprint(twice(torch.ones(2)))")),
)  # fmt: skip


class Recording:
    """What one interpreter's opkiln says, by its name."""

    def __init__(self, python: str, scratch: Path) -> None:
        self._python, self._scratch = os.path.abspath(python), scratch
        self.found: dict[str, str] = {}
        self._root = self._ask("-c", "import opkiln, os; print(os.path.dirname(opkiln.__file__))")

    def record(self) -> dict[str, str]:
        self._helps(())
        self.found["names"] = self._ask("-c", NAMES, *MODULES)
        report = json.loads(self._ask("-m", "opkiln", "report", "--json", plain=True))
        ops = [each["op"] for each in report["ops"]]
        plans = [(op, target) for op in ops for target in TARGETS]
        with ThreadPoolExecutor(2) as pool:
            for (op, target), text in zip(plans, pool.map(self._plan, plans), strict=True):
                self.found[f"plan {op} {target}"] = text
        for number, (variables, words, script) in enumerate(MISTAKES):
            (self._scratch / f"script{number}.py").write_text(script)
            given = [f"script{number}.py" if each == "SCRIPT" else each for each in words]
            self.found[f"mistake {variables} {' '.join(given)}"] = self._run(*given, **variables)
        for op in BUILT:
            self._build(op)
        return self.found

    def _helps(self, words: tuple[str, ...]) -> None:
        text = self._run(*words, "--help")
        self.found[f"help {' '.join(words)}"] = text
        _, _, listed = text.partition("Commands:\n")
        for line in listed.split("\n\n")[0].splitlines():
            if match := re.match(r"  (\w+) ", line):
                self._helps((*words, match[1]))

    def _plan(self, asked: tuple[str, str]) -> str:
        text = self._run("plan", asked[0], "--target", asked[1], "--json")
        # Of a plan, what it runs counts; keys and identities may be others.
        return re.sub(r'"identity": "\w+"', '"identity": …', text)

    def _build(self, op: str) -> None:
        for turn in ("cold", "warm"):
            trace = self._scratch / f"{op}-{turn}.json"
            text = self._run("build", op, "--json", "--trace", str(trace))
            self.found[f"build {op} {turn}"] = re.sub(r'"seconds": [\d.]+', '"seconds": …', text)
            events = json.loads(trace.read_text()) if trace.exists() else {"traceEvents": []}
            listed = events["traceEvents"] if isinstance(events, dict) else events
            told = (f"{each.get('ph')} {each.get('name')}" for each in listed)
            names = sorted(each for each in told if "waiting" not in each)  # as busy as it is
            self.found[f"events {op} {turn}"] = self._plain("\n".join(names))

    def _run(self, *words: str, **variables: str) -> str:
        return self._ask("-m", "opkiln", *words, **variables)

    def _ask(self, *words: str, plain: bool = False, **variables: str) -> str:
        kept = ("PATH", "HOME", "LANG", "LC_ALL")
        env = {name: os.environ[name] for name in kept if name in os.environ}
        env |= {"OPKILN_CACHE_DIR": str(self._scratch / "cache"), "COLUMNS": "100"}
        done = subprocess.run(
            [self._python, *words], env=env | variables, cwd=self._scratch,
            capture_output=True, text=True, check=False, timeout=600,
        )  # fmt: skip
        if plain:
            return done.stdout
        parts = [done.stdout.strip(), done.stderr.strip(), f"exit {done.returncode}"]
        text = "\n".join(filter(None, parts)) if done.returncode or done.stderr else parts[0]
        return self._plain(text) if hasattr(self, "_root") else text

    def _plain(self, text: str) -> str:
        """Without what differs from checkout to checkout and from run to run."""
        home = os.path.dirname(os.path.dirname(self._python))
        for path, name in ((self._root, "OPKILN"), (home, "VENV"), (str(self._scratch), "HERE")):
            text = text.replace(path, name)
        text = re.sub(r"\b[0-9a-f]{12,64}\b", "KEY", text)
        text = re.sub(r"\b\d+(\.\d+)? m?s\b", "SECONDS", text)
        return re.sub(r"opkiln-[\w.-]+-[\w]{8,}", "STAGE", text)


def main() -> int:
    if len(sys.argv) != 3:
        sys.stderr.write(__doc__ or "")
        return 2
    records = []
    for number, python in enumerate(sys.argv[1:]):
        with tempfile.TemporaryDirectory(prefix="golden", suffix=f"-{number}") as scratch:
            records.append(Recording(python, Path(scratch)).record())
    before, after = records
    names = sorted({*before, *after})
    differing = [name for name in names if before.get(name) != after.get(name)]
    for name in differing:
        one, two = (each.get(name, "").splitlines() for each in records)
        lines = list(difflib.unified_diff(one, two, lineterm="", n=0))[2:]
        print(f"{name}:", *lines, sep="\n  ")
    print(f"{len(names)} recorded, {len(differing)} differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
