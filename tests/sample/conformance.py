"""What every accelerator must do: one list, run on real devices and on recorders alike.

Needs torch, and no pytest: it also runs where the GPUs are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from opkiln.errors import AcceleratorError

if TYPE_CHECKING:
    from opkiln.accelerator.interface import Accelerator

Holds = Callable[[Any, Any], bool]  # of the accelerator and of what it answered


class Check(NamedTuple):
    """One call, and what holds of its answer."""

    method: str
    arguments: tuple[Any, ...]
    holds: Holds
    asks: str = ""  # the function of the device's module that must have been called


def kind(*types: type) -> Holds:
    return lambda accelerator, answer: type(answer) in types


def equals(value: Any) -> Holds:
    return lambda accelerator, answer: answer == value


def at_least(least: int) -> Holds:
    return lambda accelerator, answer: type(answer) is int and answer >= least


def texts(accelerator: Any, answer: Any) -> bool:
    return type(answer) is list and all(type(each) is str and each for each in answer)


def starts_with_its_type(accelerator: Accelerator, answer: Any) -> bool:
    return str(answer).startswith(accelerator.device_type)


def constructor(dtype: torch.dtype) -> Holds:
    def holds(accelerator: Accelerator, answer: Any) -> bool:
        wanted = {"dtype": dtype, "device": accelerator.device_type}
        return isinstance(answer, partial) and answer.keywords == wanted

    return holds


def builder(accelerator: Accelerator, answer: Any) -> bool:
    own = accelerator.name if accelerator.name in ("cuda", "rocm") else "cpu"
    return answer.name == "fused_adam" and answer.backend == own


def memory(method: str, *, least: int = 0, asks: str = "") -> list[Check]:
    """Of the current device and of one by its index."""
    return [
        Check(method, (), at_least(least), asks or method),
        Check(method, (0,), at_least(least), asks or method),
    ]


called: list[str] = []
kept: list[torch.Tensor] = []
nothing = equals(None)
truth = kind(bool)

CHECKS: tuple[Check, ...] = (
    Check("is_available", (), truth),
    Check("is_synchronized_device", (), truth),
    Check("use_host_timers", (), truth),
    Check("resolves_data_dependency", (), truth),
    Check("handles_memory_backpressure", (), truth),
    Check("device_name", (), lambda a, answer: answer == a.device_type),
    Check("device_name", (0,), starts_with_its_type),
    Check("device", (), lambda a, answer: answer.type == a.device_type),
    Check("device", (0,), lambda a, answer: answer.type == a.device_type),
    Check("set_device", (0,), nothing, "set_device"),
    Check("current_device", (), equals(0), "current_device"),
    Check("current_device_name", (), starts_with_its_type),
    Check("device_count", (), at_least(1), "device_count"),
    Check("synchronize", (), nothing, "synchronize"),
    Check("synchronize", (0,), nothing, "synchronize"),
    Check("get_device_properties", (), lambda a, answer: answer.total_memory > 0),
    Check("get_device_properties", (0,), lambda a, answer: bool(answer.name)),
    Check("get_device_name", (), lambda a, answer: type(answer) is str and answer != ""),
    Check("random", (), lambda a, answer: answer is torch.random),
    Check("manual_seed", (7,), nothing, "manual_seed"),
    Check("manual_seed_all", (7,), nothing, "manual_seed_all"),
    Check("initial_seed", (), equals(7), "initial_seed"),
    Check("get_rng_state", (), lambda a, answer: answer.dtype == torch.uint8, "get_rng_state"),
    Check("get_rng_state", (0,), lambda a, answer: answer.numel() >= 16, "get_rng_state"),
    Check("set_rng_state", ("a state",), nothing, "set_rng_state"),
    Check("set_rng_state", ("a state", 0), nothing, "set_rng_state"),
    Check("default_generator", (0,), lambda a, answer: isinstance(answer, torch.Generator)),
    Check("Stream", (), lambda a, answer: isinstance(answer, type)),
    Check("stream", ("a stream",), lambda a, answer: isinstance(answer, AbstractContextManager)),
    Check("current_stream", (), lambda a, answer: answer is not None, "current_stream"),
    Check("current_stream", (0,), lambda a, answer: answer is not None, "current_stream"),
    Check("default_stream", (), lambda a, answer: answer is not None, "default_stream"),
    Check("default_stream", (0,), lambda a, answer: answer is not None, "default_stream"),
    Check("Event", (), lambda a, answer: all(hasattr(answer, name) for name in EVENT)),
    Check("empty_cache", (), nothing, "empty_cache"),
    *memory("memory_allocated"),
    *memory("max_memory_allocated"),
    *memory("memory_reserved"),
    *memory("max_memory_reserved"),
    *memory("memory_cached", asks="memory_reserved"),
    *memory("max_memory_cached", asks="max_memory_reserved"),
    Check("memory_stats", (), lambda a, answer: type(answer) is dict and answer, "memory_stats"),
    Check("memory_stats", (0,), lambda a, answer: type(answer) is dict and answer, "memory_stats"),
    Check("reset_peak_memory_stats", (), nothing, "reset_peak_memory_stats"),
    Check("reset_max_memory_allocated", (), nothing, "reset_peak_memory_stats"),
    Check("reset_max_memory_cached", (0,), nothing, "reset_peak_memory_stats"),
    *memory("total_memory", least=1 << 20, asks="get_device_properties"),
    *memory("available_memory", asks="mem_get_info"),
    Check("pin_memory", ("a tensor",), lambda a, answer: answer.tolist() == [1.0, 2.0]),
    Check("pin_memory", ("a tensor", 1, False, False), lambda a, answer: answer.numel() == 2),
    Check("unpin_memory", ("a tensor",), nothing),
    Check("is_pinned", ("a tensor",), truth),
    Check("is_bf16_supported", (), truth),
    Check("is_fp16_supported", (), truth),
    Check("is_fp8_supported", (), truth),
    Check("supported_dtypes", (), lambda a, answer: answer[0] is torch.float),
    Check("create_graph", (), lambda a, answer: answer is None or hasattr(answer, "replay")),
    Check("capture_to_graph", ("a graph",), lambda a, answer: bool(answer.__enter__), "graph"),
    Check("replay_graph", ("a recorded graph",), nothing, "replay"),
    Check("BFloat16Tensor", (), constructor(torch.bfloat16)),
    Check("ByteTensor", (), constructor(torch.uint8)),
    Check("DoubleTensor", (), constructor(torch.float64)),
    Check("FloatTensor", (), constructor(torch.float32)),
    Check("HalfTensor", (), constructor(torch.float16)),
    Check("IntTensor", (), constructor(torch.int32)),
    Check("LongTensor", (), constructor(torch.int64)),
    Check("on_accelerator", ("its tensor",), equals(True)),
    Check("on_accelerator", ("no tensor of its",), equals(False)),
    Check("range_push", ("step",), nothing, "range_push"),
    Check("range_push", ("step", "domain", "category"), nothing, "range_push"),
    Check("range_pop", (), nothing, "range_pop"),
    Check("range_pop", ("domain",), nothing, "range_pop"),
    Check("temperature", (), kind(int, type(None)), "temperature"),
    Check("power_draw", (), kind(int, type(None)), "power_draw"),
    Check("utilization", (), kind(int, type(None)), "utilization"),
    Check("clock_rate", (0,), kind(int, type(None)), "clock_rate"),
    Check("op_builder_dir", (), equals("opkiln.ops")),
    Check("get_op_builder", ("fused_adam",), lambda a, answer: answer.NAME == "fused_adam"),
    Check("get_op_builder", ("FusedAdamBuilder",), lambda a, answer: answer.NAME == "fused_adam"),
    Check("get_op_builder", ("NoSuchBuilder",), nothing),
    Check("create_op_builder", ("fused_adam",), builder),
    Check("create_op_builder", ("FusedAdamBuilder",), builder),
    Check("create_op_builder", ("no_such_op",), nothing),
    Check("build_extension", (), lambda a, answer: answer.__name__ == "BuildExtension"),
    Check("communication_backend_name", (), lambda a, answer: type(answer) is str and answer),
    Check("communication_backend_version", (), kind(tuple, type(None))),
    Check("export_envs", (), texts),
    Check("visible_devices_envs", (), texts),
    Check("set_visible_devices_envs", ("an environment", [0, 2]), nothing),
    Check("lazy_call", (lambda: called.append("back"),), lambda a, answer: bool(called)),
    Check("get_compile_backend", (), lambda a, answer: type(answer) is str and answer),
    Check("set_compile_backend", ("eager",), lambda a, answer: a.get_compile_backend() == "eager"),
    Check("is_triton_supported", (), truth),
    Check("prefer_triton_grouped_mm", (), truth),
    Check("amp", (), lambda a, answer: True),
    Check("module", (), lambda a, answer: answer is a.module()),
)

EVENT = ("record", "synchronize", "query", "elapsed_time", "wait")
PROPERTIES = (
    "Stream", "Event", "BFloat16Tensor", "ByteTensor", "DoubleTensor", "FloatTensor", "HalfTensor",
    "IntTensor", "LongTensor",
)  # fmt: skip

SENSORS = ("temperature", "power_draw", "clock_rate")  # few vendors' modules have these
_RNG = ("manual_seed", "manual_seed_all", "initial_seed", "get_rng_state", "set_rng_state")
_UNKEPT = (
    "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_cached",
    "max_memory_cached",
)  # fmt: skip

# What a recorder is asked instead, and nothing ("") where the answer needs no device.
OTHERWISE: dict[str, dict[str, str]] = {
    "xpu": {"default_stream": "current_stream", "range_push": "", "range_pop": ""},
    "hpu": {
        **{name: f"random.{name}" for name in _RNG},
        **dict.fromkeys(("empty_cache", "range_push", "range_pop", *SENSORS, "utilization"), ""),
        "total_memory": "memory_stats",
        "available_memory": "memory_allocated",
    },
    "npu": dict.fromkeys(("range_push", "range_pop", *SENSORS), ""),
    "mlu": dict.fromkeys(SENSORS, ""),
    "sdaa": dict.fromkeys(("range_push", "range_pop", *SENSORS, "utilization"), ""),
    "supa": dict.fromkeys(("range_push", "range_pop", *SENSORS), ""),
    "mps": {
        **dict.fromkeys(("set_device", "current_device", "current_stream", "default_stream"), ""),
        **dict.fromkeys(("memory_stats", "reset_peak_memory_stats", "initial_seed"), ""),
        **dict.fromkeys(("reset_max_memory_allocated", "reset_max_memory_cached"), ""),
        **dict.fromkeys(("range_push", "range_pop", *SENSORS, "utilization"), ""),
        **dict.fromkeys(_UNKEPT, "driver_allocated_memory"),
        "manual_seed_all": "manual_seed",
        "memory_allocated": "current_allocated_memory",
        "total_memory": "recommended_max_memory",
        "available_memory": "recommended_max_memory",
    },
}


def failures(accelerator: Accelerator, recorder: Any = None) -> list[str]:
    """What does not hold, a line each. ``recorder`` is what the accelerator drives, where that is
    no device."""
    return [line for check in CHECKS for line in _failure(check, accelerator, recorder)]


def _failure(check: Check, accelerator: Accelerator, recorder: Any) -> list[str]:
    shown = f"{accelerator.name}.{check.method}{check.arguments}"
    without_graph = "graph" in str(check.arguments) and accelerator.create_graph() is None
    arguments = [_argument(each, accelerator, recorder) for each in check.arguments]
    before = len(recorder.calls) if recorder is not None else 0
    try:
        found = getattr(accelerator, check.method)
        answer = found if check.method in PROPERTIES else found(*arguments)
        if without_graph:
            return [f"{shown} went on without a graph"]
        if not check.holds(accelerator, answer):
            return [f"{shown} gave {answer!r}"]
    except AcceleratorError as error:
        return [] if without_graph else [f"{shown} raised {error}"]
    except Exception as error:
        return [f"{shown} raised {type(error).__name__}: {error}"]
    wanted = OTHERWISE.get(accelerator.name, {}).get(check.method, check.asks)
    if recorder is not None and wanted and wanted not in recorder.calls[before:]:
        return [f"{shown} did not ask {wanted}, but {recorder.calls[before:]}"]
    return []


def _argument(argument: Any, accelerator: Accelerator, recorder: Any) -> Any:
    """What a word in CHECKS stands for."""
    if not isinstance(argument, str):
        return argument
    plain = torch.tensor([1.0, 2.0])
    pinnable = SimpleNamespace(pin_memory=lambda: plain, is_pinned=lambda: True)
    words: dict[str, Callable[[], Any]] = {
        "a state": accelerator.get_rng_state,
        "a stream": accelerator.current_stream,
        "a graph": accelerator.create_graph,
        "a recorded graph": lambda: _recorded(accelerator, recorder),
        "an environment": dict,
        "a tensor": lambda: plain if recorder is None or accelerator.name == "mps" else pinnable,
        "its tensor": lambda: SimpleNamespace(device=torch.device(accelerator.device_name(0))),
        "no tensor of its": lambda: torch.empty(1, device="meta"),
    }
    return words[argument]() if argument in words else argument


def _recorded(accelerator: Accelerator, recorder: Any) -> Any:
    """A graph of one operation; None where there are no graphs."""
    graph = accelerator.create_graph()
    if graph is not None:
        cell = torch.zeros(1, device="cpu" if recorder is not None else accelerator.device())
        accelerator.synchronize()
        with accelerator.capture_to_graph(graph):
            cell.add_(1)
        kept.append(cell)  # a replay writes to it
    return graph


# What only a real device shows


def behaviours(accelerator: Accelerator) -> list[str]:
    """Names of the behaviours that a real device does not have, with what was seen."""
    return [
        f"{accelerator.name}: {behaviour.__name__}: {seen}"
        for behaviour in (
            a_state_put_back_gives_the_same_numbers,
            a_seed_gives_the_same_numbers,
            tensors_are_made_on_the_device,
            memory_grows_with_what_is_allocated,
            events_time_what_lies_between_them,
            work_goes_to_the_stream_that_is_chosen,
            a_graph_does_again_what_was_recorded,
            pinned_memory_copies_to_the_device,
            an_environment_names_the_devices,
        )
        if (seen := behaviour(accelerator))
    ]


def _numbers(accelerator: Accelerator) -> list[float]:
    numbers: list[float] = torch.rand(4, device=accelerator.device()).tolist()
    return numbers


def a_state_put_back_gives_the_same_numbers(accelerator: Accelerator) -> str:
    state = accelerator.get_rng_state()
    first = _numbers(accelerator)
    accelerator.set_rng_state(state)
    again = _numbers(accelerator)
    return "" if first == again else f"{first} and {again}"


def a_seed_gives_the_same_numbers(accelerator: Accelerator) -> str:
    seen = []
    for _ in range(2):
        accelerator.manual_seed(11)
        seen.append(_numbers(accelerator))
    accelerator.manual_seed_all(12)
    other = _numbers(accelerator)
    return "" if seen[0] == seen[1] != other else f"{seen}, {other}"


def tensors_are_made_on_the_device(accelerator: Accelerator) -> str:
    made = [accelerator.FloatTensor([1.5]), accelerator.LongTensor([3])]
    made += [accelerator.BFloat16Tensor([2.0]), accelerator.HalfTensor([2.0])]
    good = all(accelerator.on_accelerator(each) for each in made)
    return "" if good and made[0].item() == 1.5 and made[1].item() == 3 else repr(made)


def memory_grows_with_what_is_allocated(accelerator: Accelerator) -> str:
    size = 64 << 20
    accelerator.reset_peak_memory_stats()
    before = accelerator.memory_allocated()
    block = torch.ones(size, dtype=torch.uint8, device=accelerator.device())
    accelerator.synchronize()
    grown = accelerator.memory_allocated() - before
    peak = accelerator.max_memory_allocated() - before
    del block
    # A process takes and gives back a little of its own meanwhile.
    return "" if min(grown, peak) > size * 0.9 else f"{grown} and {peak} at most, of {size}"


def events_time_what_lies_between_them(accelerator: Accelerator) -> str:
    begin, end = (accelerator.Event(enable_timing=True) for _ in range(2))
    begin.record()
    product = torch.ones(512, 512, device=accelerator.device())
    for _ in range(20):
        product = product @ product / 512
    end.record()
    end.synchronize()
    elapsed = begin.elapsed_time(end)
    return "" if 0 < elapsed < 60_000 and end.query() else f"{elapsed} ms"


def work_goes_to_the_stream_that_is_chosen(accelerator: Accelerator) -> str:
    chosen = accelerator.Stream()
    with accelerator.stream(chosen):
        inside = accelerator.current_stream()
        value = torch.full((4,), 2.0, device=accelerator.device())
    accelerator.synchronize()
    same = inside == chosen and accelerator.current_stream() == accelerator.default_stream()
    return "" if same and value.sum().item() == 8 else f"{inside} for {chosen}"


def a_graph_does_again_what_was_recorded(accelerator: Accelerator) -> str:
    graph = accelerator.create_graph()
    if graph is None:
        return ""
    counter = torch.zeros(1, device=accelerator.device())
    counter.add_(0)  # what the first use sets up cannot be recorded
    accelerator.synchronize()
    with accelerator.capture_to_graph(graph):
        counter.add_(1)
    for _ in range(3):
        accelerator.replay_graph(graph)
    accelerator.synchronize()
    return "" if counter.item() == 3 else repr(counter)


def pinned_memory_copies_to_the_device(accelerator: Accelerator) -> str:
    pinned = accelerator.pin_memory(torch.arange(8.0))
    if accelerator.name != "cpu" and not accelerator.is_pinned(pinned):
        return "it is not pinned"
    there = pinned.to(accelerator.device(), non_blocking=True)
    accelerator.synchronize()
    return "" if there.sum().item() == 28 else repr(there)


def an_environment_names_the_devices(accelerator: Accelerator) -> str:
    environment = {"HOME": "/root"}
    accelerator.set_visible_devices_envs(environment, [0, 2])
    wanted = {"HOME": "/root", **dict.fromkeys(accelerator.visible_devices_envs(), "0,2")}
    return "" if environment == wanted else repr(environment)
