"""The name under which an entry is published to a tier, and looked for there.

It is made of what a machine knows without a compiler: the declaration, the target and the contents
of the op's own sources. So a slim image finds what a machine with compilers has published. Headers
are not in it: which ones are read is only known after a build. They are compared with the entry.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from opkiln import __version__
from opkiln.base.build_model import Target
from opkiln.base.digest import key, sha256_file
from opkiln.base.model import OpSpec
from opkiln.decision.archs import features
from opkiln.machine.arch import cpu
from opkiln.remote.lockfile import LockRow
from opkiln.settings import LAYOUT, origin_of
from opkiln.store.entry import read_manifest, read_sidecar
from opkiln.store.key import UNKEYED, declaration_fields, intent_key

_LONGEST = 80  # characters of the op's name; a tag of a registry has at most 128 in all


def _name(distribution: str, op: str, intent: str, sources: Iterable[tuple[str, str]]) -> str:
    made = key("remote", (LAYOUT, __version__, distribution, op, intent, tuple(sorted(sources))))
    return f"{re.sub('[^A-Za-z0-9_.-]', '_', op)[:_LONGEST].lstrip('.-')}-{made}"


def row_of(directory: str, sha256: str, size: int) -> LockRow:
    """The row of a lock file for an entry of the store and its bundle. Raises OSError, ValueError,
    KeyError."""
    intent = directory.split("/")[-3]
    manifest, lists = read_manifest(directory), read_sidecar(directory)
    distribution, op, target = manifest["distribution"], manifest["op"], manifest["target"]
    own = {(anchor, path): sha for anchor, path, sha in manifest["deps"]["own"]}
    sources = []
    for source in lists["inputs"]["spec"]["sources"]:
        place = ("opkiln", source[9:]) if source.startswith("{opkiln}/") else ("src", source)
        if place in own:  # an inline source is not a file; its text is in the intent
            sources.append((source, own[place]))
    return LockRow(
        distribution, op, target["backend"], tuple(target["archs"]), target["machine"],
        target["cpu"], tuple(target["cpu_features"]), target["abi_tag"],
        _name(distribution, op, intent, sources), sha256, size,
    )  # fmt: skip


def candidate_names(spec: OpSpec, targets: Iterable[Target]) -> list[str]:
    """The names of artifacts that could serve an op, best first. Raises OSError if a source is
    missing.

    For ``native`` these are for this CPU, and for each level that it supports.
    """
    fields = [field for field in spec._fields if field not in UNKEYED]
    told = dict(zip(fields, declaration_fields(spec), strict=True))["sources"]
    files = () if spec.inline else zip(told, spec.sources, strict=True)
    sources = [(name, sha256_file(os.path.join(spec.root, source))) for name, source in files]
    intents = dict.fromkeys(
        intent_key(spec, each) for target in targets for each in _covering(spec, target)
    )
    return [_name(spec.distribution, spec.name, intent, sources) for intent in intents]


def _covering(spec: OpSpec, target: Target) -> Iterable[Target]:
    yield target
    if spec.vectorize and origin_of("cpu")[0] == "native":
        for each in cpu.compatible_cpus(target.machine, features()):
            yield target._replace(cpu=each.level, cpu_features=each.features)
