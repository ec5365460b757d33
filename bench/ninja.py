"""A graph of 2,000 edges in front of each cache: the first build, a warm one, and one with no work.

    python bench/ninja.py --out bench/results/ninja.json    # four minutes on two idle cores
    python bench/ninja.py --where /dev/shm --edges 500

Plain ninja compiles in every build. ``ccache`` and ``sccache`` stand before the compiler, opkiln is
the ``ninja`` that ``opkiln run`` puts first on PATH. A warm build follows the removal of all
outputs; ninja's log stays. All take turns, and each time is of the whole command. Afterwards the
outputs of each are compared with plain ninja's. The caches are on disk wherever the outputs are.
"""

from __future__ import annotations

import argparse
import compileall
import filecmp
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import machine
import table
from measured import Bar, Failure, Row, Sample

MEMBERS = 50  # compiles that go into one archive
HEADERS = 20
OPKILN, PLAIN = "opkiln ninja", "plain ninja"
BUILD_FILE = """ninja_required_version = 1.3
cc = {cc}
rule compile
  command = $cc -O1 -fPIC -Iinc -MMD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
rule archive
  command = rm -f $out && ar crsD $out $in
rule link
  command = gcc -shared -o $out -Wl,--whole-archive @$out.rsp -Wl,--no-whole-archive
  rspfile = $out.rsp
  rspfile_content = $in
"""


class Contender(NamedTuple):
    """One way to build the graph, in a directory of its own."""

    who: str
    launcher: str
    command: tuple[str, ...]
    directory: Path
    variables: dict[str, str]

    def build(self) -> float:
        """Seconds that a build takes."""
        begin = time.perf_counter()
        done = subprocess.run(
            self.command, cwd=self.directory, env={**os.environ, **self.variables}, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        taken = time.perf_counter() - begin
        if done.returncode:
            raise Failure(f"{self.who}: {done.stdout[-500:]}")
        return taken

    def remove_outputs(self) -> None:
        shutil.rmtree(self.directory / "out")

    def differences(self, other: Contender) -> list[str]:
        """The outputs that have other bytes than the other's."""
        mine, its = (each.directory / "out" for each in (self, other))
        names = [str(file.relative_to(its)) for file in its.iterdir() if file.suffix != ".d"]
        _, wrong, absent = filecmp.cmpfiles(mine, its, names, shallow=False)
        return [*wrong, *absent]


def write_graph(directory: Path, edges: int, cc: str) -> None:
    """Sources and the build file: compiles, an archive for 50 of them, and one link."""
    (directory / "inc").mkdir(parents=True)
    for number in range(HEADERS):
        (directory / f"inc/h{number}.h").write_text(
            f"#pragma once\nstatic inline int h{number}(int x) {{ return x * {number + 3}; }}\n"
        )
    archives = max(1, edges // (MEMBERS + 1))
    units = edges - archives - 1
    lines = [BUILD_FILE.format(cc=cc)]
    members: list[list[str]] = [[] for _ in range(archives)]
    for number in range(units):
        one, other = number % HEADERS, (number * 7 + 3) % HEADERS
        (directory / f"u{number}.c").write_text(
            f'#include <stddef.h>\n#include "h{one}.h"\n#include "h{other}.h"\n'
            f"int unit{number}(int x) {{ return h{one}(x) + h{other}({number}); }}\n"
        )
        lines.append(f"build out/u{number}.o: compile u{number}.c")
        members[number % archives].append(f"out/u{number}.o")
    for number, inputs in enumerate(members):
        lines.append(f"build out/lib{number}.a: archive {' '.join(inputs)}")
    libraries = " ".join(f"out/lib{number}.a" for number in range(archives))
    lines.append(f"build out/all.so: link {libraries}\ndefault out/all.so\n")
    (directory / "build.ninja").write_text("\n".join(lines))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def contenders(root: Path, caches: Path, edges: int) -> list[Contender]:
    """All that are here: plain ninja first."""
    near = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    ninja = shutil.which("ninja", path=near)
    if ninja is None:
        raise Failure("there is no ninja on PATH")
    sccache = shutil.which("sccache", path=near)
    source = str(Path(__file__).resolve().parents[1] / "src")
    sys.path.insert(0, source)
    compileall.compile_dir(source, quiet=1)  # as pip does when it installs a package
    from opkiln.compat.ninja import front

    store = {
        "OPKILN_CACHE_DIR": str(caches / "opkiln"), "OPKILN_RUNTIME_DIR": str(caches / "run"),
    }  # fmt: skip
    os.environ.update(store)
    wanted = [
        (PLAIN, "gcc", (ninja,), {}),
        ("ccache", "ccache gcc", (ninja,), {"CCACHE_DIR": str(caches / "ccache")}),
        ("sccache", f"{sccache} gcc", (ninja,), {
            "SCCACHE_DIR": str(caches / "sccache"), "SCCACHE_SERVER_PORT": str(_free_port()),
            "SCCACHE_IDLE_TIMEOUT": "0",
        }),
        (OPKILN, "gcc", (f"{front.SHIM}/ninja",), {
            **store, **front.environment(), "PATH": f"{front.SHIM}:{near}",
        }),
    ]  # fmt: skip
    made = []
    for who, cc, command, variables in wanted:
        launcher = cc.split()[0]
        if launcher == "None" or shutil.which(launcher) is None:
            print(f"{who} is not here", file=sys.stderr)
            continue
        directory = root / who.replace(" ", "-")
        write_graph(directory, edges, cc)
        made.append(Contender(who, launcher, command, directory, variables))
    return made


def measure(asked: argparse.Namespace, root: Path, caches: Path) -> list[Row]:
    """Every row of the table."""
    found = contenders(root, caches, asked.edges)
    try:
        return timed(found, asked)
    finally:
        for each in found:
            if each.who == "sccache":  # its server would outlive this
                stop = [each.launcher, "--stop-server"]
                subprocess.run(
                    stop, env={**os.environ, **each.variables}, check=False, capture_output=True
                )


def timed(found: list[Contender], asked: argparse.Namespace) -> list[Row]:
    """The builds, in turns. Raises Failure."""
    first = {each.who: each.build() for each in found}
    time.sleep(3)  # what was written just now is not believed yet, as in any build a moment later
    warm: dict[str, list[float]] = {each.who: [] for each in found}
    null: dict[str, list[float]] = {each.who: [] for each in found}
    for turn in range(asked.repeats):
        for each in found:
            if each.who != PLAIN or turn == 0:
                each.remove_outputs()
                warm[each.who].append(each.build() * 1000 / asked.edges)
            null[each.who].append(each.build() * 1000)
            null[each.who].append(each.build() * 1000)
    for each in found[1:]:
        if wrong := each.differences(found[0]):
            raise Failure(f"{each.who}: {len(wrong)} outputs differ: {wrong[:3]}")
    return rows(asked.edges, first, warm, null)


def rows(
    edges: int, first: dict[str, float], warm: dict[str, list[float]], null: dict[str, list[float]]
) -> list[Row]:
    """The table, with the two bars of opkiln."""
    made = []
    samples = {who: Sample(tuple(values), "ms") for who, values in warm.items()}
    ours = samples[OPKILN].median
    for who, seconds in first.items():
        made.append(Row("first build", who, f"{edges} edges", Sample((seconds,), "s")))
    for who, sample in samples.items():
        bar = None
        if who == OPKILN and "ccache" in samples:
            share = ours / samples["ccache"].median
            bar = Bar(0.5, share, "at most half of ccache's")
        ratio = None if who == OPKILN else ours / sample.median
        made.append(Row("warm, per edge", who, "outputs removed", sample, ratio=ratio, bar=bar))
    for who, values in null.items():
        sample, bar = Sample(tuple(values), "ms"), None
        if who == OPKILN:
            more = sample.median - Sample(tuple(null[PLAIN]), "ms").median
            bar = Bar(10, more, "at most 10 ms more than plain")
        made.append(Row("null build", who, "no work to do", sample, bar=bar))
    return made


def main() -> int:
    """Build, measure, print and store; 1 if a bar was missed or something could not be built."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--edges", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=4, help="warm and null builds of each")
    parser.add_argument("--where", type=Path, help="where the outputs are, as /dev/shm")
    parser.add_argument("--out", type=Path, help="write the results to this file, as JSON")
    asked = parser.parse_args()
    before = machine.load_average()
    with (
        tempfile.TemporaryDirectory(dir=asked.where) as root,
        tempfile.TemporaryDirectory() as caches,
    ):
        try:
            made = measure(asked, Path(root), Path(caches))
        except Failure as failure:
            print(f"ninja: {failure}", file=sys.stderr)
            return 1
    head = {
        **machine.described(),
        "load_average": {"before": before, "after": machine.load_average()},
    }
    return table.finish(head, made, asked.out)


if __name__ == "__main__":
    sys.exit(main())
