"""What an accelerator is called, whether it is here, and the module of torch that drives it."""

from __future__ import annotations

from opkiln.accelerator.answer import Answer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ClassVar


class Identity:
    """The ground under every theme: names, presence, ``torch.<device_type>``."""

    name: ClassVar[str] = ""  # in OPKILN_ACCELERATOR and in an op's BACKENDS: "rocm"
    device_type: ClassVar[str] = ""  # torch's word for its devices: "cuda"

    def __init__(self, module: Any = None) -> None:
        """``module`` drives the device in place of ``torch.<device_type>``; it has its functions.

        Makes no context and imports no torch.
        """
        self._module = module

    @classmethod
    def look(cls, root: str = "/", *, asked: bool = False) -> Answer:
        """Whether a device answers here, and how that is known. Makes no context; never raises for
        what a driver or a vendor's package does.

        ``root`` is where the system's files lie. ``asked``: the user has named this accelerator, so
        it is worth importing a package that nothing else speaks for.
        """
        raise NotImplementedError(f"{cls.__name__} does not say how to look for its device")

    def is_available(self) -> bool:
        """Whether a device answers. Makes no context."""
        return type(self).look(asked=True).present

    def module(self) -> Any:
        """The module of torch that drives the device. Raises what importing it raises."""
        if self._module is None:
            self._module = self._find_module()
        return self._module

    def _find_module(self) -> Any:
        import torch

        return torch.get_device_module(self.device_type)

    def _ask(self, function: str, device_index: int | None = None) -> Any:
        """The module's function, of one device or of the current one."""
        # Without an index there is no argument: not every vendor's functions take None.
        call = getattr(self.module(), function)
        return call() if device_index is None else call(device_index)

    @property
    def _name(self) -> str:
        # Code written for DeepSpeed reads it, and means torch's word.
        return self.device_type

    def __repr__(self) -> str:
        return f"<opkiln accelerator {self.name}>"
