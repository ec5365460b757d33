"""Accelerator: the class that device-neutral code talks to.

The method names are those of DeepSpeed's accelerators, so that code written for those runs. Most
methods call the device's module of torch; a subclass only has what differs.

Another package adds an accelerator with an entry point:

    [project.entry-points."opkiln.accelerators"]
    mydevice = "my_package.accelerator:MyAccelerator"
"""

from __future__ import annotations

from opkiln.accelerator.device import Answer
from opkiln.accelerator.memory import Memory
from opkiln.accelerator.streams import Streams
from opkiln.devices import choice, installed
from opkiln.errors import AcceleratorError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping, Sequence
    from typing import Any, ClassVar

    from opkiln.builder.base import OpBuilder


__all__ = ["Accelerator", "Answer"]  # what another package's accelerator is made of


class Accelerator(Memory, Streams):
    """What others subclass. A subclass has at least ``name``, ``device_type`` and ``look()``."""

    COMMUNICATION: ClassVar[str] = "gloo"  # the backend of torch.distributed
    EXPORTED: ClassVar[tuple[str, ...]] = ()  # beginnings of variables' names
    VISIBLE: ClassVar[tuple[str, ...]] = ()  # variables that select devices
    COMPILE_BACKEND: ClassVar[str] = "inductor"  # what torch.compile uses
    TRITON: ClassVar[bool] = False  # whether Triton has a backend for such devices

    # Launchers. Nothing here reads or writes this process's environment.

    def communication_backend_name(self) -> str:
        """The backend of ``torch.distributed`` for this device: ``nccl``."""
        return self.COMMUNICATION

    def communication_backend_version(self) -> tuple[int, ...] | None:
        """The version of that backend's library; None if torch cannot ask."""
        return None

    def export_envs(self) -> list[str]:
        """Beginnings of the variables' names that a launcher passes on to other machines."""
        return list(self.EXPORTED)

    def visible_devices_envs(self) -> list[str]:
        """The variables that say which devices a process may use."""
        return list(self.VISIBLE)

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Sequence[int | str]
    ) -> None:
        """Select these devices in an environment that is being made for a child."""
        for name in self.VISIBLE:
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        """Call this once the device is initialized: now, if it is or if it need not be."""
        queue = getattr(self.module(), "_lazy_call", None)
        if queue is None:
            callback()
        else:
            queue(callback)

    # torch.compile, Triton, mixed precision

    _compile_backend = ""  # of this object; nothing in torch is changed

    def get_compile_backend(self) -> str:
        """The ``backend`` for ``torch.compile``."""
        return self._compile_backend or self.COMPILE_BACKEND

    def set_compile_backend(self, backend: str) -> None:
        """Use another one. Raises AcceleratorError if torch has none of this name."""
        import torch._dynamo

        known = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known:
            raise AcceleratorError(
                f"torch.compile has no backend {backend!r}", why="it has: " + ", ".join(known)
            )
        self._compile_backend = backend

    def is_triton_supported(self) -> bool:
        """Whether Triton is installed and compiles for the current device."""
        return self.TRITON and installed.has_package("triton")

    def prefer_triton_grouped_mm(self) -> bool:
        """Whether a grouped matrix product is faster in Triton than in torch."""
        return False

    def amp(self) -> Any:
        """The device's module of automatic mixed precision; None if it has none of its own."""
        return getattr(self.module(), "amp", None)

    # Op builders. An op declares the accelerators that it serves: ``BACKENDS`` in its folder.

    def op_builder_dir(self) -> str:
        """The package that holds the bundled ops, one folder each."""
        return "opkiln.ops"

    def get_op_builder(self, class_name: str) -> type[OpBuilder] | None:
        """The builder class of an op, by the op's name (``fused_adam``) or by its own; None for an
        unknown name."""
        from opkiln.registry import ALL_OPS  # only code that asks for ops needs it

        if class_name in ALL_OPS:
            return ALL_OPS[class_name]
        named = (builder for builder in ALL_OPS.values() if builder.__name__ == class_name)
        return next(named, None)

    def create_op_builder(self, class_name: str) -> OpBuilder | None:
        """A builder of an op for this accelerator; None for an unknown name.

        If the op has no version for this accelerator, the builder is for its CPU version, if it has
        one. Its reference then serves tensors of this device.
        """
        builder = self.get_op_builder(class_name)
        if builder is None:
            return None
        backend = choice.serving(self.name, builder.BACKENDS)
        return builder() if backend is None else builder(backend=backend)

    def build_extension(self) -> Any:
        """The ``build_ext`` command that compiles the result of an op's ``builder()``."""
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension
