"""Ops as arguments."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import click


def complete(_context: click.Context, _argument: click.Parameter, incomplete: str) -> list[str]:
    """Every op, bundled or of another package, that begins so; for the shell's completion."""
    from opkiln.registry import ALL_OPS

    return [name for name in ALL_OPS if name.startswith(incomplete)]
