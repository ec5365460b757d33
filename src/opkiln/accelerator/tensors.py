"""Tensors: constructors by type, and whether one lies on the device."""

from __future__ import annotations

from functools import partial

from opkiln.accelerator.identity import Identity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class Tensors(Identity):
    """Constructors that put their tensor on the current device."""

    def _constructor(self, dtype: str) -> Callable[..., torch.Tensor]:
        import torch

        return partial(torch.tensor, dtype=getattr(torch, dtype), device=self.device_type)

    @property
    def BFloat16Tensor(self) -> Callable[..., torch.Tensor]:  # noqa: N802 (torch's names)
        """``torch.tensor`` for bfloat16 on the device."""
        return self._constructor("bfloat16")

    @property
    def ByteTensor(self) -> Callable[..., torch.Tensor]:  # noqa: N802
        """``torch.tensor`` for bytes on the device."""
        return self._constructor("uint8")

    @property
    def DoubleTensor(self) -> Callable[..., torch.Tensor]:  # noqa: N802
        """``torch.tensor`` for float64 on the device."""
        return self._constructor("float64")

    @property
    def FloatTensor(self) -> Callable[..., torch.Tensor]:  # noqa: N802
        """``torch.tensor`` for float32 on the device."""
        return self._constructor("float32")

    @property
    def HalfTensor(self) -> Callable[..., torch.Tensor]:  # noqa: N802
        """``torch.tensor`` for float16 on the device."""
        return self._constructor("float16")

    @property
    def IntTensor(self) -> Callable[..., torch.Tensor]:  # noqa: N802
        """``torch.tensor`` for int32 on the device."""
        return self._constructor("int32")

    @property
    def LongTensor(self) -> Callable[..., torch.Tensor]:  # noqa: N802
        """``torch.tensor`` for int64 on the device."""
        return self._constructor("int64")

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on such a device."""
        return tensor.device.type == self.device_type
