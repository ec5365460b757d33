"""Ops as arguments."""

from __future__ import annotations

from opkiln.errors import UnknownOp

TYPE_CHECKING = False
if TYPE_CHECKING:
    import click

    from opkiln.store.inventory import Entry


def complete(_context: click.Context, _argument: click.Parameter, incomplete: str) -> list[str]:
    """Every op, bundled or of another package, that begins so; for the shell's completion."""
    from opkiln.registry import ALL_OPS

    return [name for name in ALL_OPS if name.startswith(incomplete)]


class Stored:
    """The entries of an op in a store: ``OP`` is every package's, ``DISTRIBUTION:OP`` one's."""

    def __init__(self, name: str) -> None:
        from opkiln.registry import ALL_OPS, normalized

        owner, _, self._op = name.rpartition(":")
        self._normalized = normalized
        if owner:
            try:
                owner = ALL_OPS[name]().distribution  # the store knows it by its import name
            except UnknownOp:
                pass  # it is not installed any more: its entries go by the name it had
        self._owner = normalized(owner)

    def __call__(self, found: Entry) -> bool:
        """Whether an entry is one of the op's."""
        owned = not self._owner or self._normalized(found.distribution) == self._owner
        return found.name == self._op and owned
