"""Answers as people and programs read them: columns, sizes, ages, optional colour; plain values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

from opkiln.errors import OpkilnError

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_CODES = {"good": "32", "bad": "31", "weak": "2", "strong": "1"}


def paint(text: str, look: str) -> str:
    """``text`` as good, bad, weak or strong; unchanged without a look. The command line removes the
    colour where nobody sees it."""
    return f"\x1b[{_CODES[look]}m{text}\x1b[0m" if text and look else text


def columns(rows: Iterable[Sequence[str]], *, indent: int = 0, width: int | None = None) -> str:
    """Rows as aligned columns, two spaces apart. The last column is not padded.

    With a ``width``, long text of the last column is wrapped: below its own column or, if that
    would be too narrow to read, further left.
    """
    table = [list(row) for row in rows]
    widths = [max(map(_width, column)) for column in zip_longest(*table, fillvalue="")]
    lines = []
    for row in table:
        cells = [
            cell + " " * (room - _width(cell)) for cell, room in zip(row, widths, strict=False)
        ]
        line = (" " * indent + "  ".join(cells)).rstrip()
        if width is not None and _width(line) > width and row:
            before = " " * indent + "".join(f"{cell}  " for cell in cells[:-1])
            lines += _fold(before, row[-1], width, indent)
        else:
            lines.append(line)
    return "\n".join(lines)


_NARROW = 24  # characters: the least width of a readable column


def _fold(before: str, last: str, width: int, indent: int) -> list[str]:
    import textwrap

    lines: list[str] = []
    start = _width(before)
    if width - start < _NARROW:
        lines, start = ([before.rstrip()] if before.strip() else []), indent + 2
    # Colour codes have no width, and each line of the text needs its own.
    codes = _ANSI.findall(last)
    plain = _ANSI.sub("", last)
    if not plain.strip():
        return [before.rstrip()]
    parts = textwrap.wrap(plain, max(_NARROW, width - start), break_on_hyphens=False,
                          break_long_words=False) or [""]  # fmt: skip
    painted = [f"{codes[0]}{part}{codes[-1]}" if codes else part for part in parts]
    head = before if not lines and before.strip() else " " * start
    return [*lines, head + painted[0], *(" " * start + part for part in painted[1:])]


def _width(cell: str) -> int:
    return len(_ANSI.sub("", cell))


def count(number: int, noun: str, plural: str = "") -> str:
    """``1 op``, ``2 ops``; ``plural`` if that is not regular."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"


def size(bytes_: int) -> str:
    """A number of bytes for people: ``412 B``, ``84.3 KiB``, ``1.2 GiB``."""
    value = float(bytes_)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{bytes_} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def age(seconds: float) -> str:
    """A length of time in its largest useful unit: ``40 s``, ``3 h``, ``12 d``."""
    for limit, divisor, unit in ((90, 1, "s"), (5400, 60, "min"), (129600, 3600, "h")):
        if seconds < limit:
            return f"{max(0, seconds) / divisor:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def duration(seconds: float) -> str:
    """``1.3 ms``, ``2.41 s``."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


# For programs


def plain(value: Any) -> Any:
    """``value`` as JSON has it: records and errors become dictionaries, and tuples lists."""
    if isinstance(value, OpkilnError):
        return {"kind": type(value).__name__, **fields(value, "what why hint exit_code")}
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def fields(record: Any, names: str) -> dict[str, Any]:
    """Some fields of a record, as ``plain`` has them. ``names`` are separated by spaces."""
    return {name: plain(getattr(record, name)) for name in names.split()}
