"""The records of a run: a Sample of repeats, and the Row of the table that shows it."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple


class Sample(NamedTuple):
    """Repeats of one figure, in ``unit``; never empty."""

    values: tuple[float, ...]
    unit: str

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)


class Bar(NamedTuple):
    """What a figure has to stay at or under, and how it reads in the table."""

    limit: float
    value: float  # what is held against the limit: a ratio, or a time in the row's unit
    text: str

    @property
    def met(self) -> bool:
        return self.value <= self.limit


class Row(NamedTuple):
    """One line of the table. A row without a sample says in ``note`` why there is none."""

    measure: str
    who: str  # opkiln, torch cpp_extension, tvm-ffi, DeepSpeed, floor, ...
    what: str
    sample: Sample | None
    note: str = ""
    ratio: float | None = None  # opkiln's median / this one's: under 1, opkiln takes less
    bar: Bar | None = None
    details: Mapping[str, Any] = MappingProxyType({})

    def as_json(self) -> dict[str, Any]:
        """The row for the results file."""
        record: dict[str, Any] = {"measure": self.measure, "who": self.who, "what": self.what}
        if self.sample is not None:
            record |= {
                "unit": self.sample.unit,
                "median": self.sample.median,
                "low": self.sample.low,
                "high": self.sample.high,
                "repeats": len(self.sample.values),
                "values": list(self.sample.values),
            }
        if self.ratio is not None:
            record["opkiln_ratio"] = self.ratio
        if self.bar is not None:
            record["bar"] = {**self.bar._asdict(), "met": self.bar.met}
        if self.note:
            record["note"] = self.note
        if self.details:
            record["details"] = dict(self.details)
        return record


class Failure(Exception):
    """A variant could not be measured; its text is the reason that the table shows."""
