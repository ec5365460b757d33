"""The device of an accelerator: its name, its presence, its properties, its types of numbers."""

from __future__ import annotations

from opkiln.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ClassVar

    import torch


class Answer(Record):
    """Whether one accelerator can serve here."""

    name: str  # the accelerator's name, as OPKILN_ACCELERATOR takes it
    present: bool  # whether its device is here
    why: str = ""  # the device that was found, or the reason why there is none


class Device:
    """What the other parts of an accelerator rest on. ``torch.<device_type>`` does the work."""

    name: ClassVar[str] = ""  # in OPKILN_ACCELERATOR and in an op's BACKENDS: "rocm"
    device_type: ClassVar[str] = ""  # torch's word for its devices: "cuda"

    def __init__(self, module: Any = None) -> None:
        """``module`` is used instead of ``torch.<device_type>`` and has the same functions.

        Creates no context and does not import torch.
        """
        self._module = module

    @classmethod
    def look(cls, root: str = "/", *, asked: bool = False) -> Answer:
        """Whether a device is here, and how that is known. Creates no context. Errors of a driver
        or of a vendor's package are not raised; they are in the answer.

        ``root`` is where the system's files are. ``asked`` says that the user requested this
        accelerator by name: then its package may be imported even if no device file is there.
        """
        raise NotImplementedError(f"{cls.__name__} does not say how to look for its device")

    def is_available(self) -> bool:
        """Whether a device is here. Creates no context."""
        return type(self).look(asked=True).present

    def module(self) -> Any:
        """The module of torch that drives the device. Raises what importing it raises."""
        if self._module is None:
            self._module = self._find_module()
        return self._module

    def _find_module(self) -> Any:
        import torch

        return torch.get_device_module(self.device_type)

    def _ask(
        self, function: str, device_index: int | None = None, *given: Any, of: Any = None
    ) -> Any:
        """Call a function of the module, or of a part of it, for one device or for the current."""
        call = getattr(of or self.module(), function)
        # Without an index there is no argument: not every vendor's functions take None.
        return call(*given) if device_index is None else call(*given, device_index)

    @property
    def _name(self) -> str:
        # Code written for DeepSpeed reads this and expects torch's word.
        return self.device_type

    def __repr__(self) -> str:
        return f"<opkiln accelerator {self.name}>"

    # Devices

    def device_name(self, device_index: int | None = None) -> str:
        """``cuda``, or ``cuda:1`` with an index, as ``torch.device`` takes it."""
        return self.device_type if device_index is None else f"{self.device_type}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        """The ``torch.device``."""
        import torch

        return torch.device(self.device_name(device_index))

    def set_device(self, device_index: int) -> None:
        """Make a device the current one of this thread."""
        self.module().set_device(device_index)

    def current_device(self) -> int:
        """The index of the current device."""
        return int(self.module().current_device())

    def current_device_name(self) -> str:
        """The current device, in the form of ``device_name``."""
        return self.device_name(self.current_device())

    def device_count(self) -> int:
        """How many devices this process may use."""
        return int(self.module().device_count())

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait until a device has finished all its work."""
        self._ask("synchronize", device_index)

    def get_device_properties(self, device_index: int | None = None) -> Any:
        """torch's properties of a device: ``name``, ``total_memory`` and the vendor's own."""
        return self.module().get_device_properties(self._index(device_index))

    def get_device_name(self, device_index: int | None = None) -> str:
        """The product's name."""
        return str(self.get_device_properties(device_index).name)

    def _index(self, device_index: int | None) -> int:
        return self.current_device() if device_index is None else device_index

    # How a device behaves

    def is_synchronized_device(self) -> bool:
        """Whether an operation is finished when its call returns."""
        return False

    def use_host_timers(self) -> bool:
        """Whether the host's clock can time an operation, without events."""
        return self.is_synchronized_device()

    def resolves_data_dependency(self) -> bool:
        """Whether work on two streams is ordered by the data that they share."""
        return self.is_synchronized_device()

    def handles_memory_backpressure(self) -> bool:
        """Whether the device waits for memory when the host runs ahead of it."""
        return self.is_synchronized_device()

    # Types of numbers, asked of the current device where models differ

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
        """float32, and float16 and bfloat16 if the device supports them."""
        import torch

        half = [torch.half] if self.is_fp16_supported() else []
        bfloat16 = [torch.bfloat16] if self.is_bf16_supported() else []
        return [torch.float, *half, *bfloat16]
