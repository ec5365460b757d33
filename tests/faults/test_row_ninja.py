"""Row 36: what ``opkiln ninja`` builds, plain ninja builds from nothing.

``ninja_graphs.py`` is the fuzzer; all 300 rounds are run with ``--full-counts``.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import ninja_graphs
import pytest
from loaders import HERE, shim
from sample import child
from sample.ninja_project import Project, servers

from opkiln.compat.ninja import front

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fault_rows import Cases

pytestmark = [
    pytest.mark.row(36),
    pytest.mark.skipif(shutil.which("ninja") is None, reason="there is no ninja on PATH"),
]

ENOUGH_TO_FIND = 60
# The round of the tree that shows a mistake first, with seed 3.
FIRST = {
    "variables are not in the key": 120,
    "paths in outputs are overlooked": 15,
    "the words after the first ten are not in the key": 15,
}


def run(where: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(HERE / "ninja_graphs.py"), str(where), *options],
        env=child.environment(), stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip


def test_every_output_is_that_of_plain_ninja(
    tmp_path: Path, cases: Cases, note: Callable[[str], None]
) -> None:
    rounds = cases.count(300)
    done = run(tmp_path / "trees", "--rounds", str(rounds), "--seed", "5")
    assert done.returncode == 0, done.stdout[-5000:]
    assert f"{rounds} rounds, 0 differences" in done.stdout
    cases.tried(rounds)
    note(done.stdout.replace("\n", "; "))


@pytest.mark.parametrize("mistake", ninja_graphs.PLANTS)
def test_a_planted_mistake_is_found(mistake: str, tmp_path: Path) -> None:
    rounds = ["--rounds", str(ENOUGH_TO_FIND), "--first", str(FIRST.get(mistake, 0))]
    done = run(tmp_path / "trees", *rounds, "--seed", "3", "--plant", mistake)
    assert done.returncode == 1, done.stdout
    assert done.stdout.startswith("round "), done.stdout


@pytest.mark.row(31)
def test_jobs_of_two_nodes_succeed_on_a_shared_directory_that_hides_and_forgets(
    tmp_path: Path, cache: Path, cases: Cases
) -> None:
    names = ("a", "b", "c", "d")
    graph = "".join(f"build {name}.o: cc {name}.c\n" for name in names)
    graph += f"build program: link {' '.join(f'{name}.o' for name in names)}\n"
    files = {f"{name}__c": f"int {name}(void) {{ return JOB; }}\n" for name in names[1:]}
    files["a__c"] = """
#include <stdio.h>
#include "job.h"
int b(void), c(void), d(void);
int main(void) { printf("%d", b() + c() + d()); }
"""
    network = {
        "NETWORK_ROOT": str(cache), "NETWORK_HIDE_MS": "300", "NETWORK_STALE": "1",
        "LD_PRELOAD": shim("slow_network", tmp_path),
    }  # fmt: skip
    for number in cases(20):
        nodes = []
        for node in ("one", "other"):
            texts = {name: f'#include "job.h"\n{text}' for name, text in files.items()}
            job = f"#pragma once\n#define JOB {number}\n"
            project = Project(tmp_path / node / str(number), graph, job__h=job, **texts)
            own = {"OPKILN_RUNTIME_DIR": str(tmp_path / f"{node}-run")}
            environment = {**os.environ, **front.environment(), **network, **own}
            command = [f"{front.SHIM}/ninja"]
            nodes.append((project, subprocess.Popen(
                command, cwd=project.path, env=environment, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )))  # fmt: skip
        for project, process in nodes:
            said, _ = process.communicate()
            assert process.returncode == 0, said
            assert project.run("program") == str(3 * number)
            assert project.is_done()


def test_of_several_builds_one_is_killed_at_any_moment(
    tmp_path: Path, cases: Cases, note: Callable[[str], None]
) -> None:
    names = ("a", "b", "c", "main")
    graph = "".join(f"build {name}.o: cc {name}.c\n" for name in names)
    graph += f"build program: link {' '.join(f'{name}.o' for name in names)}\n"
    chance = random.Random(36)
    killed = {"ninja": 0, "its server": 0, "nothing, it had ended": 0}
    for number in cases(50):
        texts = {f"{name}__c": f"int {name}(void) {{ return {number}; }}\n" for name in "abc"}
        texts["main__c"] = (
            "#include <stdio.h>\nint a(void), b(void), c(void);\n"
            'int main(void) { printf("%d", a() + b() + c()); }\n'
        )
        projects = [Project(tmp_path / who / str(number), graph, **texts) for who in "xyz"]
        traces = [tmp_path / f"{number}-{who}.trace" for who in "xyz"]
        builds = [each.start(trace=trace) for each, trace in zip(projects, traces, strict=True)]
        time.sleep(chance.uniform(0.1, 1.2))
        who, victims = chance.choice(
            [("ninja", [builds[0].pid]), ("its server", servers(traces[0]))]
        )
        dead = builds[0].poll() is not None or not victims
        killed["nothing, it had ended" if dead else who] += 1
        for victim in () if dead else victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        for each in builds:
            each.communicate(timeout=120)
        assert [each.returncode for each in builds[1:]] == [0, 0]
        after = Project(tmp_path / "after" / str(number), graph, **texts)
        assert after.build().status == 0
        assert projects[0].plain().returncode == 0
        for project in (*projects, after):
            assert project.run("program") == str(3 * number)
            assert project.is_done()
    note(f"killed: {killed}")
