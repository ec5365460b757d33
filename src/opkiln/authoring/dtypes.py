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
from opkiln.authoring.entrance import Entrance, Refusals, device_of
from opkiln.authoring.gradient import tensors, without_autocast
from opkiln.authoring.registration import lock
from opkiln.errors import LoadError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from opkiln.authoring.builders import DecoratedBuilder
    from opkiln.authoring.entrance import Served
    from opkiln.authoring.parameters import Value
    from opkiln.authoring.registration import Defined


class Dtypes:
    """The entrances of an op's libraries."""

    def __init__(
        self,
        builder: type[DecoratedBuilder],
        reference: Callable[..., Any],
        defined: Defined,
        served: Callable[[str], Served],
    ) -> None:
        """``served`` gives what is loaded of the library for a dtype."""
        self._builder, self._reference, self._defined = builder, reference, defined
        self._served = served
        self._entrances: dict[str, Entrance] = {}
        self.refusals = Refusals(defined.name)
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
            self.refusals.add(unserved_because)
            return self.reference(*args, **kwargs)
        entrance = self._chosen(args, kwargs)
        if entrance is not None and entrance.is_native(device_of(args, kwargs)):
            return entrance.overload(*args, **kwargs)  # another thread has just loaded it
        return (entrance or self.reference)(*args, **kwargs)

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """The reference, in the dtypes that it is given."""
        with without_autocast(tuple(tensors(args, kwargs))):
            return self._reference(*args, **kwargs)

    def matching(self, wanted: Mapping[str, Value]) -> list[Entrance]:
        """The entrances of the dtypes that have these values. Raises SpecError if there is none."""
        return [self._entrance(str(each)) for (each,) in self._builder.PARAMETERS.matching(wanted)]

    def load_native(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entrance:
        """The entrance for a call, with its library loaded. Raises LoadError if there is none."""
        dtype = self._dtype_of(args, kwargs)
        if dtype not in self._builder.PARAMETERS.dtypes:
            raise LoadError(f"op {self._defined.name}: {self._why(dtype)}")
        return self._entrance(dtype).load_native(args, kwargs)

    def reload(self) -> None:
        """Look at the sources of what is loaded again. Raises OpkilnError."""
        for each in list(self._entrances.values()):
            each.reload()

    @property
    def notes(self) -> tuple[str, ...]:
        """What calls in this process came to, for explanations."""
        return self.refusals.notes

    def _chosen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entrance | None:
        """The entrance for a call; None if no library is for its dtype: the user is told."""
        dtype = self._dtype_of(args, kwargs)
        if dtype in self._builder.PARAMETERS.dtypes:
            return self._entrance(dtype)
        if device_of(args, kwargs) != "meta":
            self.refusals.add(self._why(dtype))
        return None

    def _entrance(self, dtype: str) -> Entrance:
        with lock:
            found = self._entrances.get(dtype)
            if found is None:
                builder, defined = self._builder.variant((dtype,)), self._defined
                found = Entrance(builder, self._reference, defined.written, self._served(dtype))
                found.overload = defined.overload()
                if NATIVE in self._builder.REGISTRATION.overloads:
                    found.native = defined.overload(NATIVE)
                self._entrances[dtype] = found
            return found

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
