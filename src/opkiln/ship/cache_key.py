"""The key under which CI keeps the store from one run to the next: ``opkiln cache key``.

It is made of what a build depends on, as far as that is known before anything is built: the intent
and build keys of each op (flags, target, compilers), and the files that lie beside its sources and
in its include directories. Which of them a compiler reads is only known afterwards, so all count.

The key never decides what is used. A store that is restored under a key that is too coarse compares
what its entries were made of, and what differs is compiled.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from opkiln import __version__
from opkiln.base.digest import UnusableFile, key, sha256_file
from opkiln.base.model import CARRIED, OpSpec
from opkiln.building.asking import plan_here
from opkiln.errors import OpkilnError
from opkiln.settings import LAYOUT
from opkiln.ship import prebuild, selection
from opkiln.store.key import build_key, intent_key

# What all keys of stores that this opkiln can read begin with: an older store is a good start.
PREFIX = f"opkiln-{LAYOUT}-"

_LENGTH = 24  # in hex digits
_LARGEST = 16 << 20  # bytes: no source or header is larger
_OTHER_FILES = (".py", ".pyc", ".pyi", ".so")
_OTHER_DIRECTORIES = ("__pycache__", CARRIED)


def cache_key(asked: Iterable[prebuild.BuildRequest]) -> str:
    """The key for a store with these ops. Nothing is built, and no op is loaded.

    The order of the ops makes no difference. One that this machine does not support and that was
    not named adds nothing. Raises OpkilnError, as a build would before it starts.
    """
    parts = set()
    for each in asked:
        try:
            with selection.use_cpu(each.wanted):
                plan = plan_here(prebuild.decision_of(each))
        except OpkilnError as error:
            if each.named or not prebuild.is_unsupported_here(error, each.builder):
                raise
            continue
        parts.add((intent_key(plan.spec, plan.target), build_key(plan), tuple(_files(plan.spec))))
    return PREFIX + key("ci", (__version__, parts))[:_LENGTH]


def _files(spec: OpSpec) -> Iterator[tuple[str, str]]:
    """(path, digest) of the files in the directories of the sources and of the op's own headers."""
    places = [os.path.dirname(source) for source in spec.sources] + list(spec.include_dirs)
    top = os.path.realpath(spec.root)
    for place in sorted({os.path.realpath(os.path.join(top, each)) for each in places}):
        if os.path.commonpath((top, place)) != top:
            continue  # another package's, or the system's
        for directory, inside, names in os.walk(place):
            inside[:] = sorted(each for each in inside if each not in _OTHER_DIRECTORIES)
            for name in sorted(each for each in names if not each.endswith(_OTHER_FILES)):
                path = os.path.join(directory, name)
                try:
                    yield os.path.relpath(path, top), sha256_file(path, _LARGEST)
                except (UnusableFile, FileNotFoundError):
                    continue  # data, a FIFO, a link to nowhere: nothing that is compiled
