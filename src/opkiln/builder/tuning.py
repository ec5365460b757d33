"""Parameters that are chosen by measuring: ``tune={"BLOCK": (128, 256)}``.

The candidates are measured once for each device model and class of shapes, on the arguments of the
first such call, and the choice is kept in the store. Later processes read it. Where nothing can be
measured, the first candidate serves; ``explain`` says so.
"""

from __future__ import annotations

import os
import time
import warnings
from typing import Any

import torch

from opkiln.base import forks
from opkiln.base.digest import key, read_file
from opkiln.base.model import EMULATOR_RUNTIME
from opkiln.builder.checking import copy_tensors, written_arguments
from opkiln.builder.variants import tensors
from opkiln.decision import terms
from opkiln.errors import OpkilnError, SealedError, StoreWarning
from opkiln.machine.uname import cpu_name
from opkiln.settings import settings
from opkiln.store import tuned
from opkiln.store.layers import Store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from opkiln.builder.base import OpBuilder
    from opkiln.builder.parameters import Value
    from opkiln.builder.variants import Variant

_WARM_UP = 3  # calls
_SAMPLES = 7  # their median counts
_SAMPLE = 200e-6  # seconds that one sample takes at least, in several calls
_MOST_CALLS = 200  # of one sample
_MOST_NOTES = 100
_CAPTURING = "nothing is measured while a CUDA graph is captured"
_NOT_COMPILED = "OPKILN_MODE=needed: an op that has a reference is not compiled here"


class Tuning:
    """Chooses the tuned values of one op."""

    def __init__(
        self, builder: type[OpBuilder], variant: Callable[[tuple[Value, ...]], Variant]
    ) -> None:
        self._builder, self._variant = builder, variant
        self._parameters = builder.PARAMETERS
        self._candidates = list(self._parameters.candidates())
        self.author_key: Callable[..., Any] | None = None  # of the classes of shapes
        self._choices: dict[tuple[object, ...], tuple[Value, ...]] = {}
        self._sources: dict[str, str] = {}  # digests, by device
        self._notes: dict[str, None] = {}
        self._lock = forks.lock()

    @property
    def notes(self) -> tuple[str, ...]:
        """What was chosen in this process, and why."""
        return tuple(self._notes)

    def exact(self, *args: Any, **kwargs: Any) -> tuple[object, ...]:
        """What a call is remembered by: as ``shape_class``, and cheaper to find."""
        if self.author_key is not None:
            device = next((each.device for each in tensors(args, kwargs)), None)
            return device, self.author_key(*args, **kwargs)
        return tuple([(each.shape, each.dtype, each.device) for each in tensors(args, kwargs)])

    def shape_class(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The class of a call's shapes, in words. Calls of one class share a choice."""
        if self.author_key is not None:
            return repr(self.author_key(*args, **kwargs))
        return " ".join(
            f"{str(each.dtype).removeprefix('torch.')}{[_round_up(size) for size in each.shape]}"
            for each in tensors(args, kwargs)
        )

    def best(
        self, chosen: tuple[Value, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Value, ...], bool]:
        """The tuned values for a call whose other values are these, and whether they hold for later
        calls. Measures if nobody has. Raises OpkilnError if no candidate can be had."""
        if len(self._candidates) == 1:
            return self._candidates[0], True
        device = next((each.device for each in tensors(args, kwargs)), torch.device("cpu"))
        shape = self.shape_class(args, kwargs)
        asked = (chosen, _model(device), shape)
        with self._lock:
            if asked in self._choices:
                return self._choices[asked], True
            if device.type not in self._sources:
                self._sources[device.type] = self._digest(device.type)
            question = tuned.Question(
                distribution=self._builder().distribution,
                op=self._builder.NAME,
                device=_model(device),
                shape=shape,
                values=_in_words(self._parameters.chosen, chosen),
                candidates=tuple(map(self._in_words, self._candidates)),
                sources=self._sources[device.type],
            )
            store = Store()
            choice, how = tuned.find(store, question), "kept in the store"
            if choice is None:
                capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
                measured: dict[str, float] = {}
                why = _CAPTURING if capturing else terms.never_compiles()
                if settings.mode == terms.NEEDED and not capturing:
                    why = _NOT_COMPILED
                if not why:
                    measured, why = self._measure(chosen, device, args, kwargs)
                if not measured:
                    first = self._candidates[0]
                    self._note(f"{self._in_words(first)} for {shape}, the first candidate: {why}")
                    if not capturing:
                        self._choices[asked] = first
                    return first, not capturing
                best = min(measured, key=measured.__getitem__)
                choice, how = (
                    tuned.TunedChoice(question, best, measured),
                    "measured in this process",
                )
                _keep(store, choice)
            for_ = f"{question.values}, {shape}" if question.values else shape
            times = "; ".join(
                f"{name}: {value:g} us" for name, value in choice.microseconds.items()
            )
            self._note(f"{choice.candidate} for {for_} on {question.device}, {how} ({times})")
            candidates = {self._in_words(each): each for each in self._candidates}
            self._choices[asked] = candidates[choice.candidate]
            return self._choices[asked], True

    def _digest(self, device: str) -> str:
        """Of the sources for a device: a kernel that was rewritten is measured anew."""
        spec = self._builder.for_device(device).spec()
        inline = dict(spec.inline)
        texts = []
        for name in spec.sources:
            if name in inline:
                texts.append(inline[name].encode())
            elif name != EMULATOR_RUNTIME:
                try:
                    texts.append(read_file(os.path.join(spec.root, name)))
                except OSError:  # installed without sources
                    texts.append(b"")
        return key("tuned sources", texts)

    def _measure(
        self,
        chosen: tuple[Value, ...],
        device: torch.device,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[dict[str, float], str]:
        """Microseconds by candidate, and why some have none. Raises OpkilnError."""
        variants = {
            self._in_words(each): self._variant((*chosen, *each)) for each in self._candidates
        }
        failures = _load_candidates(variants, device.type)
        schema = self._variant((*chosen, *self._candidates[0])).overload._schema
        args, kwargs = _copy_written(schema, args, kwargs)
        times = {}
        for name, variant in variants.items():
            if name in failures:
                continue
            native = variant.native or variant.overload  # not a call that is compared
            try:
                with torch.no_grad():
                    seconds = _time(lambda: native(*args, **kwargs), device)  # noqa: B023
            except RuntimeError as error:  # it may need more memory or threads than there are
                failures[name] = str(error).partition("\n")[0]
            else:
                times[name] = round(seconds * 1e6, 3)
        return times, "; ".join(f"{name}: {why}" for name, why in failures.items())

    def _in_words(self, candidate: tuple[Value, ...]) -> str:
        return _in_words(self._parameters.tuned, candidate)

    def _note(self, note: str) -> None:
        if len(self._notes) < _MOST_NOTES:
            self._notes[note] = None


def _in_words(parameters: Iterable[tuple[str, Any]], values: Iterable[Value]) -> str:
    pairs = zip(parameters, values, strict=True)
    return ", ".join(f"{name}={value}" for (name, _), value in pairs)


def _round_up(size: int) -> int:
    """Up to a power of two."""
    return 1 << (size - 1).bit_length() if size > 0 else 0


def _model(device: torch.device) -> str:
    """What all devices of one kind have in common."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return (
            f"{found.name}, {getattr(found, 'gcnArchName', '') or f'{found.major}.{found.minor}'}"
        )
    return cpu_name() if device.type == "cpu" else device.type


def _load_candidates(variants: dict[str, Variant], device: str) -> dict[str, str]:
    """Find or build all candidates, in parallel; why some cannot be had. Raises OpkilnError if none
    can, and SealedError."""
    from opkiln.run import progress, schedule

    errors: dict[str, OpkilnError] = {}
    failures: dict[str, str] = {}

    def work(name: str, variant: Variant) -> None:
        try:
            loaded = variant.load(device)
            if loaded is None or loaded.artifact is None:
                failures[name] = "its reference serves"
        except OpkilnError as error:
            errors[name] = error
            failures[name] = error.what

    with progress.show_builds():
        schedule.call_in_threads(work, variants.items())
    for error in errors.values():
        if isinstance(error, SealedError) or len(errors) == len(variants):
            raise error
    return failures


def _copy_written(
    schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with copies of those that the op writes to."""
    written = written_arguments(schema)
    names = [each.name for each in schema.arguments]
    plain = tuple(
        copy_tensors(value) if name in written else value
        for name, value in zip(names, args, strict=False)
    )
    return plain, {n: copy_tensors(value) if n in written else value for n, value in kwargs.items()}


def _time(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call: the median of several samples."""
    elapsed = _time_on_gpu if device.type == "cuda" else _time_on_cpu
    for _ in range(_WARM_UP):
        call()
    once = max(elapsed(call, 1, device), 1e-9)
    count = min(max(1, round(_SAMPLE / once)), _MOST_CALLS)
    taken = sorted(elapsed(call, count, device) / count for _ in range(_SAMPLES))
    return taken[_SAMPLES // 2]


def _time_on_cpu(call: Callable[[], Any], count: int, device: torch.device) -> float:
    wait = torch.get_device_module(device).synchronize  # does nothing for a CPU
    wait(device)
    began = time.perf_counter()
    for _ in range(count):
        call()
    wait(device)
    return time.perf_counter() - began


def _time_on_gpu(call: Callable[[], Any], count: int, device: torch.device) -> float:
    with torch.cuda.device(device):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3


def _keep(store: Store, choice: tuned.TunedChoice) -> None:
    if store.root is None:
        return
    try:
        tuned.keep(store.root, choice)
    except OSError as error:
        warnings.warn(
            f"what was measured for op {choice.question.op} is not kept: {error}",
            StoreWarning,
            stacklevel=2,
        )
