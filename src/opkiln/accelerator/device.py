"""The device of an accelerator: what it is, its types of numbers, memory and random numbers."""

from __future__ import annotations

from functools import partial

from opkiln.base.lazy import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType
    from typing import Any, ClassVar, TypeVar

    import torch

    _T = TypeVar("_T")


class Answer(Record):
    """Says whether one accelerator can serve here, and why."""

    name: str  # the accelerator's name, as OPKILN_ACCELERATOR takes it
    present: bool  # whether its device is here
    why: str = ""  # the device that was found, or the reason why there is none


def ask_for(function: str, kind: Callable[[Any], _T]) -> Callable[..., _T]:
    """A method that calls a function of the device's module, for one device or for the current."""

    def method(self: Device, device_index: int | None = None) -> _T:
        return kind(self._ask(function, device_index))

    return method


def tell(function: str) -> Callable[..., None]:
    """The same without a result."""
    return ask_for(function, lambda _: None)


def older_name_of(name: str) -> Callable[..., Any]:
    """Another name for a method, also for that of a subclass."""
    return lambda self, device_index=None: getattr(self, name)(device_index)


class TensorConstructor:
    """``torch.tensor`` for a dtype on the device."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype

    def __get__(self, _: object, owner: type[Device]) -> Callable[..., torch.Tensor]:
        import torch

        return partial(torch.tensor, dtype=getattr(torch, self._dtype), device=owner.device_type)


class Device:
    """The base of an accelerator: its device, which ``torch.<device_type>`` drives."""

    name: ClassVar[str] = ""  # in OPKILN_ACCELERATOR and in an op's BACKENDS: "rocm"
    device_type: ClassVar[str] = ""  # torch's word for its devices: "cuda"
    # Replacements of functions of its module: the name of another one, or any function, which gets
    # the same arguments.
    _SUBSTITUTES: ClassVar[Mapping[str, str | Callable[..., Any]]] = {}
    _HAS_MEMORY: ClassVar[bool] = True  # of its own; without it, the device reads the host's

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
        call = self._SUBSTITUTES.get(function, function)
        if isinstance(call, str):
            call = getattr(of or self.module(), call)
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

    set_device = tell("set_device")  # Make a device the current one of this thread
    current_device = ask_for("current_device", int)  # The index of the current device

    def current_device_name(self) -> str:
        """The current device, in the form of ``device_name``."""
        return self.device_name(self.current_device())

    def device_count(self) -> int:
        """How many devices this process may use."""
        return int(self.module().device_count())

    synchronize = tell("synchronize")  # Wait until a device has finished all its work

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

    # Memory

    empty_cache = tell("empty_cache")  # Return memory that is cached and nobody uses
    memory_allocated = ask_for("memory_allocated", int)  # Bytes that tensors use
    max_memory_allocated = ask_for("max_memory_allocated", int)  # its peak since the last reset
    memory_reserved = ask_for("memory_reserved", int)  # Bytes that the allocator holds, used or not
    max_memory_reserved = ask_for("max_memory_reserved", int)  # its peak since the last reset
    memory_stats = ask_for("memory_stats", dict)  # All counters of the allocator, by torch's names
    reset_peak_memory_stats = tell("reset_peak_memory_stats")  # Start all peaks anew
    # Older names: torch used to say "cached", and had one reset per peak.
    memory_cached = older_name_of("memory_reserved")  # memory_reserved
    max_memory_cached = older_name_of("max_memory_reserved")  # max_memory_reserved
    reset_max_memory_allocated = older_name_of("reset_peak_memory_stats")  # reset_peak_memory_stats
    reset_max_memory_cached = older_name_of("reset_peak_memory_stats")  # reset_peak_memory_stats

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

    # Pinned memory of the host

    def pin_memory(
        self,
        tensor: torch.Tensor,
        align_bytes: int = 1,  # noqa: ARG002 (torch's allocator aligns to pages)
        make_copy: bool = True,  # noqa: ARG002 (it always copies, and keeps the shape)
        match_shape: bool = True,  # noqa: ARG002
    ) -> torch.Tensor:
        """A copy of a CPU tensor in page-locked memory, from which the device copies faster; the
        tensor itself if the device reads the host's memory."""
        return tensor.pin_memory() if self._HAS_MEMORY else tensor

    def unpin_memory(self, tensor: torch.Tensor) -> None:
        """Do nothing: torch frees the pages with the last tensor on them."""

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
        self._ask("manual_seed", None, seed, of=self._generators())

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices."""
        self._ask("manual_seed_all", None, seed, of=self._generators())

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
