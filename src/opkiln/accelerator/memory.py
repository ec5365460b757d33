"""What an accelerator's memory holds: its use in bytes, pinned memory, tensors, random states."""

from __future__ import annotations

from functools import partial

from opkiln.accelerator.device import Device

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    import torch


class TensorConstructor:
    """``torch.tensor`` for a dtype on the device."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype

    def __get__(self, _: object, owner: type[Device]) -> Callable[..., torch.Tensor]:
        import torch

        return partial(torch.tensor, dtype=getattr(torch, self._dtype), device=owner.device_type)


class Memory(Device):
    """The allocator of a device, constructors of tensors, and random number generators."""

    def empty_cache(self) -> None:
        """Return memory that the allocator caches and nobody uses."""
        self.module().empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes that tensors use."""
        return int(self._ask("memory_allocated", device_index))

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The peak of ``memory_allocated`` since the start or the last reset."""
        return int(self._ask("max_memory_allocated", device_index))

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes that the allocator holds, used or not."""
        return int(self._ask("memory_reserved", device_index))

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """The peak of ``memory_reserved`` since the start or the last reset."""
        return int(self._ask("max_memory_reserved", device_index))

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """All counters of the allocator, by torch's names."""
        return dict(self._ask("memory_stats", device_index))

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Start all peaks anew."""
        self._ask("reset_peak_memory_stats", device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        """The size of the device's memory in bytes."""
        return int(self.get_device_properties(device_index).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        """Free bytes on the device. If its driver does not say, the total less what this process
        has allocated."""
        index = self._index(device_index)
        info = getattr(self.module(), "mem_get_info", None)
        if info is not None:
            return int(info(index)[0])
        return self.total_memory(index) - self.memory_allocated(index)

    # Older names: torch used to say "cached", and had one reset per peak.

    def memory_cached(self, device_index: int | None = None) -> int:
        """``memory_reserved`` by its older name."""
        return self.memory_reserved(device_index)

    def max_memory_cached(self, device_index: int | None = None) -> int:
        """``max_memory_reserved`` by its older name."""
        return self.max_memory_reserved(device_index)

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        """``reset_peak_memory_stats``: torch resets all peaks together."""
        self.reset_peak_memory_stats(device_index)

    def reset_max_memory_cached(self, device_index: int | None = None) -> None:
        """``reset_peak_memory_stats``: torch resets all peaks together."""
        self.reset_peak_memory_stats(device_index)

    # Pinned memory of the host

    def pin_memory(
        self,
        tensor: torch.Tensor,
        align_bytes: int = 1,  # noqa: ARG002 (torch's allocator aligns to pages)
        make_copy: bool = True,  # noqa: ARG002 (it always copies, and keeps the shape)
        match_shape: bool = True,  # noqa: ARG002
    ) -> torch.Tensor:
        """A copy of a CPU tensor in page-locked memory, from which the device copies faster."""
        return tensor.pin_memory()

    def unpin_memory(self, tensor: torch.Tensor) -> None:
        """Does nothing: torch frees the pages with the last tensor on them."""

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in page-locked memory."""
        return tensor.is_pinned()

    # Tensors, constructed on the current device

    BFloat16Tensor = TensorConstructor("bfloat16")  # torch.tensor for bfloat16 on the device
    ByteTensor = TensorConstructor("uint8")  # torch.tensor for bytes on the device
    DoubleTensor = TensorConstructor("float64")  # torch.tensor for float64 on the device
    FloatTensor = TensorConstructor("float32")  # torch.tensor for float32 on the device
    HalfTensor = TensorConstructor("float16")  # torch.tensor for float16 on the device
    IntTensor = TensorConstructor("int32")  # torch.tensor for int32 on the device
    LongTensor = TensorConstructor("int64")  # torch.tensor for int64 on the device

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on such a device."""
        return tensor.device.type == self.device_type

    # Random numbers

    def _generators(self) -> Any:
        """The module that has the functions below."""
        return self.module()

    def random(self) -> ModuleType:
        """``torch.random``."""
        import torch

        return torch.random

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Restore a state from ``get_rng_state``."""
        self._ask("set_rng_state", device_index, new_state, of=self._generators())

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """The state of a device's generator, a tensor of bytes."""
        state: torch.Tensor = self._ask("get_rng_state", device_index, of=self._generators())
        return state

    def manual_seed(self, seed: int) -> None:
        """Seed the current device's generator."""
        self._generators().manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices."""
        self._generators().manual_seed_all(seed)

    def initial_seed(self) -> int:
        """The seed of the current device's generator."""
        return int(self._generators().initial_seed())

    def default_generator(self, device_index: int) -> torch.Generator:
        """A device's generator."""
        module = self._generators()
        if not module.default_generators and hasattr(module, "init"):
            module.init()  # torch makes them along with the first context
        generator: torch.Generator = module.default_generators[device_index]
        return generator
