"""What the families of device compilers have in common: a search among those that are here, and how
well each fits the runtime that torch was built with."""

from __future__ import annotations

from typing import Any

from opkiln.build_model import DeviceCompiler
from opkiln.record import Record
from opkiln.toolchain.torch_sdk import release

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from opkiln.build_model import Toolchain
    from opkiln.errors import ToolchainError
    from opkiln.toolchain.find import Candidate

    class Family(Protocol):
        """A family is a module: ``nvcc``, ``nvrtc``, ``hipcc`` or ``sycl``."""

        def available(self) -> bool:
            """Whether any compiler of the family is found. Starts no process."""

        def search(
            self, memory: tuple[str, ...], wanted: str | None, host: Toolchain, *, ask: bool
        ) -> Search | None:
            """Look at every compiler of the family. Those that are not remembered are probed.

            ``wanted`` is the version of the runtime that torch was built with. If ``ask`` is false
            and a probe is not remembered, the result is None: no process is started.
            """


class Search(Record):
    """The compilers of a family that are here."""

    taken: DeviceCompiler | None
    candidates: list[Candidate]  # in order of preference; the one that is taken is not refused
    failure: Callable[[], ToolchainError]  # why none is taken; may probe others, to name one


def recall(
    family: Family, memory: tuple[str, ...], wanted: str | None, host: Toolchain
) -> DeviceCompiler | None:
    """The compiler that ``choose`` would take, if every probe is remembered. Starts no process,
    writes nothing."""
    search = family.search(memory, wanted, host, ask=False)
    return None if search is None else search.taken


def choose(
    family: Family, memory: tuple[str, ...], wanted: str | None, host: Toolchain
) -> DeviceCompiler:
    """The compiler that fits torch best. Raises ToolchainError with each and why it is refused."""
    search = _probed(family, memory, wanted, host)
    if search.taken is None:
        raise search.failure()
    return search.taken


def candidates(
    family: Family, memory: tuple[str, ...], wanted: str | None, host: Toolchain
) -> list[Candidate]:
    """Every compiler that was considered, for reports."""
    return _probed(family, memory, wanted, host).candidates


def rank(
    candidates: list[Candidate],
    records: list[dict[str, Any]],
    wanted: str | None,
    misfit: Callable[[dict[str, Any]], str],
) -> tuple[list[Candidate], list[int]]:
    """(the candidates, as their records judge them; the places of those that may be taken, the best
    first). ``misfit`` says why one that works does not fit. Equal ones keep their order."""
    judged = [
        candidate._replace(refused=record["refused"] or misfit(record), version=record["version"])
        for candidate, record in zip(candidates, records, strict=True)
    ]
    places = (place for place, candidate in enumerate(judged) if not candidate.refused)
    return judged, sorted(places, key=lambda place: distance(judged[place].version, wanted))


def compiler(record: dict[str, Any], **others: Any) -> DeviceCompiler:
    """A compiler, from the record of its probe and what the record does not say."""
    values = {**record, **others}
    lists = ("archs", "include_dirs", "library_dirs")
    values |= {name: tuple(values[name]) for name in lists}
    values["accepts"] = frozenset(values["accepts"])
    return DeviceCompiler(
        **{name: values[name] for name in DeviceCompiler._fields if name in values}
    )


def misfit(runtime: str, version: str, wanted: str | None) -> str:
    """Why a compiler for this version of a runtime (CUDA, HIP) cannot build for torch's; empty when
    it can. Versions of one major are compatible, others are not."""
    if wanted is None or release(version)[0] == release(wanted)[0]:
        return ""
    return f"{runtime} {version}; torch was built with {wanted}, another major version"


def distance(version: str, wanted: str | None) -> tuple[int, int, int]:
    """A sort key: the smaller, the better a version fits torch's.

    The same version is best. Then comes the nearest newer minor, which has all that torch uses,
    then the nearest older one, then the nearest other major. If torch has none, all are equal.
    """
    if wanted is None:
        return 0, 0, 0
    (major, minor), (torchs, torchs_minor) = release(version), release(wanted)
    if major != torchs:
        return abs(major - torchs), int(major < torchs), -minor
    return 0, int(minor < torchs_minor), abs(minor - torchs_minor)


def outranked(
    candidate: Candidate, taken: dict[str, Any], runtime: str, wanted: str | None, *, after: str
) -> Candidate:
    """A candidate that fits, but another is taken. ``taken`` is its record, ``after`` its place."""
    reason = f"{runtime} {taken['version']} in {taken['home']} is nearer to torch's {wanted}"
    if wanted is None or candidate.version == taken["version"]:
        reason = f"found after {after}"
    return candidate._replace(refused=reason)


def _probed(family: Family, memory: tuple[str, ...], wanted: str | None, host: Toolchain) -> Search:
    search = family.search(memory, wanted, host, ask=True)
    assert search is not None
    return search
