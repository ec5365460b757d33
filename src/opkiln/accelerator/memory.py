"""What an accelerator's memory holds: its use in bytes, pinned memory, tensors, random states."""

from __future__ import annotations

from functools import partial

from opkiln.accelerator.device import Device, asking, same_as

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    import torch


class _Constructor:
    """``torch.tensor`` for a dtype on the device."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype

    def __get__(self, _: object, owner: type[Device]) -> Callable[..., torch.Tensor]:
        import torch

        return partial(torch.tensor, dtype=getattr(torch, self._dtype), device=owner.device_type)


class Memory(Device):
    """The allocator of a device, constructors of tensors, and random number generators."""

    empty_cache = asking("empty_cache")  # returns memory that the allocator caches and nobody uses
    memory_allocated = asking("memory_allocated", int)  # bytes that tensors use
    # The peak of ``memory_allocated`` since the start or the last reset.
    max_memory_allocated = asking("max_memory_allocated", int)
    memory_reserved = asking("memory_reserved", int)  # bytes that the allocator holds, used or not
    # The peak of ``memory_reserved`` since the start or the last reset.
    max_memory_reserved = asking("max_memory_reserved", int)
    memory_stats = asking("memory_stats", dict)  # all counters of the allocator, by torch's names
    reset_peak_memory_stats = asking("reset_peak_memory_stats")  # starts all peaks anew

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
        return self.total_memory(index) - int(self.memory_allocated(index))

    # Older names: torch used to say "cached", and had one reset per peak.

    memory_cached = same_as("memory_reserved")  # ``memory_reserved`` by its older name
    max_memory_cached = same_as("max_memory_reserved")  # ``max_memory_reserved`` by its older name
    # ``reset_peak_memory_stats``: torch resets all peaks together.
    reset_max_memory_allocated = reset_max_memory_cached = same_as("reset_peak_memory_stats")

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

    BFloat16Tensor = _Constructor("bfloat16")  # torch.tensor for bfloat16 on the device
    ByteTensor = _Constructor("uint8")  # torch.tensor for bytes on the device
    DoubleTensor = _Constructor("float64")  # torch.tensor for float64 on the device
    FloatTensor = _Constructor("float32")  # torch.tensor for float32 on the device
    HalfTensor = _Constructor("float16")  # torch.tensor for float16 on the device
    IntTensor = _Constructor("int32")  # torch.tensor for int32 on the device
    LongTensor = _Constructor("int64")  # torch.tensor for int64 on the device

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
