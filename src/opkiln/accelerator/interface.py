"""Accelerator: the class that device-neutral code talks to.

The method names are those of DeepSpeed's accelerators, so that code written for those runs. Most
methods call the device's module of torch; a subclass only has what differs.

Another package adds an accelerator with an entry point:

    [project.entry-points."opkiln.accelerators"]
    mydevice = "my_package.accelerator:MyAccelerator"
"""

from __future__ import annotations

from opkiln.accelerator.device import Answer, Device
from opkiln.errors import AcceleratorError
from opkiln.machine.devices import choice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping, Sequence
    from contextlib import AbstractContextManager
    from typing import Any, ClassVar

    from opkiln.builder.base import OpBuilder


__all__ = ["Accelerator", "Answer"]  # what another package's accelerator is made of


def _read_sensor(name: str) -> Callable[..., int | None]:
    def read(self: Accelerator, device_index: int | None = None) -> int | None:
        if not hasattr(self.module(), name):
            return None
        try:
            return int(self._ask(name, device_index))
        except ModuleNotFoundError as error:
            raise AcceleratorError(
                f"torch cannot ask {self.name} for its {name}", why=str(error)
            ) from error

    return read


class Accelerator(Device):
    """The class to subclass. A subclass has at least ``name``, ``device_type`` and ``look()``."""

    COMMUNICATION: ClassVar[str] = "gloo"  # the backend of torch.distributed
    EXPORTED: ClassVar[tuple[str, ...]] = ()  # prefixes of variables that launchers pass on
    VISIBLE: ClassVar[tuple[str, ...]] = ()  # variables that select devices
    COMPILE_BACKEND: ClassVar[str] = "inductor"  # what torch.compile uses
    TRITON: ClassVar[bool] = False  # whether Triton has a backend for such devices
    _RANGES: ClassVar[str] = ""  # the part of its module that has the profiler's ranges

    # Streams, and events that order and time their work

    @property
    def Stream(self) -> Any:  # noqa: N802 (the class itself, as torch names it)
        """The class of streams."""
        return self.module().Stream

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """In the ``with`` block, this is the current stream."""
        context: AbstractContextManager[Any] = self.module().stream(stream)
        return context

    def current_stream(self, device_index: int | None = None) -> Any:
        """The stream that operations go to."""
        return self._ask("current_stream", device_index)

    def default_stream(self, device_index: int | None = None) -> Any:
        """The stream that operations go to unless another one is made current."""
        return self._ask("default_stream", device_index)

    @property
    def Event(self) -> Any:  # noqa: N802
        """The class of events: ``record``, ``synchronize``, ``query``, ``elapsed_time``."""
        return self.module().Event

    # Graphs: work that is recorded once and replayed

    def create_graph(self) -> Any:
        """An empty graph; None if the device, or its module of torch, has no graphs."""
        kind = getattr(self.module(), f"{self.device_type.upper()}Graph", None)
        return None if kind is None else kind()

    def capture_to_graph(
        self, graph: Any, pool: Any = None, stream: Any = None
    ) -> AbstractContextManager[Any]:
        """In the ``with`` block, work is recorded and not executed.

        Raises AcceleratorError if the device has no graphs. Otherwise the block would run, its
        replay would do nothing, and the results would be wrong without an error.
        """
        self._require_graph(graph)
        named = {"pool": pool, "stream": stream}
        given = {name: value for name, value in named.items() if value is not None}
        context: AbstractContextManager[Any] = self.module().graph(graph, **given)
        return context

    def replay_graph(self, graph: Any) -> None:
        """Execute the recorded work. Raises AcceleratorError if the device has no graphs."""
        self._require_graph(graph)
        graph.replay()

    def _require_graph(self, graph: Any) -> None:
        if graph is None:
            raise AcceleratorError(
                f"there are no graphs on {self.name}",
                why="create_graph() returned None: in that case, run the work directly",
            )

    # Profilers. If torch cannot reach the vendor's profiler, ranges do nothing.

    supports_nvtx_domain = False  # whether ranges can be put under a name of their own

    def range_push(
        self,
        msg: str,
        domain: str | None = None,  # noqa: ARG002 (torch's ranges have none)
        category: str | None = None,  # noqa: ARG002
    ) -> None:
        """Begin a range with this name in the profiler's timeline."""
        ranges = self._ranges()
        if ranges is not None:
            ranges.range_push(msg)

    def range_pop(self, domain: str | None = None) -> None:  # noqa: ARG002
        """End the latest range."""
        ranges = self._ranges()
        if ranges is not None:
            ranges.range_pop()

    def _ranges(self) -> Any:
        """The module that has ``range_push`` and ``range_pop``; None if there is none."""
        return getattr(self.module(), self._RANGES, None) if self._RANGES else None

    # Sensors

    # None if torch cannot ask. They raise AcceleratorError if torch needs a package for it that is
    # not installed.
    temperature = _read_sensor("temperature")  # Degrees Celsius
    power_draw = _read_sensor("power_draw")  # Milliwatts
    utilization = _read_sensor("utilization")  # Percent of the time in which the device was busy
    clock_rate = _read_sensor("clock_rate")  # Megahertz

    # Launchers. Nothing here reads or writes this process's environment.

    def communication_backend_name(self) -> str:
        """The backend of ``torch.distributed`` for this device: ``nccl``."""
        return self.COMMUNICATION

    def communication_backend_version(self) -> tuple[int, ...] | None:
        """The version of that backend's library; None if torch cannot ask."""
        return None

    def export_envs(self) -> list[str]:
        """Prefixes of the variables that a launcher passes on to other machines."""
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
        """Use another backend. Raises AcceleratorError if torch has none of this name."""
        import torch._dynamo

        known = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known:
            raise AcceleratorError(
                f"torch.compile has no backend {backend!r}", why="it has: " + ", ".join(known)
            )
        self._compile_backend = backend

    def is_triton_supported(self) -> bool:
        """Whether Triton is installed and compiles for the current device."""
        return self.TRITON and choice.has_package("triton")

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
        from opkiln.builder.registry import ALL_OPS  # only code that asks for ops needs it

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
        backend = choice.find_backend(self.name, builder.BACKENDS)
        return builder() if backend is None else builder(backend=backend)

    def build_extension(self) -> Any:
        """The ``build_ext`` command that compiles the result of an op's ``builder()``."""
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension


def itt() -> Any:
    """The ranges of Intel's profilers, for a CPU or GPU; None if torch is built without them."""
    import torch.profiler

    ranges: Any = torch.profiler.itt
    return ranges if ranges.is_available() else None
