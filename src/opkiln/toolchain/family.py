"""What the families of device compilers have in common: a search among those that are here."""

from __future__ import annotations

from opkiln.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from opkiln.build_model import DeviceCompiler, Toolchain
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


def _probed(family: Family, memory: tuple[str, ...], wanted: str | None, host: Toolchain) -> Search:
    search = family.search(memory, wanted, host, ask=True)
    assert search is not None
    return search
