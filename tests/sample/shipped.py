"""A package whose op was built elsewhere and shipped, and a note of each library that is opened."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from typing import TYPE_CHECKING, Any
from unittest import mock

from opkiln.loading import loader
from opkiln.loading.explain import explain
from opkiln.loading.here import Loaded
from opkiln.settings import override
from opkiln.store import entry, layer
from sample import child, command, known, levels, pool, wanted
from sample.package import settle

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

    from sample.package import Package

# Written by the library's constructor, which dlopen runs: a library that is refused before that
# leaves no note. The test of a fresh build, in an environment of its own, leaves none either.
OPENED = "SAMPLE_OPENED"
_NOTING = f"""
#include <dlfcn.h>
#include <cstdio>
#include <cstdlib>
namespace {{
__attribute__((constructor)) void note_opened() {{
  Dl_info self;
  const char* log = std::getenv("{OPENED}");
  if (log && dladdr(reinterpret_cast<void*>(&note_opened), &self)) {{
    std::FILE* file = std::fopen(log, "a");
    std::fprintf(file, "%s\\n", self.dli_fname);
    std::fclose(file);
  }}
}}
}}  // namespace
extern "C" int level() {{
{levels.LEVEL_IN_C}
}}
"""


class Shipped:
    """A package, a machine elsewhere that builds its op, and where this one finds what it built.

    The op's libraries note that they are opened, and which; ``level()`` is the number in
    ``levels.LEVELS`` that they were compiled for.
    """

    def __init__(
        self, package: Package, source: str, base: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.package = package
        self.base = base
        self.own = package.path / "prebuilt"
        self._log = base / "opened"
        self._attributes: dict[str, Any] = {}
        monkeypatch.setenv(OPENED, str(self._log))
        # One library in one process is opened once, whatever its path: each gets its own bytes, in
        # every run the same. They come from a file of its own name: were the test's name in a file
        # of the package, the pool would have an object of that file for each test, and whoever
        # builds the package would look at all of them.
        name = _test()
        noting = os.path.join(os.path.dirname(source), f"noting_{name[:12]}.cpp")
        text = f'{_NOTING}extern "C" const char* sample_name() {{ return "{name}"; }}\n'
        (package / noting).write_text(text)
        package.edit("op.py", f'"{source}"', f'"{source}", "{noting}"')
        settle(*package.files())

    def build(self, to: Path | None = None, *, backend: str = "", **changes: Any) -> Path:
        """Build elsewhere and ship, with the package itself by default; the entry's directory."""
        elsewhere = self.base / "elsewhere"
        if not elsewhere.exists():
            known.make_store(elsewhere)
        pooled = {"OPKILN_STORE_LAYERS": str(pool.LAYER)}
        with mock.patch.dict(os.environ, pooled), override(cache_dir=str(elsewhere), **changes):
            more = {"_asked_backend": backend} if backend else {}
            made = wanted.artifact(self.package.builder(**more).op())
            (leaf,) = layer.export([made.path], str(to or self.own))
        pool.add(elsewhere)
        return type(self.base)(leaf)

    def load(self, **attributes: Any) -> Any:
        """Load as this machine's user does, into a store that is empty at first."""
        self._attributes = attributes
        return self.package.load(**attributes)

    @property
    def loaded(self) -> Loaded:
        """What the last load came to."""
        return loader.loaded_here()[self.package.builder(**self._attributes).op().name][0]

    def explained(self, **attributes: Any) -> str:
        """What `opkiln explain` says in a process that has not loaded it."""
        op = self.package.builder(**attributes).op()
        known = loader.here.ops.pop(op.name, None)
        try:
            return str(explain(op))
        finally:
            if known is not None:
                loader.here.ops[op.name] = known

    @property
    def origin(self) -> str:
        """Which resort served."""
        artifact = self.loaded.artifact
        return "" if artifact is None else artifact.origin

    @property
    def trace(self) -> str:
        return str(self.loaded.trace)

    @property
    def opened(self) -> list[str]:
        """The libraries that any process opened, in order."""
        return self._log.read_text().splitlines() if self._log.exists() else []


def _test() -> str:
    """A name for the test that is running."""
    name = os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[0]
    return hashlib.sha256(name.encode()).hexdigest()


def clean_environment(**variables: str) -> dict[str, str]:
    """An environment in which nothing is set that opkiln reads, but this."""
    kept = os.environ.keys() - child.VARIABLES
    return {name: os.environ[name] for name in kept} | variables


def build(store: Path, *words: str, pooled: bool = True) -> Any:
    """``opkiln build`` into a store. If ``pooled``, what was compiled before is only copied."""
    if not store.exists():
        known.make_store(store)
    variables = {"OPKILN_CACHE_DIR": str(store), "OPKILN_PROGRESS": "off"}
    if pooled:
        variables["OPKILN_STORE_LAYERS"] = str(pool.LAYER)
    with mock.patch.dict(os.environ, clean_environment(**variables), clear=True):
        done = command.run("build", *words, "--json")
    assert done.returncode == 0, done.stderr
    pool.add(store)
    return json.loads(done.stdout)


def rewrite(leaf: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what an entry says of itself, with a digest that holds."""
    path = leaf / entry.MANIFEST
    manifest = entry.parse_manifest(path.read_bytes())
    change(manifest)
    path.write_bytes(entry.write_manifest(manifest))


def announce(package: Package, op: str, kind: str) -> None:
    """Let a package provide an op, as an installed distribution does."""
    metadata = package.where / f"{package.name}-1.0.dist-info"
    metadata.mkdir()
    text = f"Metadata-Version: 2.1\nName: {package.name}\nVersion: 1.0\n"
    (metadata / "METADATA").write_text(text)
    (metadata / "entry_points.txt").write_text(f"[opkiln.ops]\n{op} = {package.name}.op:{kind}\n")


def mask(path: Path, level: int) -> Path:
    """A /proc/cpuinfo of a CPU that has a level and no more, for ``machine._CPUINFO``."""
    path.write_text(levels.cpuinfo(levels.LEVELS[level]))
    return path


def described(leaf: Path) -> dict[str, Any]:
    """An entry's manifest."""
    return dict(json.loads((leaf / entry.MANIFEST).read_bytes())["manifest"])


def without_sources(package: Package) -> None:
    """As a package that ships libraries alone."""
    shutil.rmtree(package / "csrc")
