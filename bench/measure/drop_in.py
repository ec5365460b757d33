"""``drop-in``: the same unmodified code on torch.utils.cpp_extension and under ``opkiln run``.

A script that loads a pybind extension (``peers.cpp_extension``), and a ``setup.py`` of two
extensions: cold, then again. The second build of the ``setup.py`` is in a clean directory, as that
of another clone, of a container, of ``pip install`` is.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from children import HERE, Caches, Workspace, load, timed
from measured import Bar, Failure, Row, Sample

from measure import Options

NAME = "drop-in"
NOT_SLOWER = 1.1  # what one machine measures of one thing differs by as much
AGAIN = 1 / 10

SETUP = """
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

setup(
    name="twice", version="1",
    ext_modules=[CppExtension("twice_pybind", ["twice_pybind.cpp"]),
                 CppExtension("twice_again", ["again.cpp"])],
    cmdclass={"build_ext": BuildExtension},
)
"""
RUN = (sys.executable, "-m", "opkiln", "run")


class Times(NamedTuple):
    """Seconds of one system."""

    load: float
    load_again: float
    setup: float
    setup_again: float


WHAT = (
    "load(), pybind, cold", "the same, fresh process", "setup.py, 2 extensions, cold",
    "the same, clean directory",
)  # fmt: skip


def rows(options: Options, workspace: Workspace) -> list[Row]:
    """Each system's times, torch's first; opkiln's are held against them."""
    found: dict[str, list[Times]] = {"torch cpp_extension": [], "opkiln": []}
    failures: dict[str, str] = {}
    for _ in range(options.times(2, 1)):
        for who, prefix in (("torch cpp_extension", ()), ("opkiln", RUN)):
            try:
                with workspace.cold() as caches:
                    found[who].append(_once(caches, prefix))
            except Failure as failure:
                failures[who] = str(failure)
    samples = {
        who: [Sample(tuple(each[i] for each in times), "s") for i in range(len(Times._fields))]
        for who, times in found.items()
        if times
    }
    made = [Row(NAME, who, "all", None, reason) for who, reason in failures.items()]
    torchs = samples.get("torch cpp_extension")
    mine = samples.get("opkiln")
    for number, what in enumerate(WHAT):
        if torchs is not None:
            ratio = mine[number].median / torchs[number].median if mine is not None else None
            made.append(Row(NAME, "torch cpp_extension", what, torchs[number], ratio=ratio))
        if mine is not None:
            made.append(Row(NAME, "opkiln", what, mine[number], bar=_bar(number, mine, torchs)))
    return made


def _bar(number: int, mine: list[Sample], torchs: list[Sample] | None) -> Bar | None:
    if number == Times._fields.index("setup_again"):
        share = mine[number].median / mine[number - 1].median
        return Bar(AGAIN, share, "<= 1/10 of the first")
    if torchs is None or number == Times._fields.index("load_again"):
        return None
    ratio = mine[number].median / torchs[number].median
    return Bar(NOT_SLOWER, ratio, "not slower than torch's")


def _once(caches: Caches, prefix: tuple[str, ...]) -> Times:
    loads = [load("cpp_extension", caches, prefix=prefix)["load"] for _ in range(2)]
    builds = [_setup(caches, prefix, caches.root / name) for name in ("first", "second")]
    return Times(*loads, *builds)


def _setup(caches: Caches, prefix: tuple[str, ...], directory: Path) -> float:
    """Wall seconds of the whole command, in a directory with nothing but the sources."""
    directory.mkdir()
    (directory / "setup.py").write_text(SETUP)
    source = HERE / "sources" / "twice_pybind.cpp"
    shutil.copy(source, directory)
    (directory / "again.cpp").write_text(source.read_text().replace("twice", "again"))
    command = [*prefix, sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    taken = timed(command, caches, cwd=directory)
    if len(list(directory.glob("*.so"))) != 2:
        raise Failure("the build succeeded and made no two modules")
    return taken
