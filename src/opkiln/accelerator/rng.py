"""Random numbers: states, seeds, generators."""

from __future__ import annotations

from opkiln.accelerator.identity import Identity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    import torch


class Rng(Identity):
    """The generators of the devices."""

    def _generators(self) -> Any:
        """The module that has the functions below."""
        return self.module()

    def random(self) -> ModuleType:
        """``torch.random``."""
        import torch

        return torch.random

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Put a state back that ``get_rng_state`` gave."""
        if device_index is None:
            self._generators().set_rng_state(new_state)
        else:
            self._generators().set_rng_state(new_state, device_index)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """The state of a device's generator, a tensor of bytes."""
        module = self._generators()
        state: torch.Tensor = (
            module.get_rng_state() if device_index is None else module.get_rng_state(device_index)
        )
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
