"""A package with one native op."""

from opkiln import OpBuilder


class ScaledAddBuilder(OpBuilder):
    NAME = "scaled_add"
    SCHEMAS = ("scaled_add(Tensor x, Tensor y, float scale) -> Tensor",)

    def sources(self):
        return ["scaled_add.cpp"]

    def reference(self):
        from first_op import reference

        return reference

    def fake(self):
        from first_op import fake

        return fake

    def autograd(self):
        from first_op import gradients

        return gradients


def scaled_add(x, y, scale):
    """x + scale * y"""
    return ScaledAddBuilder.functions().scaled_add(x, y, scale)
