"""Where a call arrives that no native kernel takes.

It is an op's implementation for all devices that have no other (CompositeExplicitAutograd). The
first call with a tensor of a device loads the library for that device, whoever makes the call: the
decorated function, ``torch.ops``, a compiled graph, an exported program. The library registers
kernels for its device, so later calls do not come here. Where there is no library, the reference
runs. It also runs for a call that a kernel does not serve: the kernel says why, and passes it here.
"""

from __future__ import annotations

import threading
from typing import Any

from opkiln.authoring.checking import Comparison
from opkiln.authoring.gradient import tensors, without_autocast
from opkiln.builder.base import backend_of
from opkiln.decision import policy
from opkiln.errors import FallbackWarning, LoadError, warn_caller
from opkiln.loading.here import here
from opkiln.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from opkiln.authoring.builders import DecoratedBuilder
    from opkiln.authoring.parameters import Value
    from opkiln.builder.base import OpBuilder
    from opkiln.loading.here import Loaded


_MOST_REASONS = 16  # that are told and kept: a program may call with a thousand sizes


class WithReference:
    """Runs an op's reference for the calls that no kernel serves, and keeps why."""

    def __init__(
        self, builder: type[DecoratedBuilder], reference: Callable[..., Any], name: str
    ) -> None:
        self._builder, self._reference, self._op = builder, reference, name
        self.reasons: dict[str, None] = {}  # why calls in this process ran as the reference
        self.refused = 0  # such calls

    def refuse(self, why: str) -> None:
        """Say, once for each reason, that the reference runs. Raises LoadError where it must not"""
        _require_allowed(self._op, "reference", why)
        self.refused += 1
        if why not in self.reasons and len(self.reasons) < _MOST_REASONS:
            self.reasons[why] = None
            warn_caller(f"op {self._op} runs as its pure-PyTorch reference: {why}", FallbackWarning)

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """The reference, in the dtypes that it is given."""
        with without_autocast(tuple(tensors(args, kwargs))):
            return self._reference(*args, **kwargs)

    def unserved(self, *args: Any, unserved_because: str, **kwargs: Any) -> Any:
        """Take a call that the kernel does not serve."""
        self.refuse(unserved_because)
        return self.reference(*args, **kwargs)

    @property
    def notes(self) -> tuple[str, ...]:
        """What calls in this process came to, for explanations."""
        return tuple(f"the reference ran: {each}" for each in self.reasons)


def _require_allowed(op: str, what: str, why: str) -> None:
    if settings.mode == policy.NATIVE:
        raise LoadError(
            f"op {op} would run as its {what}: {why}",
            why="OPKILN_MODE=native: a native version is required",
            hint="OPKILN_MODE=auto    # the reference runs, with a warning",
        )


class Entrance(WithReference):
    """Loads an op's libraries, and runs its reference."""

    def __init__(self, builder: type[DecoratedBuilder], reference: Callable[..., Any]) -> None:
        super().__init__(builder, reference, reference.__name__)
        # For messages. The parts of an op, and its libraries for dtypes, are not users' concern.
        self._name = builder.NAME.partition("__")[0] or builder.NAME
        self._comparison = Comparison(reference.__name__, reference)
        self._served = builder.SERVED
        self._lock = threading.RLock()
        self.overload: Any = None  # what a call is passed on to once its library is loaded
        self.native: Any = None  # the overload that only libraries implement, to compare with

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = device_of(args, kwargs)
        if (here.era, device) not in self._served and device != "meta":
            loaded = self.load(device)
            if loaded is not None and loaded.artifact is not None and self.native is None:
                return self.overload(*args, **kwargs)
        if self.native is not None and self.is_native(device):
            return self._comparison(self.native, args, kwargs)
        return self.reference(*args, **kwargs)

    def is_native(self, device: str) -> bool:
        """Whether a library serves this device."""
        loaded = self._served.get((here.era, device))
        return loaded is not None and loaded.artifact is not None

    def load(self, device: str) -> Loaded | None:
        """What serves the tensors of a device; None if the op has no sources for it. Raises
        OpkilnError."""
        with self._lock:
            place = (here.era, device)
            if place in self._served:
                return self._served[place]
            loaded = None
            if backend_of(self._builder, device) is not None:
                loaded = self.builder_of(device).loaded()
            elif settings.mode != policy.REFERENCE:
                what, why = f"reference on {device}", self._sources_in_words()
                _require_allowed(self._name, what, why)
                told = f"op {self._name} runs as its pure-PyTorch {what}: {why}"
                warn_caller(told, FallbackWarning)
            self._served[place] = loaded
            return loaded

    def load_native(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entrance:
        """Load the library for the device of these arguments. Raises LoadError if there is none."""
        device = device_of(args, kwargs)
        loaded = self.load(device)
        if loaded is None:
            raise LoadError(
                f"op {self._name} has no native version for {device}",
                why=self._sources_in_words(),
            )
        if loaded.artifact is None:
            why = "\n".join(loaded.trace.refusals())
            raise LoadError(f"op {self._name}: its reference serves {device}", why=why)
        return self

    def matching(self, wanted: Mapping[str, Value]) -> list[Entrance]:
        """This one. An op with variants has several. Raises SpecError if a value is wanted."""
        self._builder.PARAMETERS.matching(wanted)
        return [self]

    def reload(self) -> None:
        """Look at the sources of what is loaded again. Raises OpkilnError."""
        with self._lock:
            for (era, device), loaded in list(self._served.items()):
                if era == here.era and loaded is not None:
                    self._served[era, device] = self.builder_of(device).loaded(reload=True)

    def builder_of(self, device: str) -> OpBuilder:
        """The builder of the library for a device."""
        return self._builder(backend=backend_of(self._builder, device))

    def _sources_in_words(self) -> str:
        return f"it has sources for {', '.join(self._builder.BACKENDS)} alone"


def device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The device that torch runs an op on: one of its tensors', the CPU only if all are there."""
    kinds = (each.device.type for each in tensors(args, kwargs))
    return next((kind for kind in kinds if kind != "cpu"), "cpu")
