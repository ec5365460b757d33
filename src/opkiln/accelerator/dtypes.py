"""Which floating-point types a device computes with."""

from __future__ import annotations

from opkiln.accelerator.identity import Identity

TYPE_CHECKING = False
if TYPE_CHECKING:
    import torch


class Dtypes(Identity):
    """Asked of the current device, where its kinds differ."""

    def is_bf16_supported(self) -> bool:
        """Whether the device has bfloat16 arithmetic."""
        supported = getattr(self.module(), "is_bf16_supported", None)
        return True if supported is None else bool(supported())

    def is_fp16_supported(self) -> bool:
        """Whether the device has half-precision arithmetic at full speed."""
        return True

    def is_fp8_supported(self) -> bool:
        """Whether the device multiplies matrices of 8-bit floats."""
        return False

    def supported_dtypes(self) -> list[torch.dtype]:
        """float32, and those of float16 and bfloat16 that the device has."""
        import torch

        half = [torch.half] if self.is_fp16_supported() else []
        bfloat16 = [torch.bfloat16] if self.is_bf16_supported() else []
        return [torch.float, *half, *bfloat16]
