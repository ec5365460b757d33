"""AddressSanitizer and UndefinedBehaviorSanitizer, in all that a test run compiles for the CPU.

``make test-sanitize`` switches them on. Their runtimes must be loaded before Python itself, so it
starts the run with them preloaded.
"""

from __future__ import annotations

FLAGS = (
    "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1",
)  # fmt: skip
LINK_FLAGS = ("-fsanitize=address,undefined",)

_on = False


def switch_on() -> None:
    """From now on, for this process."""
    global _on
    _on = True


def flags() -> tuple[str, ...]:
    """What a compile and a link of a test's own get more: nothing, unless they are on."""
    return FLAGS if _on else ()


def variables() -> dict[str, str]:
    """The variables by which an op is built so."""
    if not _on:
        return {}
    return {"OPKILN_CXXFLAGS": " ".join(FLAGS), "OPKILN_LDFLAGS": " ".join(LINK_FLAGS)}
