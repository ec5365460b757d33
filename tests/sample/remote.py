"""An op that is built once, and machines that find it in a remote tier, each a fresh process."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opkiln.store import signing
from sample import child, command, known
from sample.op_tree import Tree

if TYPE_CHECKING:
    import subprocess

SITE = Path(sysconfig.get_path("purelib"))  # signatures need a package, and nothing needs torch
SOURCE = 'extern "C" int answer() { return 42; }\n'
_LOAD = """
import json, sys, time, warnings
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    from pkg.op import Builder
    from opkiln.errors import OpkilnError
    from opkiln.loading import loader
    builder = Builder()
    began = time.monotonic()
    try:
        value = builder.load().answer()
    except OpkilnError as error:
        value = type(error).__name__
    took = time.monotonic() - began
    from opkiln.decision.terms import Request
    from opkiln.loading.explain import explain
    known = loader.loaded_here().get(builder.op().name)
    asked = known[0] if known else loader.resolve(Request(builder.op()))
    trace = [list(each) for each in asked.trace.candidates]
    explained = str(explain(builder.op()))
    origin = known[0].artifact.origin if known and known[0].artifact else ""
print(json.dumps({"value": value, "seconds": took, "trace": trace, "origin": origin,
                  "explained": explained,
                  "told": [str(each.message) for each in told]}))
"""


class Machines:
    """A builder machine, and others without a compiler."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.tree = Tree(base / "tree")
        self.tree.write("pkg/a.cpp", SOURCE)
        self.tree.declare(sources=["a.cpp"])
        self.key = str(base / "key")
        self.public = signing.generate(self.key).key
        self.other = signing.generate(str(base / "other")).key
        self.store = known.make_store(base / "builder")
        assert self.load("builder")["origin"] == "built"
        self._made = 0

    def new(self) -> str:
        """The name of a store that has no op."""
        self._made += 1
        return known.make_store(self.base / f"machine{self._made}").name

    def environment(self, store: str, **more: str) -> dict[str, str]:
        return {
            "OPKILN_CACHE_DIR": str(self.base / store),
            "OPKILN_PROGRESS": "off",
            "HOME": str(self.base / "home"),
            **more,
        }

    def load(self, store: str, **more: str) -> dict[str, Any]:
        """What a load in a fresh process comes to."""
        return self.finish_load(self.start_load(store, **more))

    def start_load(self, store: str, before: str = "", **more: str) -> subprocess.Popen[str]:
        """Start a load in a fresh process, after a few lines."""
        env = self.environment(store, **more)
        return child.start(before + _LOAD, path=[self.tree.path, SITE], env=env)

    def finish_load(self, started: subprocess.Popen[str]) -> dict[str, Any]:
        done = child.finish(started)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def fetch(self, store: str, url: str, **more: str) -> dict[str, Any]:
        """A load on a machine that never compiles, and trusts the builder's key."""
        given = {"OPKILN_TRUSTED_KEYS": self.public, "OPKILN_MODE": "cached", **more}
        return self.load(store, OPKILN_REMOTES=url, **given)

    def start(self, store: str, *words: str, **more: str) -> subprocess.Popen[str]:
        """Start the command opkiln."""
        code = (
            f"import sys; sys.argv = {['opkiln', *words]!r}\nimport opkiln.__main__ as m; m.main()"
        )
        env = self.environment(store, **more)
        return child.start(code, path=[self.tree.path, SITE], env=env)

    def command(self, store: str, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run the command opkiln in this process."""
        return command.run(*words, **self.environment(store, **more))

    def push(self, url: str, *words: str, **more: str) -> None:
        done = self.command("builder", "cache", "push", "--remote", url, "--key", self.key, *words,
                            **more)  # fmt: skip
        assert done.returncode == 0, done.stderr

    def lock(self) -> str:
        """The lock file of what was built."""
        file = self.base / "ops.lock"
        done = self.command("builder", "lock", "-o", str(file))
        assert done.returncode == 0, done.stderr
        return str(file)


def remote_lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    """(verdict, reason) of the candidates in remote tiers."""
    return [(each[1], each[2]) for each in found["trace"] if each[0] == "remote"]
