"""Lock files: which artifacts may serve, by their digests. And the names of artifacts on tiers.

`opkiln lock` writes a lock file from the store, for a repository. Whoever has the file takes
exactly these artifacts from any tier, and needs no signature: the file's reviewers vouch for them.

A name is made of what a machine knows without a compiler: the declaration, the target and the
contents of the op's own sources. So a slim image finds what a machine with compilers has published.
Headers are left out, because only a build knows which of them are read. They are compared with the
entry.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable
from typing import Any, NamedTuple

from opkiln import __version__
from opkiln.base.build_model import Target
from opkiln.base.digest import key, open_regular, read_opened, sha256_file
from opkiln.base.model import OpSpec
from opkiln.base.trust import fault
from opkiln.decision.archs import features
from opkiln.errors import StoreError
from opkiln.machine.arch import cpu
from opkiln.settings import LAYOUT, origin_of
from opkiln.store.entry import read_manifest, read_sidecar
from opkiln.store.key import UNKEYED, declaration_fields, intent_key

_VERSION = 1
_LARGEST = 16 << 20
_HEAD = """\
# Compiled ops by digest, for `opkiln cache pull --lock` and OPKILN_LOCK.
# `opkiln lock` writes this file; do not edit it.
version = 1
"""


class LockRow(NamedTuple):
    """One artifact: an op for a target. The order is that of the file."""

    package: str
    op: str
    backend: str
    archs: tuple[str, ...]
    machine: str
    cpu: str
    cpu_features: tuple[str, ...]
    abi: str
    name: str  # under which it is published
    sha256: str
    size: int

    @property
    def target(self) -> str:
        """The target that it was made for, in words."""
        made = "+".join((self.cpu, *self.cpu_features))
        return f"{self.backend} {';'.join(self.archs)}, {made}" if self.archs else made


def write(found: Iterable[LockRow]) -> str:
    """The text of a lock file. The same artifacts give the same text."""
    parts = [_HEAD]
    for each in sorted(set(found)):
        rows = each._asdict().items()
        # TOML's numbers, lists and texts are written as JSON's.
        lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in rows]
        parts.append("\n[[artifact]]\n" + "\n".join(lines) + "\n")
    return "".join(parts)


def read(path: str) -> tuple[LockRow, ...]:
    """The artifacts of a lock file. Raises StoreError if it cannot be read, or if anybody can write
    it."""
    import tomllib

    try:
        with open_regular(path, _LARGEST) as (fd, found):
            if reason := fault(path, found, listed=True):
                raise StoreError(f"the lock file {reason}", hint=f"chmod o-w {shlex.quote(path)}")
            body = tomllib.loads(read_opened(fd, found, _LARGEST, path).decode())
        if body.get("version") != _VERSION:
            raise ValueError(f"it has the version {body.get('version')!r}, not {_VERSION}")
        return tuple(_parse_row(each) for each in body.get("artifact", []))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        told = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise StoreError(
            f"the lock file {path} cannot be used: {told}", hint="opkiln lock    # writes ops.lock"
        ) from error


def _parse_row(row: dict[str, Any]) -> LockRow:
    values: list[Any] = []
    for name in LockRow._fields:
        value: Any = row[name]
        kind: Any = {"size": int, "archs": list, "cpu_features": list}.get(name, str)
        if type(value) is not kind:
            raise ValueError(f"{name} is {value!r}")
        values.append(tuple(str(each) for each in value) if kind is list else value)
    return LockRow(*values)


# The names of artifacts

Sources = Iterable[tuple[str, str]]

_LONGEST = 80  # characters of the op's name; a tag of a registry has at most 128 in all


def artifact_name(distribution: str, op: str, intent: str, sources: Sources) -> str:
    """The name of what is built of these sources, each with its digest, for an intent key."""
    made = key("remote", (LAYOUT, __version__, distribution, op, intent, tuple(sorted(sources))))
    return f"{re.sub('[^A-Za-z0-9_.-]', '_', op)[:_LONGEST].lstrip('.-')}-{made}"


def object_name(step: str, files: Iterable[str]) -> str:
    """The name of what a command makes, by its key and the files that its words name. Raises
    OSError."""
    digests = tuple(map(sha256_file, files))
    return f"object-{key('remote object', (LAYOUT, __version__, step, digests))}"


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
        artifact_name(distribution, op, intent, sources), sha256, size,
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
        intent_key(spec, each) for target in targets for each in _covering_targets(spec, target)
    )
    return [artifact_name(spec.distribution, spec.name, intent, sources) for intent in intents]


def _covering_targets(spec: OpSpec, target: Target) -> Iterable[Target]:
    yield target
    if spec.vectorize and origin_of("cpu")[0] == "native":
        for each in cpu.compatible_cpus(target.machine, features()):
            yield target._replace(cpu=each.level, cpu_features=each.features)
