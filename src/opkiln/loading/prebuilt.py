"""Libraries that were built elsewhere: what packages were installed with, and listed layers.

Both are layers like the user's own (``store.layers``). But an entry of theirs was not built for
this very machine, so it is not looked up by a key: every entry of the op is judged
(``loading.fit``), and of those that fit, the best serves. Nothing is written, no process is
started, and the full search is not imported.
"""

from __future__ import annotations

import os

from opkiln.loading import fit, installed
from opkiln.model import PACKAGE, Artifact
from opkiln.store import entry, key
from opkiln.store.recheck import Hasher
from opkiln.trust import open_to_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

    from opkiln.loading.loader import Op
    from opkiln.loading.trace import Trace

PREBUILT, STORE = "prebuilt", "store"  # the resorts: installed with a package; a listed layer


def carried(op: Op, trace: Trace) -> Artifact | None:
    """The best library for this machine that packages were installed with."""
    layers = installed.layers(op.spec)
    return find(op, layers, trace, PREBUILT) if layers else None


def find(op: Op, layers: Iterable[str], trace: Trace, resort: str) -> Artifact | None:
    """The best library for this machine in some layers, with what was refused in the trace.

    Raises ArchError for a list of architectures, or a CPU, that was asked for and is none.
    """
    spec = op.spec
    declared = ""
    fitting: list[tuple[tuple[int, ...], str]] = []
    for layer in layers:
        base = os.path.join(layer, "ops", spec.distribution, spec.name)
        if reason := open_to_all(layer, base):
            trace.add(resort, "refused", reason, base)
            continue
        for leaf in _leaves(base):
            declared = declared or key.spec_key(spec)
            try:
                manifest = _manifest(leaf)
                if manifest["target"]["backend"] != spec.backend:
                    continue
                verdict = fit.judge(op, manifest, declared, listed=resort == STORE)
            except FileNotFoundError:
                continue  # removed meanwhile
            except (OSError, ValueError, KeyError, TypeError) as error:
                trace.add(resort, "refused", f"damaged: {error}", leaf)
                continue
            if verdict.misfit:
                trace.add(resort, "refused", verdict.misfit, leaf)
            else:
                fitting.append((verdict.rank, leaf))
    for _, leaf in sorted(fitting):
        found = _examined(op, leaf)
        if isinstance(found, entry.Leaf):
            trace.add(resort, "taken", _fits(found.manifest["target"]), found.payload)
            return Artifact(found.payload, found.manifest["sha256"], resort)
        if found is not None:
            trace.add(resort, "refused", found.reason, found.directory)
    return None


def _fits(target: dict[str, Any]) -> str:
    made = ";".join(target["archs"]) or "+".join((target["cpu"], *target["cpu_features"]))
    return f"its sources are today's, and its code for {made} runs here"


def _leaves(base: str) -> Iterator[str]:
    """``<intent>/<build>/<deps>`` below an op's directory."""
    for intent in _names(base):
        for build in _names(os.path.join(base, intent)):
            for deps in _names(os.path.join(base, intent, build)):
                yield os.path.join(base, intent, build, deps)


def _names(directory: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(directory) if not name.startswith("."))
    except OSError:
        return []  # not there, no directory, or not ours to read


def _manifest(leaf: str) -> dict[str, Any]:
    with open(os.path.join(leaf, entry.MANIFEST), "rb") as file:
        return entry.parse_manifest(file.read())


def _examined(op: Op, leaf: str) -> entry.Leaf | entry.Refused | None:
    """Owner and mode, the sources, the digests. A package that ships no sources has none to
    differ from."""
    spec = op.spec
    places = {"src": spec.root, "opkiln": PACKAGE, "abs": ""}
    found = entry.examine(leaf, places, Hasher(), listed=True, external=False)
    if isinstance(found, entry.Refused) and not found.damaged:
        files = (os.path.join(spec.root, source) for source in spec.sources)
        if not spec.inline and not any(map(os.path.lexists, files)):
            return entry.examine(leaf, places, Hasher(), listed=True, external=False, own=False)
    return found
