"""An op with a library for each dtype: which one a call goes to.

All of them implement the op itself. torch calls the first that is loaded, and the libraries pass a
call on among themselves (``loading/light.py``), so a dtype costs a call nothing in Python, also in
a compiled graph. A dtype that is not loaded yet arrives here, and so does one that has no library.

The dtype of a call is its ScalarType argument; without one, the dtype of the first argument that is
a floating-point tensor. ``op/registering.h`` has the same rule.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from opkiln import signature
from opkiln.authoring.builders import NATIVE
from opkiln.authoring.entrance import Entrance, Entrances, device_of
from opkiln.errors import LoadError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from opkiln.authoring.builders import DecoratedBuilder
    from opkiln.authoring.entrance import Served
    from opkiln.authoring.parameters import Value
    from opkiln.authoring.registration import Defined


class Dtypes(Entrances):
    """The entrances of an op's libraries, by dtype."""

    def __init__(
        self,
        builder: type[DecoratedBuilder],
        reference: Callable[..., Any],
        defined: Defined,
        served: Callable[[str], Served],
    ) -> None:
        """``served`` gives what is loaded of the library for a dtype."""
        super().__init__(builder, reference, defined.name, defined)
        self._served = served
        arguments = enumerate(signature.arguments(defined.schema))
        listed = [(i, name, signature.canonical(kind)) for i, (kind, name) in arguments]
        scalars = [(i, name) for i, name, kind in listed if kind == "ScalarType"]
        self._deciding = scalars or [
            (i, name) for i, name, kind in listed if kind in ("Tensor", "Tensor(!)")
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        entrance = self._chosen(args, kwargs)
        return (entrance or self.reference)(*args, **kwargs)

    def unserved(self, *args: Any, unserved_because: str, **kwargs: Any) -> Any:
        """Take a call that a kernel does not serve, or one with a dtype that is not loaded: then
        there is no reason."""
        if unserved_because:
            return super().unserved(*args, unserved_because=unserved_because, **kwargs)
        entrance = self._chosen(args, kwargs)
        if entrance is not None and entrance.is_native(device_of(args, kwargs)):
            return entrance.overload(*args, **kwargs)  # another thread has just loaded it
        return (entrance or self.reference)(*args, **kwargs)

    def load_native(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entrance:
        """The entrance for a call, with its library loaded. Raises LoadError if there is none."""
        dtype = self._dtype_of(args, kwargs)
        if dtype not in self._builder.PARAMETERS.dtypes:
            raise LoadError(f"op {self._defined.name}: {self._why(dtype)}")
        return self.entrance((dtype,)).load_native(args, kwargs)

    def _chosen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entrance | None:
        """The entrance for a call; None if no library is for its dtype: the user is told."""
        dtype = self._dtype_of(args, kwargs)
        if dtype in self._builder.PARAMETERS.dtypes:
            return self.entrance((dtype,))
        if device_of(args, kwargs) != "meta":
            self.refuse(self._why(dtype))
        return None

    def _made(self, values: tuple[Value, ...]) -> Entrance:
        served = self._served(str(values[0]))
        made = Entrance(self._builder.variant(values), self._reference, served)
        made.overload = self._defined.overload()
        if NATIVE in self._builder.REGISTRATION.overloads:
            made.native = self._defined.overload(NATIVE)
        return made

    def _dtype_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The dtype of a call, in words; empty if it has none."""
        for place, name in self._deciding:
            value = args[place] if place < len(args) else kwargs.get(name)
            if not isinstance(value, Tensor):
                return str(value).removeprefix("torch.")
            if value.dtype.is_floating_point:
                return str(value.dtype).removeprefix("torch.")
        return ""

    def _why(self, dtype: str) -> str:
        served = ", ".join(self._builder.PARAMETERS.dtypes)
        return f"it has kernels for {served}, not {dtype or 'calls without such a tensor'}"
