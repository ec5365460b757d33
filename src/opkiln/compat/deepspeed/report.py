"""What ``ds_report`` says of opkiln: its table is of DeepSpeed's own builds, which do not serve."""

from __future__ import annotations

import sys
from typing import Any

import opkiln
from opkiln.compat.deepspeed import patch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

_WORDS = {
    patch.OPS: "opkiln's own kernels",
    patch.ENGINE: "DeepSpeed's sources, built by opkiln",
    patch.DEEPSPEED: "left to DeepSpeed",
}


def replacements(module: ModuleType) -> Iterator[tuple[Any, str, Any]]:
    """As ``hook.PARTS`` says, for ``deepspeed.env_report``."""
    yield module, "debug_report", _telling(module, module.debug_report)


def _telling(module: ModuleType, original: Callable[[], None]) -> Callable[[], None]:
    def debug_report() -> None:
        original()
        origins = {name: patch.origin_of(each) for name, each in module.ALL_OPS.items()}
        lines = ["-" * 50, f"opkiln {opkiln.__version__} loads DeepSpeed's ops in this process:"]
        for origin, words in _WORDS.items():
            if names := [name for name, found in origins.items() if found == origin]:
                lines.append(f"{words}: {', '.join(names)}")
        lines.append("opkiln report says what is cached, and opkiln explain OP why")
        sys.stdout.write("\n".join(lines) + "\n")

    return debug_report
