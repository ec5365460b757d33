"""A differential fuzzer: after any change, the cache serves what an empty cache builds.

    python tests/faults/differential.py DIRECTORY --rounds 5000 --seed 1

It makes trees of sources, headers, links, search directories, binary inputs and archives
(``fuzzed_tree.py``), with programs in front of the compiler (``fuzzed_compiler.py``), and changes
them at random, also while they are built, and with clocks that are wrong. After each round two
fresh processes load the op: one from the cache that has seen everything so far, one from an empty
cache. Their answers must be equal: every header and every binary input has a number, and an answer
is the list of the numbers that were compiled in, in order. Where one is an error, so is the other.

The first difference ends it: the changes that led there are printed, and the exit status is 1.
``--plant`` breaks opkiln on purpose, to show that it would be found.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuzzed_compiler import compile_parts
from fuzzed_tree import PREFIX, SYSTEM, Tree

from opkiln.base import digest
from opkiln.building import gather
from opkiln.decision.terms import Request
from opkiln.errors import OpkilnError, StoreWarning
from opkiln.loading import loader
from opkiln.machine.binary import elf
from opkiln.store import key

if TYPE_CHECKING:
    from collections.abc import Callable

    from opkiln.base.build_model import Plan

ROUNDS_PER_TREE = 25


class Fuzzer:
    """Rounds of changes, and the two answers after each."""

    def __init__(self, where: Path, seed: int, kind: str = "") -> None:
        self._where = where
        self._kind = kind  # of the program in front of each compiler; empty for any
        self._seed = seed
        self._dice = random.Random(seed)
        self._known = where / "known"  # a cache that knows the compilers and nothing else
        self._members = compile_members(where)
        self._compilers = compile_parts(where)
        self._stages = where / "stages"
        self._stages.mkdir(0o700)
        self.errors = 0
        if not self._known.exists():
            self._first_answer()

    def run(self, first: int, rounds: int) -> str:
        """What the first difference is; empty if there is none."""
        first -= first % ROUNDS_PER_TREE
        for number in range(first, first + rounds):
            if number % ROUNDS_PER_TREE == 0:
                directory = self._where / f"tree{number}"
                dice = random.Random(f"{self._seed}-{number}")
                tree = Tree(directory, dice, self._members, self._compilers, self._kind)
                cache = self._cache(directory.with_suffix(".cache"))
                self._ahead = 0.0
            difference = self._round(tree, cache)
            if difference:
                told = "\n".join(tree.journal)
                return f"round {number}, seed {self._seed}: {difference}\n{told}"
            if number % ROUNDS_PER_TREE == ROUNDS_PER_TREE - 1:
                tree.remove()
                shutil.rmtree(cache)
        return ""

    def _round(self, tree: Tree, cache: Path) -> str:
        dice = tree.dice
        if dice.random() < 0.2:
            self._ahead = dice.choice([0.0, 0.0, 3600.0, -3600.0, 1e8])
            tree.journal.append(f"the clock is {self._ahead:+.0f} s")
        if dice.random() < 0.35:
            self._change_during_a_build(tree, cache)
        else:
            for _ in range(dice.randint(1, 3)):
                tree.change()
        served = self._load(tree, cache)
        if dice.random() < 0.3:  # a second load finds what the first has written down
            again = self._load(tree, cache)
            if not _are_same(again, served):
                return f"first {served}, then {again}"
        empty = self._cache(cache.with_suffix(".empty"))
        built = self._load(tree, empty)
        shutil.rmtree(empty)
        tree.journal.append(f"    = {built}")
        self.errors += isinstance(built, str)
        if _are_same(served, built):
            return ""
        return f"served {served}, an empty cache builds {built}"

    def _change_during_a_build(self, tree: Tree, cache: Path) -> None:
        tree.change()
        loading = self._start(tree, cache)
        while not any(self._stages.iterdir()):  # no build has begun
            if select.select([loading[1]], [], [], 0.002)[0]:
                break  # nor will it: this was a hit
        time.sleep(tree.dice.uniform(0, 0.3))
        tree.journal.append("during the build that follows the last change:")
        if tree.dice.random() < 0.3:
            tree.exchange()
        for _ in range(tree.dice.randint(1, 2)):
            tree.change()
        self._finish(loading)  # it saw the one, or the other, or a mixture

    def _load(self, tree: Tree, cache: Path) -> list[int] | str:
        return self._finish(self._start(tree, cache))

    def _start(self, tree: Tree, cache: Path) -> tuple[int, int]:
        """Load in a process of its own, which knows nothing of earlier loads."""
        receiving, sending = os.pipe()
        child = os.fork()
        if child:
            os.close(sending)
            return child, receiving
        os.close(receiving)
        status = 1
        try:
            os.environ["OPKILN_CACHE_DIR"] = str(cache)
            os.environ["OPKILN_TMPDIR"] = str(self._stages)
            os.environ.update(tree.variables)
            _set_clock(self._ahead)
            with os.fdopen(sending, "w") as file:
                try:
                    artifact, _ = loader.obtain(Request(tree.op()))
                    json.dump(tree.answer(artifact.path), file)
                except (OpkilnError, OSError) as error:
                    json.dump(f"{type(error).__name__}: {error}", file)
            status = 0
        finally:
            os._exit(status)

    def _finish(self, loading: tuple[int, int]) -> list[int] | str:
        child, receiving = loading
        with os.fdopen(receiving) as file:
            text = file.read()
        _, status = os.waitpid(child, 0)
        if status:
            raise SystemExit(f"a load ended with status {status}")
        answer: list[int] | str = json.loads(text)
        return answer

    def _cache(self, path: Path) -> Path:
        """An empty cache that knows the compilers."""
        path.mkdir(0o700)
        if self._known.exists():
            (path / "v1").mkdir(0o700)
            shutil.copytree(self._known / "v1" / "toolchains", path / "v1" / "toolchains")
            (path / "v1" / "toolchains").chmod(0o700)
        return path

    def _first_answer(self) -> None:
        self._ahead = 0.0
        dice = random.Random(0)
        tree = Tree(self._where / "first", dice, self._members, self._compilers)
        self._known.mkdir(0o700)
        self._load(tree, self._known)
        time.sleep(0.03)  # what is remembered of a file that was just written is not believed
        self._load(tree, self._known)


def _are_same(one: list[int] | str, other: list[int] | str) -> bool:
    """Of two sources that do not compile, either may be told."""
    return one == other or (isinstance(one, str) and isinstance(other, str))


def compile_members(where: Path) -> list[Path]:
    """The members of archives; those that are there are not compiled again."""
    made = []
    for number in range(6):
        source = where / f"member{number}.cpp"
        made.append(source.with_suffix(".o"))
        if not made[-1].exists():
            source.write_text(f"int inner() {{ return {number}; }}\n")
            subprocess.run(["g++", "-c", "-fPIC", source, "-o", made[-1]], check=True)
    return made


def _set_clock(ahead: float) -> None:
    """Let this process believe that it is later, or earlier."""
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + ahead
    time.time_ns = lambda: now_ns() + int(ahead * 1e9)


# Mistakes to find


def _drop(*kinds: str) -> Callable[[], None]:
    """Forget what was observed of these kinds."""

    def plant() -> None:
        of = gather.list_inputs

        def without(*given: Any) -> gather.Inputs:
            found = of(*given)
            return found._replace(facts=tuple(each for each in found.facts if each[0] not in kinds))

        gather.list_inputs = without

    return plant


def _forget_variables() -> None:
    build, step = key.build_key, key.step_key

    def without(plan: Plan) -> Plan:
        known = set(plan.toolchain.environment)
        return plan._replace(
            environment=tuple(each for each in plan.environment if each not in known)
        )

    key.build_key = lambda plan: build(without(plan))
    key.step_key = lambda plan, each: step(without(plan), each)


def _drop_searches() -> None:
    elf.search = lambda *_: ([], [])


# With the kind of compiler that shows it soon.
PLANTS = {
    "failed look-ups are dropped": (_drop(gather.ABSENT), "looks"),
    "files that were read are dropped": (_drop(gather.FILE), ""),
    "files that were looked up are dropped": (_drop(gather.PROGRAM, gather.DIRECTORY), "looks"),
    "listings are dropped": (_drop(gather.LISTING), "lists"),
    "links are dropped": (_drop(gather.LINK), "follows"),
    "where no shared library was is dropped": (_drop_searches, "library"),
    "variables are not in the key": (_forget_variables, "variables"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path, help="a directory to work in")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="begin with the tree of this round")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plant", choices=PLANTS, help="a mistake to find")
    options = parser.parse_args()
    digest._SETTLED_NS = 20_000_000  # as SETTLED_NS of loaders.py
    os.environ["OPKILN_PROGRESS"] = "off"
    os.environ["OPKILN_RUNTIME_DIR"] = str(options.directory / "run")
    plant, kind = PLANTS.get(options.plant, (None, ""))
    if plant is not None:
        plant()
    warnings.simplefilter("ignore", StoreWarning)  # of compilers that cannot be observed
    began = time.monotonic()
    fuzzer = Fuzzer(options.directory, options.seed, kind)
    try:
        difference = fuzzer.run(options.first, options.rounds)
    finally:
        for outside in SYSTEM.glob(f"{PREFIX}{os.getpid()}-*"):
            shutil.rmtree(outside)
    seconds = time.monotonic() - began
    print(difference or f"{options.rounds} rounds, 0 differences")
    print(f"{fuzzer.errors} of the answers were errors; {seconds:.0f} s")
    return bool(difference)


if __name__ == "__main__":
    sys.exit(main())
