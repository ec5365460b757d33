"""Whether an op may be compiled here, and whether its reference may serve instead.

``OPKILN_MODE`` says it for a process; ``opkiln.seal()`` forbids compiling from some point on.
"""

from __future__ import annotations

import warnings

from opkiln.errors import CompilingOff, FallbackWarning, SealedError, UsageError
from opkiln.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.decision.terms import Request
    from opkiln.model import OpSpec

# The values of OPKILN_MODE.
AUTO = "auto"  # find it, else compile it, else run the reference and warn
NATIVE = "native"  # as auto, but what would fall back is an error
CACHED = "cached"  # never compile: find it, else run the reference
SEALED = "sealed"  # never compile: find it, else fail
NEEDED = "needed"  # compile only what has no reference
SOURCE = "source"  # as auto, but ignore the libraries that packages were installed with
REFERENCE = "reference"  # run references wherever there are any
CHECK = "check"  # as auto, but run both versions of an op and compare them

_seal = "off"


def seal(mode: str = "error") -> None:
    """A compile from now on is an error, or a warning with ``"warn"``; ``"off"`` lifts it.

    An error also for an op that has a reference: a server that was warmed up should not find out
    by its latency that an op fell back.
    """
    global _seal
    if mode not in ("warn", "error", "off"):
        raise UsageError(f"seal({mode!r}): expected 'warn', 'error' or 'off'")
    _seal = mode


def sealed() -> bool:
    """Whether a compile is an error, whatever could serve instead."""
    return _seal == "error" or settings.mode == SEALED


def uses_installed() -> bool:
    """Whether libraries that packages were installed with may serve."""
    return bool(settings.mode != SOURCE)


def never_compiles() -> str:
    """Why nothing at all may be compiled here; empty where something may be."""
    if _seal == "error":
        return "opkiln is sealed: nothing may be compiled any more"
    if settings.mode in (SEALED, CACHED):
        return f"OPKILN_MODE={settings.mode}: nothing is compiled here"
    return ""


def why_not_compile(request: Request) -> str:
    """Why this op may not be compiled here; empty where it may be."""
    if settings.mode == NEEDED and not why_no_reference(request):
        return "OPKILN_MODE=needed: an op that has a reference is not compiled here"
    return never_compiles()


def why_no_reference(request: Request) -> str:
    """Why the reference must not serve this request; empty where it may."""
    if not request.op.has_reference:
        return "the op has no reference"
    if request.must_be_native:
        return "a native version was asked for"
    if settings.mode == NATIVE:
        return "OPKILN_MODE=native: a native version is required"
    return "opkiln is sealed" if sealed() else ""


NOTHING_TRUSTED = (
    "nothing says what is trusted, as neither OPKILN_TRUSTED_KEYS nor OPKILN_LOCK is set"
)
TRUST_HINT = "export OPKILN_TRUSTED_KEYS=FILE.pub, or OPKILN_LOCK=ops.lock; see docs/remotes.md"


def why_no_tier_is_asked() -> str:
    """Why no remote tier is ever asked, although there are some; empty where they are."""
    trusts = settings.trusted_keys is not None or settings.lock
    return NOTHING_TRUSTED if settings.remotes and not trusts else ""


def prefers_reference(request: Request) -> bool:
    """Whether the reference is to serve although a native version may be there."""
    return bool(settings.mode == REFERENCE) and not why_no_reference(request)


def refusal(spec: OpSpec, reason: str) -> CompilingOff:
    """The error for an op that would have to be compiled."""
    kind = SealedError if sealed() else CompilingOff
    if unasked := why_no_tier_is_asked():
        reason += f"\nno tier of OPKILN_REMOTES was asked: {unasked}"
    return kind(f"op {spec.name} would have to be compiled", why=reason, hint=_hint(spec))


def about_to_compile(spec: OpSpec) -> None:
    """Called before the first compile of an op. Raises SealedError."""
    if sealed():
        raise refusal(spec, never_compiles())
    if _seal == "warn":
        warnings.warn(
            f"op {spec.name} is compiled after opkiln was sealed\nhint: {_hint(spec)}",
            FallbackWarning,
            stacklevel=2,
        )


def _hint(spec: OpSpec) -> str:
    """How to have it compiled, where no variable that is set here forbids that, too."""
    allowed = "" if settings.mode in (AUTO, NATIVE, SOURCE, CHECK) else "OPKILN_MODE=auto"
    if not spec.is_known_by_name:
        how = f" with {allowed}" if allowed else ""
        return f"run it once{how} before; later runs find it in the cache"
    return f"{allowed} opkiln build {spec.name}".lstrip()
