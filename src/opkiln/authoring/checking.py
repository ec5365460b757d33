"""Native and reference side by side, on real arguments.

What is compared: number, dtype, device, shape and strides of the results; their values, within the
rounding of their dtype; what was written to the arguments; and whether a result shares memory with
an argument. The first difference is told with all that is needed to repeat it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opkiln.authoring.gradient import tensors, without_autocast
from opkiln.errors import DifferenceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# How far a value may be off, relative to itself and to the largest of the result. Sums of a few
# thousand terms stay below it in any order.
_ROUNDING = {
    torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2,
    torch.complex128: 1e-12, torch.complex64: 2e-5,
}  # fmt: skip
_COARSE = 0.25  # of eight bits and fewer


class Comparison:
    """Compares calls of one op."""

    def __init__(self, op: str, reference: Callable[..., Any]) -> None:
        self._op, self._reference = op, reference

    def __call__(self, native: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the native version gives. Raises DifferenceError."""
        before = {name: copied(value) for name, value in self._named(native, args, kwargs).items()}
        expected_args = {name: copied(value) for name, value in before.items()}
        with without_autocast(tuple(tensors(args, kwargs))):
            expected = self._reference(**expected_args)
        got = native(*args, **kwargs)
        now, written = self._named(native, args, kwargs), written_arguments(native._schema)
        about = self.results(got, expected, before)
        for name, value in now.items():
            theirs = expected_args if name in written else before
            what = f"argument {name} after the call"
            for one, other in zip(tensors([value], {}), tensors([theirs[name]], {}), strict=True):
                about.compare(what, one, other, strides=False)
        self._require_own_memory(about, got, expected, now, expected_args)
        return got

    def results(self, got: Any, expected: Any, arguments: dict[str, Any]) -> _About:
        """Compare results; the arguments are for the message. Raises DifferenceError."""
        about = _About(self._op, arguments)
        for place, (one, other) in enumerate(_pairs(about, got, expected)):
            result = "the result" if isinstance(got, Tensor) else f"result {place}"
            about.compare(result, one, other, strides=True)
        return about

    def _named(self, native: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        names = [argument.name for argument in native._schema.arguments]
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def _require_own_memory(
        self, about: _About, got: Any, expected: Any, ours: dict[str, Any], theirs: dict[str, Any]
    ) -> None:
        for one, other in zip(tensors([got], {}), tensors([expected], {}), strict=True):
            for name, value in ours.items():
                shared = any(_share(one, each) for each in tensors([value], {}))
                if shared and not any(_share(other, each) for each in tensors([theirs[name]], {})):
                    raise about.error(
                        f"the result shares memory with argument {name}",
                        "the reference returns a tensor of its own; whoever writes to the one "
                        "changes the other",
                    )


class _About:
    """A call that is looked at, for messages."""

    def __init__(self, op: str, arguments: dict[str, Any]) -> None:
        self._op, self._arguments = op, arguments

    def error(self, what: str, why: str) -> DifferenceError:
        given = "\n".join(f"  {name} = {_shown(each)}" for name, each in self._arguments.items())
        return DifferenceError(
            f"op {self._op}: native and reference differ: {what}",
            why=f"{why}\ncalled with\n{given}",
        )

    def compare(self, what: str, got: Tensor, expected: Tensor, *, strides: bool) -> None:
        for name in ("dtype", "device", "shape"):
            one, other = getattr(got, name), getattr(expected, name)
            if one != other:
                raise self.error(
                    f"{what} has {name} {_plain(one)}, not {_plain(other)}", _both(got, expected)
                )
        if strides and _strides(got) != _strides(expected):
            raise self.error(
                f"{what} has strides {got.stride()}, not {expected.stride()}",
                "torch.compile takes the strides of the reference for granted",
            )
        self._compare_values(what, got.detach(), expected.detach())

    def _compare_values(self, what: str, got: Tensor, expected: Tensor) -> None:
        wrong = _wrong(got, expected)
        count = int(wrong.sum())
        if count == 0:
            return
        first = tuple(wrong.nonzero()[0].tolist())
        raise self.error(
            f"{what} is {_value(got[first])} at index {list(first)}, not {_value(expected[first])}",
            f"{count} of {got.numel()} values differ by more than the rounding of "
            f"{_plain(got.dtype)}; {_both(got, expected)}",
        )


def written_arguments(schema: Any) -> set[str]:
    """The names of the arguments that an op writes to."""
    infos = {each.name: each.alias_info for each in schema.arguments}
    return {name for name, info in infos.items() if info is not None and info.is_write}


def _wrong(got: Tensor, expected: Tensor) -> Tensor:
    """Where two tensors differ by more than rounding."""
    if not (got.dtype.is_floating_point or got.dtype.is_complex):
        return got != expected
    wide = torch.complex128 if got.dtype.is_complex else torch.float64
    one, other = got.to(wide), expected.to(wide)
    allowed = _ROUNDING.get(got.dtype, _COARSE)
    sizes = other.abs()
    finite = sizes[sizes.isfinite()]
    largest = float(finite.max()) if finite.numel() else 0.0
    close = (one - other).abs() <= allowed * (sizes + largest)
    both_nan = one.isnan() & other.isnan()
    return ~(close | both_nan | (one == other))


def _pairs(about: _About, got: Any, expected: Any) -> Sequence[tuple[Tensor, Tensor]]:
    ours, theirs = list(tensors([got], {})), list(tensors([expected], {}))
    if len(ours) != len(theirs):
        raise about.error(f"{len(ours)} results, not {len(theirs)}", "they are compared one by one")
    return list(zip(ours, theirs, strict=True))


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Those that mean something: a dimension of one, and an empty tensor, may have any."""
    if tensor.numel() == 0:
        return ()
    return tuple(step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def _share(one: Tensor, other: Tensor) -> bool:
    if one.numel() == 0 or other.numel() == 0:
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def copied(value: Any) -> Any:
    """A value whose tensors are copies with the same strides."""
    if isinstance(value, Tensor):
        return _copy(value.detach())
    if isinstance(value, (list, tuple)):
        return [copied(each) for each in value]
    return value


def _copy(tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return tensor.clone()
    # A clone has other strides if elements are skipped or repeated. So all the memory from the
    # first element to the last is copied.
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * step for size, step in steps)
    memory = tensor.as_strided((span,), (1,)).clone()
    return memory.as_strided(tensor.shape, tensor.stride(), 0)


def _both(got: Tensor, expected: Tensor) -> str:
    return f"native gives {_shown(got)}, the reference {_shown(expected)}"


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        strides = "" if value.is_contiguous() else f", strides {value.stride()}"
        return f"{_plain(value.dtype)}{list(value.shape)} on {value.device}{strides}"
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return repr(value)


def _plain(value: Any) -> str:
    return str(list(value) if isinstance(value, torch.Size) else value).removeprefix("torch.")


def _value(tensor: Tensor) -> str:
    return f"{tensor.item():.9g}" if tensor.dtype.is_floating_point else str(tensor.item())
