"""Op builders, as code that goes through the accelerator asks for them.

Which op serves which accelerator is declared by the op: ``BACKENDS`` in its folder.
"""

from __future__ import annotations

from importlib import import_module

from opkiln.accelerator.choice import serving
from opkiln.accelerator.identity import Identity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from opkiln.builder.base import OpBuilder


class Builders(Identity):
    """Ops by their names (``fused_adam``) or by the names of their builders' classes."""

    def op_builder_dir(self) -> str:
        """The package that holds the bundled ops, a folder each."""
        return "opkiln.ops"

    def get_op_builder(self, class_name: str) -> type[OpBuilder] | None:
        """An op's builder class; None where no op has this name."""
        # The registry is a layer above: it is looked up when it is asked, never imported from here.
        ops = import_module("opkiln.registry").ALL_OPS
        builder: type[OpBuilder]
        if class_name in ops:
            builder = ops[class_name]
            return builder
        for builder in ops.values():
            if builder.__name__ == class_name:
                return builder
        return None

    def create_op_builder(self, class_name: str) -> OpBuilder | None:
        """A builder of the op's version for this accelerator; None where no op has this name.

        An op without such a version gives its version for the CPU, where it has one: its reference
        serves the tensors of this device.
        """
        builder = self.get_op_builder(class_name)
        if builder is None:
            return None
        backend = serving(self.name, builder.BACKENDS)
        return builder() if backend is None else builder(backend=backend)

    def build_extension(self) -> Any:
        """The ``build_ext`` command that compiles what an op's ``builder()`` gives."""
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension
