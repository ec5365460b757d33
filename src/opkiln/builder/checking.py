"""Native and reference side by side, on real arguments.

What is compared: number, dtype, device, shape and strides of the results; their values, within the
rounding of their dtype; what was written to the arguments; and whether a result shares memory with
an argument. The first difference is told with all that is needed to repeat it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opkiln.builder.variants import autocast_off, tensors
from opkiln.errors import DifferenceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

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
        schema = native._schema
        names = [argument.name for argument in schema.arguments]
        now = {**dict(zip(names, args, strict=False)), **kwargs}
        before = {name: copy_tensors(value) for name, value in now.items()}
        expected_args = {name: copy_tensors(value) for name, value in before.items()}
        with autocast_off(tuple(tensors(args, kwargs))):
            expected = self._reference(**expected_args)
        got = native(*args, **kwargs)
        self.results(got, expected, before)
        for name, value in now.items():
            theirs = (expected_args if name in written_arguments(schema) else before)[name]
            what = f"argument {name} after the call"
            for one, other in zip(tensors([value], {}), tensors([theirs], {}), strict=True):
                self._compare(before, what, one, other, strides=False)
        for one, other in zip(tensors([got], {}), tensors([expected], {}), strict=True):
            for name, value in now.items():
                shared = any(_share(one, each) for each in tensors([value], {}))
                theirs = tensors([expected_args[name]], {})
                if shared and not any(_share(other, each) for each in theirs):
                    raise self._error(
                        before,
                        f"the result shares memory with argument {name}",
                        "the reference returns a tensor of its own; whoever writes to the one "
                        "changes the other",
                    )
        return got

    def results(self, got: Any, expected: Any, arguments: dict[str, Any]) -> None:
        """Compare results; the arguments are for the message. Raises DifferenceError."""
        ours, theirs = list(tensors([got], {})), list(tensors([expected], {}))
        if len(ours) != len(theirs):
            what = f"{len(ours)} results, not {len(theirs)}"
            raise self._error(arguments, what, "they are compared one by one")
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            result = "the result" if isinstance(got, Tensor) else f"result {place}"
            self._compare(arguments, result, one, other, strides=True)

    def _error(self, arguments: dict[str, Any], what: str, why: str) -> DifferenceError:
        given = "\n".join(f"  {name} = {_describe(each)}" for name, each in arguments.items())
        return DifferenceError(
            f"op {self._op}: native and reference differ: {what}",
            why=f"{why}\ncalled with\n{given}",
        )

    def _compare(
        self, arguments: dict[str, Any], what: str, got: Tensor, expected: Tensor, *, strides: bool
    ) -> None:
        both = f"native gives {_describe(got)}, the reference {_describe(expected)}"
        for name in ("dtype", "device", "shape"):
            one, other = getattr(got, name), getattr(expected, name)
            if one != other:
                differs = f"{what} has {name} {_plain(one)}, not {_plain(other)}"
                raise self._error(arguments, differs, both)
        if strides and _strides(got) != _strides(expected):
            raise self._error(
                arguments,
                f"{what} has strides {got.stride()}, not {expected.stride()}",
                "torch.compile takes the strides of the reference for granted",
            )
        got, expected = got.detach(), expected.detach()
        wrong = _wrong(got, expected)
        count = int(wrong.sum())
        if count:
            first = tuple(wrong.nonzero()[0].tolist())
            one, other = _value(got[first]), _value(expected[first])
            raise self._error(
                arguments,
                f"{what} is {one} at index {list(first)}, not {other}",
                f"{count} of {got.numel()} values differ by more than the rounding of "
                f"{_plain(got.dtype)}; {both}",
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


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Those that mean something: a dimension of one, and an empty tensor, may have any."""
    if tensor.numel() == 0:
        return ()
    return tuple(step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def _share(one: Tensor, other: Tensor) -> bool:
    if one.numel() == 0 or other.numel() == 0:
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def copy_tensors(value: Any) -> Any:
    """A value whose tensors are copies with the same strides."""
    if isinstance(value, Tensor):
        return _copy(value.detach())
    if isinstance(value, (list, tuple)):
        return [copy_tensors(each) for each in value]
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


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        strides = "" if value.is_contiguous() else f", strides {value.stride()}"
        return f"{_plain(value.dtype)}{list(value.shape)} on {value.device}{strides}"
    if isinstance(value, list):
        return f"[{', '.join(map(_describe, value))}]"
    return repr(value)


def _plain(value: Any) -> str:
    return str(list(value) if isinstance(value, torch.Size) else value).removeprefix("torch.")


def _value(tensor: Tensor) -> str:
    return f"{tensor.item():.9g}" if tensor.dtype.is_floating_point else str(tensor.item())
