"""A receipt: the answer of one full search, and everything that the answer rests on.

Finding an op takes the target, the compilers' identity, a plan, three keys and the entry's list of
dependencies. A receipt is a memo of that: the entry, and the facts that the search read
(``machine/facts.py``). While all of them hold, the search would give the same answer. So a later
process checks the facts, verifies the library's digest, and needs a fraction of the time.

If a signature differs, or if the receipt itself is damaged, the full search decides and leaves a
new receipt. A hit by receipt writes nothing.

The receipt's name stands for everything that is not a file: opkiln's version, the spec, the
settings, the CPU's features, the device architectures, the compiler that PATH leads to, the Python
and the torch in use.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from itertools import islice
from typing import Any

from opkiln import __version__
from opkiln.base import trust
from opkiln.base.digest import (
    KEY_LENGTH,
    Signature,
    current_signatures,
    forget_mounts,
    open_regular,
    read_file,
    sha256_file,
    write_private,
)
from opkiln.base.model import ABI_NONE, CPU, PACKAGE, PLAN_VERSION, Artifact, place_of
from opkiln.machine import uname
from opkiln.settings import LAYOUT, fingerprint, on_path, settings, store_candidates

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from opkiln.decision.terms import Request
    from opkiln.machine.facts import Evidence

SCHEMA = 8


def recall(request: Request) -> Artifact | None:
    """The artifact of a receipt, if all facts of that receipt hold."""
    try:
        # A load has imported torch, or will: looking for it takes as long as the full search.
        torch = _torch(request) if request.survey else _imported_torch()
        place = _place(request, torch)
        if place is None:
            return None
        root, path = place
        for each in (os.path.dirname(root), root, path):
            if trust.fault(each, os.lstat(each)):
                return None
        receipt = json.loads(read_file(path))
        sign = request.survey.current_signatures if request.survey else current_signatures
        return _verify(root, receipt) if _holds(receipt, sign) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # gone, damaged or of another kind: the full search decides


def _holds(
    receipt: dict[str, Any], sign: Callable[[list[str]], list[int]] = current_signatures
) -> bool:
    if sign(receipt["files"]) != receipt["signatures"]:
        return False
    if list(map(os.readlink, receipt["links"])) != receipt["texts"]:
        return False
    if any(map(os.path.islink, receipt["not_links"])):
        return False
    if receipt["fresh"] and not _same_values(receipt):
        return False
    if receipt["images"]:
        forget_mounts()
        if not all(Signature(*each).holds(path) for path, *each in receipt["images"]):
            return False
    if any(map(os.path.lexists, receipt["absent"])):
        return False
    return _same_path(receipt)


def _same_path(receipt: dict[str, Any]) -> bool:
    """Whether PATH leads to the same programs. It does if it begins with the same directories, and
    nothing was created or removed in them."""
    path = receipt["path"]
    if receipt["path_signatures"] and list(settings.path[: len(path)]) == path:
        return bool(current_signatures(receipt["path_homes"]) == receipt["path_signatures"])
    return _same_programs(receipt["programs"])


def _same_programs(programs: Iterable[Iterable[Any]]) -> bool:
    for name, paths in programs:
        found = on_path(name)
        if [next(found, None) for _ in paths] != paths:
            return False
    return True


def _same_values(receipt: dict[str, Any]) -> bool:
    """Whether the contents are the same of files that were saved just before they were read, so
    that their signatures prove nothing. Once they have come to rest, a full search signs them."""
    from opkiln.machine.facts import Hasher, value

    hasher = Hasher()
    return time.time_ns() < receipt["until"] and all(
        value(kind, path, then, hasher) == then for kind, path, then in receipt["fresh"]
    )


def _verify(root: str, receipt: dict[str, Any]) -> Artifact | None:
    """The library, if its owner, mode, size and digest are right."""
    path = os.path.join(root, receipt["payload"])
    directory = os.path.dirname(path)
    if trust.fault(directory, os.lstat(directory)):
        return None
    with open_regular(path, flags=os.O_NOFOLLOW) as (fd, found):
        if trust.fault(path, found) or found.st_size != receipt["size"]:
            return None
        if sha256_file(fd) != receipt["sha256"]:
            return None
    return Artifact(path, receipt["sha256"], "store")


def _place(request: Request, torch: str | None) -> tuple[str, str] | None:
    """(the store's root, the receipt's path), or None if there can be no receipt. ``torch`` is the
    file of the package in use, None if it is not known."""
    spec = request.op.spec
    if spec.abi == ABI_NONE:
        torch = ""
    variables = fingerprint()
    if variables is None or torch is None:
        return None
    archs = () if spec.backend == CPU else request.wanted.archs
    here = (uname.system(), uname.architecture(), uname.cpu_flags(), _compiler())
    ours = (SCHEMA, __version__, PLAN_VERSION)
    # The text of tuples of strings is injective, and made by the interpreter in one go.
    named = repr((ours, tuple(spec), archs, variables, here, sys.version, torch))
    name = hashlib.sha256(named.encode()).hexdigest()[:KEY_LENGTH]
    root = os.path.join(next(store_candidates())[0], LAYOUT)
    place = place_of(spec.distribution, spec.name)
    return root, os.path.join(root, "receipts", place, name + ".json")


def _compiler() -> str | None:
    """The compiler that PATH leads to, so that two environments with their own compilers have a
    receipt each. The other programs on PATH are facts."""
    name = settings.cxx[-1] if settings.cxx else "g++"
    return next(on_path(name), None)


def write(request: Request, artifact: Artifact, read: Evidence) -> None:
    """Write a receipt for what a full search found, and what it read. Does nothing for an entry
    that is not in the writable store, or if the store cannot be written."""
    torch = _torch(request)
    place = _place(request, torch)
    if not read.complete or place is None:
        return
    root, path = place
    if request.store.root != root or not artifact.path.startswith(root + "/"):
        return
    try:
        facts = _facts(read)
        if facts is None:
            return
        receipt = {
            "payload": os.path.relpath(artifact.path, root),
            "size": os.stat(artifact.path).st_size,
            "sha256": artifact.sha256,
            **facts,
            "absent": list(read.absent),
        }
        # PATH's directories were signed just now, not when the search looked into them.
        if not (_same_programs(receipt["programs"]) and _holds(receipt)):
            return  # something was edited meanwhile, or an edit would not show
        write_private(path, json.dumps(receipt, separators=(",", ":")).encode())
    except OSError:
        return  # gone, full or read-only: later loads take the full search


def _facts(read: Evidence) -> dict[str, Any] | None:
    """The files, directories and programs that were read, in the form that is checked fastest: many
    signatures as one list of numbers. None if one of opkiln's own files had not come to rest, or if
    one changed between two looks. Raises OSError."""
    from opkiln.machine.facts import CHOICE, LINK, Hasher, ask_again, split_names

    signatures = {path: Signature.of(path) for path in _own_code()}
    signatures |= {path: Signature(*each) for path, each in read.files.items()}
    if not all(each.settled for each in signatures.values()):
        return None
    fresh = []
    until = 0
    hasher = Hasher()
    links: dict[str, str] = {}
    programs = dict(read.programs)
    for kind, path, value, looked in read.entry:
        if kind == LINK:
            links[path] = value
            continue
        if kind == CHOICE:  # of two lists of programs, the longer begins with the shorter
            programs[path] = max([*split_names(value)], programs.get(path, []), key=len)
            continue
        # What had just changed when it was read may have come to rest.
        now, signature = (value, looked) if looked.settled else ask_again(kind, path, value, hasher)
        if now != value:
            return None
        if signature.settled:
            if signatures.setdefault(path, signature)[:-1] != signature[:-1]:
                return None  # it changed between two looks
        else:
            fresh.append([kind, path, value])
            until = max(until, signature.settles_at if signature.read_at else _FOR_EVER)
    mounted = {path: each for path, each in signatures.items() if each.in_image}
    settled = {path: each for path, each in signatures.items() if path not in mounted}
    return {
        "files": list(settled),
        "signatures": _numbers(settled.values()),
        "links": [path for path, text in links.items() if text],
        "texts": [text for text in links.values() if text],
        "not_links": [path for path, text in links.items() if not text],
        "fresh": fresh,
        "until": until,
        "images": [[path, *each] for path, each in mounted.items()],
        # A program that is named by its path is one of the files.
        **_path_facts({name: paths for name, paths in programs.items() if paths != [name]}),
    }


_FOR_EVER = 1 << 62  # a directory that is gone has no signature


def _path_facts(programs: dict[str, list[str | None]]) -> dict[str, Any]:
    """Where PATH leads to. Raises OSError. Comparing its directories is less work than looking for
    each program in each of them. That suffices if they contain, of these names, only the programs
    that were found: another file may become a program, which does not change its directory."""
    path = list(settings.path)
    searched = []  # for each program, the directories until it was found
    for found in programs.values():
        directory = None if found[-1] is None else os.path.dirname(found[-1])
        searched.append(path[: path.index(directory) + 1] if directory in path else path)
    longest = max(searched, key=len, default=[])
    homes = list(dict.fromkeys(map(_nearest_directory, longest)))
    signatures = [Signature.of(home) for home in homes]
    enough = (
        all(map(os.path.isabs, longest))
        and all(each.settled and not each.in_image for each in signatures)
        and not any(
            os.path.lexists(other := os.path.join(directory, name)) and other not in found
            for (name, found), directories in zip(programs.items(), searched, strict=True)
            for directory in directories
        )
    )
    return {
        "programs": list(programs.items()),
        "path": longest,
        "path_homes": homes,
        # Empty, and so never equal: the programs are looked up.
        "path_signatures": _numbers(signatures) if enough else [],
    }


def _nearest_directory(directory: str) -> str:
    """A directory, or the nearest one above it that exists."""
    while not os.path.isdir(directory) and directory not in ("", "/"):
        directory = os.path.dirname(directory)
    return directory or "."


def _numbers(facts: Iterable[Iterable[Any]]) -> list[int]:
    """The signatures in the form of ``digest.current_signatures``."""
    return [number for each in facts for number in islice(each, 4)]


def _imported_torch() -> str | None:
    return getattr(sys.modules.get("torch"), "__file__", None)


def _torch(request: Request) -> str | None:
    """The file of the torch that is imported, or else of the one that was found."""
    imported = _imported_torch()
    if imported is not None or request.sdk is None:
        return imported
    return os.path.join(request.sdk.path, "__init__.py")


# The rooms and modules whose code decides which entry is right.
_ROOMS = ("base", "decision", "machine", "plan", "settings", "store")


def _own_code() -> Iterator[str]:
    """The files of opkiln's code that took part: after an edit, receipts no longer hold. A hit
    looks at each of them. The rooms' ``__init__.py`` have no code (a test holds that)."""
    for name, module in list(sys.modules.items()):
        first, _, rest = name.partition(".")
        room = rest.partition(".")[0]
        if first == "opkiln" and room in _ROOMS and not hasattr(module, "__path__"):
            file: str | None = getattr(module, "__file__", None)
            if file and file.startswith(PACKAGE + "/"):
                yield file
