"""Fetching all that a lock file names, before it is needed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import NamedTuple

from opkiln.bundles.bundle import Fetched
from opkiln.errors import OpkilnError
from opkiln.remote import tiers
from opkiln.remote.fetch import fetched_already, take
from opkiln.remote.patience import COMMAND
from opkiln.remote.tier import Absent, Forbidden, Unusable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from opkiln.remote.lockfile import Locked
    from opkiln.remote.patience import Told

_AT_ONCE = 8

NEW, THERE, MISSING = "fetched", "already there", "missing"


class Pulled(NamedTuple):
    """What came of one artifact of a lock file."""

    row: Locked
    status: str
    url: str = ""
    reason: str = ""


def pull(
    rows: Sequence[Locked], lock: str, urls: Sequence[str], root: str, told: Told = None
) -> Iterator[Pulled]:
    """Fetch artifacts, several at once, and give each as it is done. ``told`` is called with the
    number of bytes of each piece, by several threads. What was interrupted is resumed."""
    unique = {row.sha256: row for row in rows}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        waiting = [pool.submit(_pull, row, lock, urls, root, told) for row in unique.values()]
        for each in as_completed(waiting):
            yield each.result()


def _pull(row: Locked, lock: str, urls: Sequence[str], root: str, told: Told) -> Pulled:
    if url := fetched_already(root, row.package, row.op, row.sha256):
        return Pulled(row, THERE, url)
    reasons = []
    for url in urls:
        try:
            take(Fetched(url, row.sha256, ("lock", lock)), row.size, root, told, COMMAND)
        except Absent:
            reasons.append(f"{url} does not have it")
        except (tiers.Down, Forbidden, Unusable, OpkilnError) as error:
            reasons.append(f"{url}: {getattr(error, 'what', error)}")
        else:
            return Pulled(row, NEW, url)
    return Pulled(row, MISSING, reason="; ".join(reasons))
