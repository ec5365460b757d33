"""The seal: from now on nothing may compile. Set after warm-up, before serving."""

from __future__ import annotations

import warnings

from opkiln.errors import CompilingOff, FallbackWarning, SealedError, UsageError
from opkiln.model import CALL
from opkiln.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.model import OpSpec

SPARED = "OPKILN_JIT=needed: what has a reference is not compiled here"

_mode = "off"


def seal(mode: str = "error") -> None:
    """A compile from now on is an error, or a warning with ``"warn"``; ``"off"`` lifts it.

    An error also for an op that has a reference: a server that was warmed up should not find out
    by its latency that an op fell back.
    """
    global _mode
    if mode not in ("warn", "error", "off"):
        raise UsageError(f"seal({mode!r}): expected 'warn', 'error' or 'off'")
    _mode = mode


def sealed() -> bool:
    """Whether a compile is an error, whatever could serve instead."""
    return _in_force() == "error"


def why_not_compile() -> str:
    """The reason for which nothing may compile here; empty when it may."""
    if sealed():
        return "opkiln is sealed: nothing may compile any more"
    if not settings.jit:
        if settings.jit is None:
            return SPARED
        return "OPKILN_JIT=off: nothing is compiled here"
    return ""


def about_to_compile(spec: OpSpec) -> None:
    """Called before the first compile of an op. Raises CompilingOff, SealedError."""
    op, reason = spec.name, why_not_compile()
    if reason:
        kind = SealedError if sealed() else CompilingOff
        raise kind(f"op {op} would have to be compiled", why=reason, hint=_hint(spec))
    if _in_force() == "warn":
        warnings.warn(
            f"op {op} is compiled after opkiln was sealed\nhint: {_hint(spec)}",
            FallbackWarning,
            stacklevel=2,
        )


def _hint(spec: OpSpec) -> str:
    """How to have it compiled, where a variable that is set here does not forbid that, too."""
    allowed = ""
    if _mode == "off" and settings.seal != "off":
        allowed = "OPKILN_SEAL=off"
    elif not sealed() and settings.jit is False:
        allowed = "OPKILN_JIT=on"
    if spec.declared_by == CALL:  # no command knows it
        how = f" with {allowed}" if allowed else ""
        return f"run it once{how} before; later runs find it in the cache"
    return f"{allowed} opkiln build {spec.name}".lstrip()


def _in_force() -> str:
    return _mode if _mode != "off" else str(settings.seal)
