"""A copy of a sample package, with a name of its own, that a test may edit."""

from __future__ import annotations

import importlib
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opkiln.building import kept
from opkiln.loading import loader
from opkiln.loading.here import Loaded
from opkiln.run import events

if TYPE_CHECKING:
    from opkiln.builder import OpBuilder

HERE = Path(__file__).parent


def put(path: Path, data: bytes) -> None:
    """Give a file other contents, as a new file of its name: one that is mapped into this process
    as a library must not change under it."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(data)
    new.chmod(path.stat().st_mode)
    new.replace(path)


class Package:
    """A package below ``where``, a copy of ``sample/<kind>``; importable while on sys.path."""

    def __init__(self, kind: str, where: Path, name: str, form: str = "") -> None:
        self.form = form or kind  # of its builders, the one that a test is about
        self.where = where
        self.name = name
        self.path = where / name
        where.mkdir(parents=True, exist_ok=True)
        shutil.copytree(HERE / kind, self.path, ignore=shutil.ignore_patterns("__pycache__"))
        rest()

    def __truediv__(self, relative: str) -> Path:
        return self.path / relative

    def files(self) -> list[Path]:
        return sorted(path for path in self.path.rglob("*") if path.is_file())

    def edit(self, relative: str, before: str, after: str) -> Path:
        """Replace text in a file that must hold it."""
        path = self / relative
        text = path.read_text()
        assert before in text
        path.write_text(text.replace(before, after))
        rest()
        return path

    def builder(self, **attributes: Any) -> OpBuilder:
        """A new builder; ``attributes`` replace those of its class."""
        module = importlib.import_module(f"{self.name}.op")
        kind: type[OpBuilder] = getattr(module, f"{self.form.capitalize()}Builder")
        made = kind()
        for name, value in attributes.items():
            setattr(made, name, value)
        return made

    def load(self, **attributes: Any) -> Any:
        """Look at the sources as they are now, and load what they are."""
        return self.builder(**attributes).load(reload=True)

    def loaded(self) -> Loaded:
        """What this process has of the op."""
        builder = self.builder()
        return loader.loaded_here()[builder.op().name][0]


class Steps:
    """The steps that builds ran while it listened."""

    def __init__(self) -> None:
        self.seen: list[events.Event] = []

    def __call__(self, event: events.Event) -> None:
        self.seen.append(event)

    def labels(self, *, cached: bool) -> list[str]:
        ended = (each.data for each in self.seen if each.kind == events.STEP_END)
        return sorted(data["label"] for data in ended if data["cached"] == cached)

    @property
    def compiled(self) -> list[str]:
        """Sources that a compiler was started for."""
        return [label for label in self.labels(cached=False) if label not in events.NO_COMPILES]

    @property
    def linked(self) -> int:
        return self.labels(cached=False).count(events.LINK)


_COARSE_CLOCK = 5  # CLOCK_REALTIME_COARSE, which time has no name for
# The product allows for kernels whose clock is slower than this one's.
kept.TICK_NS = int(time.clock_getres(_COARSE_CLOCK) * 1e9)


def rest() -> None:
    """Let an edit be before what comes next on the kernel's coarse clock, too.

    An edit that might have been during a compile is compiled again, which a count would show.
    """
    enough = time.time_ns() + kept.TICK_NS
    while time.clock_gettime_ns(_COARSE_CLOCK) <= enough:
        time.sleep(0.001)


def settle(*paths: Path) -> None:
    """Let files look as if they had been written long ago, as far as a program can have it."""
    old = time.time() - 1000
    for path in paths:
        os.utime(path, (old, old))
    rest()
