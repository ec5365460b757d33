"""The decision trace: every candidate, in order, with its reason."""

from __future__ import annotations

from opkiln.decision.terms import Trace


def test_decisions_keep_their_order_and_read_as_lines() -> None:
    trace = Trace()
    trace.add("store", "refused", "a.h changed", "/cache/x")
    trace.add("build", "taken", "compiled 2 file(s) in 0.5 s")
    assert str(trace).splitlines() == [
        "store     refused  a.h changed  [/cache/x]",
        "build     taken    compiled 2 file(s) in 0.5 s",
    ]


def test_refusals_are_the_reasons_for_which_nothing_native_serves() -> None:
    trace = Trace()
    trace.add("store", "none", "no entry")
    trace.add("store", "refused", "first")
    trace.add("build", "refused", "second")
    trace.add("fallback", "taken", "the reference serves")
    assert trace.refusals() == ["first", "second"]


def test_an_empty_trace_is_empty() -> None:
    assert str(Trace()) == ""
    assert Trace().refusals() == []
