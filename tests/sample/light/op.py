"""The declaration of ``light``."""

from __future__ import annotations

from opkiln.builder import OpBuilder


class LightBuilder(OpBuilder):
    """A function for each type that an op may take or return. Those that need no tensor have one,
    because torch finds a function's device by its tensors."""

    NAME = "light"
    SCHEMAS = (
        "who(Tensor t) -> int",
        "scaled_add(Tensor x, Tensor y, float scale) -> Tensor",
        "scale_(Tensor(a!) x, float by) -> ()",
        "scale_each_(Tensor(a!)[] xs, float by) -> ()",
        "maybe_fill_(Tensor t, Tensor(a!)? x, float value) -> bool",
        "sum_all(Tensor[] xs, Tensor? bias=None) -> Tensor",
        "numbers(Tensor t, int i, float f, bool b) -> (int, float, bool)",
        "lists(Tensor t, int[] i, float[] f, bool[] b, str[] s) -> (int[], float[], bool[], str[])",
        (
            "optionals(Tensor t, int? i, float? f, bool? b, str? s, int[]? l) -> "
            "(int?, float?, bool?, str?, int[]?)"
        ),
        "twice(Tensor t, str text) -> str",
        "same_dtype(Tensor t, ScalarType dtype) -> ScalarType",
        "same_device(Tensor t, Device device) -> Device",
        "make(Tensor t, SymInt[] size, ScalarType dtype, Device device) -> Tensor",
        "describe(Tensor x) -> (int[], int[], int, ScalarType, Device, bool)",
        "split(Tensor x) -> (Tensor, Tensor[])",
        "like(Tensor x) -> Tensor",
        "dense(Tensor x) -> Tensor",
        "doubled(Tensor x) -> Tensor",
        "through_torch(Tensor x, int dim) -> Tensor",
        "topk(Tensor x, int k) -> (Tensor, Tensor)",
        "refused_by_torch(Tensor x) -> Tensor",
        "fail_in_part(Tensor t, int at) -> ()",
        "threads(Tensor t) -> int",
        "check(Tensor x, Tensor y, str what) -> ()",
        "item_check(Tensor[] xs) -> ()",
        "unmet(Tensor t, int k) -> ()",
        "standard_error(Tensor t) -> ()",
        "stream(Tensor t) -> ()",
    )

    def sources(self) -> list[str]:
        return ["csrc/light.cpp", "csrc/more.cpp", "csrc/scaled_add.cpp"]
