"""What a builder of DeepSpeed's loads: the first of the resorts that ``OPKILN_DEEPSPEED`` names."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any, NamedTuple

from opkiln.errors import OpkilnError
from opkiln.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

OPS, ENGINE, DEEPSPEED = "ops", "engine", "deepspeed"

# Where the functions of an op's module are, over an op of opkiln's: a subclass of OpModule.
MODULES = {
    "cpu_adam": "host_optimizers:CPUAdam",
    "cpu_adagrad": "host_optimizers:CPUAdagrad",
    "cpu_lion": "host_optimizers:CPULion",
    "fused_adam": "fused_optimizers:FusedAdam",
    "fused_lion": "fused_optimizers:FusedLion",
    "fused_lamb": "fused_optimizers:FusedLamb",
    "quantizer": "quantizer:Quantizer",
    "utils": "byte_tensors:ByteTensors",
}


class Served(NamedTuple):
    """What serves one of DeepSpeed's ops in this process."""

    module: Any
    origin: str  # ops, engine, deepspeed
    seconds: float  # that it took to load


_served: dict[tuple[type, str], Served] = {}
_chosen: dict[tuple[type, str], tuple[str, ...]] = {}  # under which setting


def served() -> dict[str, Served]:
    """What this process has of DeepSpeed's ops, by name."""
    return {name: found for (_, name), found in _served.items()}


def load(builder: Any, original: Callable[[], Any]) -> Any:
    """The module for a builder; ``original`` is how DeepSpeed itself would load it.

    Raises OpkilnError where opkiln is to serve it and cannot.
    """
    key = (type(builder), str(builder.name))
    resorts = resorts_of(builder.name)
    if key in _served and _chosen.get(key) == resorts:
        return _served[key].module
    begin = time.perf_counter()
    try:
        module, origin = _load(builder, resorts, original)
    except OpkilnError as error:
        builder.error_log = str(error)
        raise
    _served[key] = Served(module, origin, time.perf_counter() - begin)
    _chosen[key] = resorts
    return module


def resorts_of(op: str) -> tuple[str, ...]:
    """Which resorts may serve an op, in their order; none where it is DeepSpeed's own business."""
    chosen: dict[str, tuple[str, ...]] = dict(settings.deepspeed)
    return chosen.get(op, chosen[""])


def _load(builder: Any, resorts: tuple[str, ...], original: Callable[[], Any]) -> tuple[Any, str]:
    if OPS in resorts and _is_deepspeeds(builder) and builder.name in MODULES:
        folder, _, name = MODULES[builder.name].partition(":")
        module = getattr(import_module(f"opkiln.compat.deepspeed.{folder}"), name)
        rest = _by_engine(builder) if resorts_of(builder.name)[-1:] == (ENGINE,) else None
        return module(rest), OPS
    # What DeepSpeed was installed with is as good as what the engine would build of it.
    if ENGINE in resorts and not _is_installed(builder):
        return _by_engine(builder)(), ENGINE
    return original(), DEEPSPEED


def _by_engine(builder: Any) -> Callable[[], Any]:
    def build() -> Any:
        from opkiln.compat.deepspeed import engine

        return engine.load(builder)

    return build


def _is_deepspeeds(builder: Any) -> bool:
    """Whether the builder is one of DeepSpeed's, not another package's with a name of its own."""
    return type(builder).__module__.partition(".")[0] in ("deepspeed", "op_builder")


def _is_installed(builder: Any) -> bool:
    git = import_module("deepspeed.git_version_info")
    here = import_module("deepspeed.accelerator").get_accelerator()._name
    return bool(git.installed_ops.get(builder.name, False)) and git.accelerator_name == here
