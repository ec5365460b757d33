"""Modules of torch that drive no device: they answer as one would, and note what they are asked.

A stand-in has the names of the module that it stands for and no others, and a call must fit the
signature of the real function, so that code which asks for what is not there fails here, too.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

TOTAL = 64 << 30


class Stream:
    """A stream that nothing goes through."""


class Event:
    """An event that nothing records."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing

    record = synchronize = query = elapsed_time = wait = lambda self, *others: None


class Recorder(ModuleType):
    """``torch.<name>`` with ``devices`` devices. ``like`` is the module it is modelled on;
    ``more`` and ``less`` are the names by which the vendor's differs from it."""

    def __init__(
        self, name: str, like: ModuleType, devices: int = 2, more: str = "", less: str = ""
    ) -> None:
        super().__init__(f"torch.{name}")
        self.calls: list[str] = []
        self._like = like
        self._more = more.split()
        self._less = less.split()
        self._answers = answers(name, devices, self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = name in self._more or (hasattr(self._like, name) and name not in self._less)
        if not known or name not in self._answers:
            raise AttributeError(f"{self.__name__} has no {name}")
        answer = self._answers[name]
        if not callable(answer) or isinstance(answer, type):
            return answer
        return self._recording(name, answer)

    def _recording(self, name: str, answer: Any) -> Any:
        real = getattr(self._like, name, None)

        def call(*args: Any, **named: Any) -> Any:
            if inspect.isfunction(real):
                inspect.signature(real).bind(*args, **named)
            self.calls.append(name)
            return answer(*args, **named)

        return call

    def note(self, name: str) -> Any:
        """A function of a submodule: it is noted, and does nothing."""
        return lambda *args, **named: self.calls.append(name)


def answers(name: str, devices: int, recorder: Recorder) -> dict[str, Any]:
    """What a device of 64 GiB answers, by the names of all vendors' functions."""

    def value(what: Any) -> Any:
        return lambda *args, **named: what

    nothing = value(None)
    state = torch.arange(16, dtype=torch.uint8)
    generators = tuple(torch.Generator() for _ in range(devices))
    ranges = SimpleNamespace(
        range_push=recorder.note("range_push"), range_pop=recorder.note("range_pop")
    )
    graph = type("Graph", (), {"replay": recorder.note("replay")})
    rng = {
        "get_rng_state": value(state), "set_rng_state": nothing, "manual_seed": nothing,
        "manual_seed_all": nothing, "initial_seed": value(7),
    }  # fmt: skip
    noted = {key: _noted(recorder, f"random.{key}", call) for key, call in rng.items()}
    properties = SimpleNamespace(name="Stand-in", total_memory=TOTAL, gcnArchName="gfx942:xnack-")
    return {
        **rng,
        "random": SimpleNamespace(**noted, default_generators=generators),
        "default_generators": generators,
        "_get_default_mps_generator": value(torch.Generator().manual_seed(7)),
        "device_count": value(devices), "current_device": value(0), "set_device": nothing,
        "synchronize": nothing, "get_device_properties": value(properties),
        "get_device_capability": value((9, 0)), "get_device_name": value("GAUDI2"),
        "Stream": Stream, "Event": Event, "stream": value(nullcontext()),
        "current_stream": value(Stream()), "default_stream": value(Stream()),
        "empty_cache": nothing, "memory_allocated": value(1 << 20),
        "max_memory_allocated": value(2 << 20), "memory_reserved": value(3 << 20),
        "max_memory_reserved": value(4 << 20), "reset_peak_memory_stats": nothing,
        "memory_stats": value({"allocated_bytes.all.current": 1 << 20, "Limit": TOTAL}),
        "mem_get_info": value((TOTAL // 2, TOTAL)), "current_allocated_memory": value(1 << 20),
        "driver_allocated_memory": value(3 << 20), "recommended_max_memory": value(TOTAL),
        "is_bf16_supported": value(True), "graph": value(nullcontext()),
        f"{name.upper()}Graph": graph, "_lazy_call": lambda callback: callback(),
        "nccl": SimpleNamespace(version=_noted(recorder, "nccl.version", value((2, 27, 5)))),
        "nvtx": ranges, "cnpx": ranges, "amp": SimpleNamespace(),
        "temperature": value(41), "power_draw": value(250_000), "utilization": value(90),
        "clock_rate": value(1_980),
    }  # fmt: skip


def _noted(recorder: Recorder, name: str, answer: Any) -> Any:
    def call(*args: Any, **named: Any) -> Any:
        recorder.calls.append(name)
        return answer(*args, **named)

    return call


# How the vendors' modules differ from torch.cuda, which all of them are modelled on.
_LACKED = "CUDAGraph nvtx temperature power_draw clock_rate"
_DIFFERS = {
    "npu": {"more": "NPUGraph", "less": _LACKED},
    "mlu": {"more": "MLUGraph cnpx", "less": _LACKED},
    "sdaa": {"less": f"{_LACKED} graph utilization"},
    "supa": {"more": "SUPAGraph", "less": _LACKED},
    "hpu": {
        "more": "HPUGraph",
        "less": f"{_LACKED} utilization _lazy_call empty_cache mem_get_info get_rng_state"
        " set_rng_state manual_seed manual_seed_all initial_seed",
    },
}


def module(name: str, devices: int = 2) -> Recorder:
    """The stand-in of ``torch.<name>``; ``rocm`` is the ``torch.cuda`` of a ROCm torch."""
    kind = "cuda" if name == "rocm" else name
    like = getattr(torch, kind) if kind in ("cuda", "xpu", "mps") else torch.cuda
    return Recorder(kind, like, devices, **_DIFFERS.get(kind, {}))
