"""A layer in one file: bundles that the user listed, as places to look for libraries in."""

from __future__ import annotations

from opkiln.store import archive
from opkiln.store.recheck import Hasher

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from opkiln.loading.loader import Op
    from opkiln.store import entry


class Bundle:
    """As ``loading.prebuilt.Directory``, of one file."""

    own = False

    def __init__(self, file: str) -> None:
        self.root = file

    def leaves(self, op: Op) -> Iterable[str]:
        """An op's entries. Raises StoreError, OSError, ValueError for a file that is no bundle."""
        return archive.leaves(self.root, op.spec.distribution, op.spec.name)

    def manifest(self, leaf: str) -> dict[str, Any]:
        """What an entry says of itself. Raises StoreError, KeyError, ValueError, OSError."""
        return archive.manifest(leaf)

    def examine(
        self, leaf: str, places: Mapping[str, str], *, own: bool
    ) -> entry.Leaf | entry.Refused:
        """``store.archive.examine``: a good one's library is in memory."""
        return archive.examine(leaf, places, Hasher(), own=own)

    def subject(self, found: entry.Leaf) -> str:
        """What the trace calls an entry: its file in memory says nothing."""
        return found.directory
