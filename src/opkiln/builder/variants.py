"""The libraries of a variant of an op, one for each device; and what is asked of a call's
arguments."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from opkiln.base import forks
from opkiln.builder.base import backend_of
from opkiln.decision import terms
from opkiln.errors import FallbackWarning, LoadError, warn_caller
from opkiln.loading.here import here
from opkiln.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from opkiln.builder.base import OpBuilder
    from opkiln.loading.here import Loaded


class Variant:
    """What an op is for one combination of the values of its parameters: a library for each
    device."""

    def __init__(
        self,
        builder: type[OpBuilder],
        compare: Callable[..., Any],
        reference: Callable[..., Any],
    ) -> None:
        self._builder, self._compare, self._reference = builder, compare, reference
        # For messages. The parts of an op, and its libraries for dtypes, are not users' concern.
        self._op = builder.NAME.partition("__")[0] or builder.NAME
        self._lock = forks.lock()
        self.overload: Any = None  # what a call is passed on to once its library is loaded
        self.native: Any = None  # the overload that only libraries implement, to compare with

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = device_of(args, kwargs)
        if (self._builder, device) not in here.served and device != "meta":
            loaded = self.load(device)
            if loaded is not None and loaded.artifact is not None and self.native is None:
                return self.overload(*args, **kwargs)
        if self.native is not None and self.is_native(device):
            return self._compare(self.native, args, kwargs)
        return self._reference(*args, **kwargs)

    def is_native(self, device: str) -> bool:
        """Whether a library serves this device."""
        loaded = here.served.get((self._builder, device))
        return loaded is not None and loaded.artifact is not None

    def load(self, device: str) -> Loaded | None:
        """What serves the tensors of a device; None if the op has no sources for it. Raises
        OpkilnError."""
        with self._lock:
            place, served = (self._builder, device), here.served
            if place in served:
                return served[place]
            loaded = None
            if backend_of(self._builder, device) is not None:
                loaded = self.builder_of(device).loaded()
            elif settings.mode != terms.REFERENCE:
                what, why = f"reference on {device}", self._sources_in_words()
                require_allowed(self._op, what, why)
                told = f"op {self._op} runs as its pure-PyTorch {what}: {why}"
                warn_caller(told, FallbackWarning)
            served[place] = loaded
            return loaded

    def require_native(self, device: str) -> None:
        """Load the library for a device. Raises LoadError if there is none."""
        loaded = self.load(device)
        if loaded is None:
            raise LoadError(
                f"op {self._op} has no native version for {device}", why=self._sources_in_words()
            )
        if loaded.artifact is None:
            why = "\n".join(loaded.trace.refusals())
            raise LoadError(f"op {self._op}: its reference serves {device}", why=why)

    def reload(self) -> None:
        """Look at the sources of what is loaded again. Raises OpkilnError."""
        with self._lock:
            for (builder, device), loaded in list(here.served.items()):
                if builder is self._builder and loaded is not None:
                    here.served[builder, device] = self.builder_of(device).loaded(reload=True)

    def builder_of(self, device: str) -> OpBuilder:
        """The builder of the library for a device."""
        return self._builder.for_device(device)

    def _sources_in_words(self) -> str:
        return f"it has sources for {', '.join(self._builder.BACKENDS)} alone"


def require_allowed(op: str, what: str, why: str) -> None:
    if settings.mode == terms.NATIVE:
        raise LoadError(
            f"op {op} would run as its {what}: {why}",
            why="OPKILN_MODE=native: a native version is required",
            hint="OPKILN_MODE=auto    # the reference runs, with a warning",
        )


def device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The device that torch runs an op on: one of its tensors', the CPU only if all are there."""
    kinds = (each.device.type for each in tensors(args, kwargs))
    return next((kind for kind in kinds if kind != "cpu"), "cpu")


def add_defaults(
    schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with those that torch leaves out because they have their default values."""
    plain = [each for each in schema.arguments if not each.kwarg_only]
    rest = tuple(each.default_value for each in plain[len(args) :])
    named = {each.name: kwargs.get(each.name, each.default_value)
             for each in schema.arguments if each.kwarg_only}  # fmt: skip
    return (*args, *rest), named


def tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors among the arguments, in order, also those in lists."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(value, {})


@contextlib.contextmanager
def autocast_off(given: Sequence[Tensor]) -> Iterator[None]:
    """Autocast off, as it is in a kernel: a kernel computes in the dtypes that it is given."""
    device = next((each.device.type for each in given if each.device.type != "cpu"), "cpu")
    if device == "meta" or not torch.is_autocast_enabled(device):
        yield
        return
    with torch.autocast(device, enabled=False):
        yield
