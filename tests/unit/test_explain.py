"""What changed since an op was last built, in words."""

from __future__ import annotations

from opkiln.loading.explain import difference


def test_what_differs_between_two_builds_is_named() -> None:
    gcc = {"version": "12.2", "digest": "a"}
    before = {
        "spec": {"sources": ["a.cpp"]}, "target": {"archs": []}, "toolchain": {"gcc": gcc},
        "steps": [["-O2", "-fold"], ["-shared"]],
    }  # fmt: skip
    assert difference(before, before) == []
    assert difference(before, {**before, "steps": [["-O2", "-fnew"], ["-shared"]]}) == [
        "flag -fnew is new", "flag -fold is gone",
    ]  # fmt: skip
    after = {
        "spec": {"sources": ("a.cpp", "b.cpp")}, "target": {"archs": ("9.0a",)},
        "toolchain": {"gcc": {**gcc, "digest": "b"}, "nvcc": {"version": "13.0"}}, "steps": [],
    }  # fmt: skip
    assert difference(before, after) == [
        "spec sources: a.cpp -> a.cpp b.cpp", "target archs: none -> 9.0a",
        "compiler gcc: 12.2, but its programs are others now", "compiler nvcc: none -> 13.0",
    ]  # fmt: skip
