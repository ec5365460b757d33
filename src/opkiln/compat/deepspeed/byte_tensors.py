"""DeepSpeed's module ``utils``: tensors as bytes, and lists of tensors as one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from opkiln.compat.deepspeed.modules import OpModule

if TYPE_CHECKING:
    from collections.abc import Sequence


class ByteTensors(OpModule):
    """``utils``. ``flatten`` and ``unflatten`` are those of earlier DeepSpeeds."""

    NAME = "utils"

    def cast_to_byte_tensor(self, src_tensor: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
        """A tensor's memory as bytes, in one dimension; of each, for several. Nothing is copied."""
        from opkiln.ops.utils.flatten import byte_view

        if isinstance(src_tensor, Tensor):
            # DeepSpeed gives what has a byte or none back as it is.
            return src_tensor if src_tensor.nbytes <= 1 else byte_view(src_tensor)
        return [tensor if tensor.nbytes <= 1 else byte_view(tensor) for tensor in src_tensor]

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """A new tensor of one dimension with the elements of all."""
        from opkiln.ops.utils.flatten import flatten

        return flatten(tensors)

    def unflatten(self, flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Views of ``flat`` with the shapes of the tensors."""
        from opkiln.ops.utils.flatten import unflatten

        return unflatten(flat, tensors)
