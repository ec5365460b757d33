"""The front end of ``quantizer``: ``opkiln.quant``'s functions; records that move like tensors."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

import opkiln
from opkiln.errors import ArgumentError, UsageError
from opkiln.ops.checks import NATIVE, call_checked, check_dense
from opkiln.ops.quantizer import functions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_Record = TypeVar("_Record", bound=Any)  # a NamedTuple with a field ``dtype``

# torch calls this at its own import only if opkiln is installed and it loads its backends
# (TORCH_DEVICE_BACKEND_AUTOLOAD). A process that has the classes can always load what it saved.
opkiln._allow_torch_to_load()


def each_tensor(record: _Record, function: Callable[[Tensor], Tensor]) -> _Record:
    """The record with every tensor replaced by what the function makes of it."""
    changed = {
        name: function(value)
        for name, value in record._asdict().items()
        if isinstance(value, Tensor)
    }
    return record._replace(**changed)  # type: ignore[no-any-return]


def move_record(record: _Record, *args: Any, **kwargs: Any) -> _Record:
    """As ``Tensor.to``: to a device, a dtype, both, or those of another tensor.

    The dtype is that of the values which the record stands for; its tensors keep theirs. Raises
    UsageError for another dtype than float32, bfloat16 and float16.
    """
    parsed: tuple[Any, ...] = torch._C._nn._parse_to(*args, **kwargs)  # as Module.to reads it
    device, dtype, non_blocking, _ = parsed
    if dtype is not None:
        if dtype not in NATIVE:
            raise UsageError(f"dtype is {dtype}, expected float32, bfloat16 or float16")
        record = record._replace(dtype=dtype)
    if device is None:
        return record
    return each_tensor(record, lambda tensor: tensor.to(device, non_blocking=non_blocking))


class Swizzle(NamedTuple):
    """An order of groups for an all-reduce in two hops, first within a node and then between nodes.

    A tensor is that of ``nodes * devices_per_node`` equal parts, one for each device, a node's
    devices next to each other. Each part is cut into ``pipeline`` pieces, and pieces are put in the
    order (piece, device, node): what a device sends to one peer of its node lies together.
    """

    nodes: int  # of the job
    devices_per_node: int  # of each node
    pipeline: int = 1  # pieces of each part


_IN_ORDER = Swizzle(1, 1, 1)


class Quantized(NamedTuple):
    """A tensor as whole numbers, with a scale (and an offset unless symmetric) for each group.

    ``values`` has one int8 an element, uint8 where asymmetric; of 4 bits two to a uint8, the
    element of even index in the low half. An element is ``level * scale + offset`` of its group.
    """

    values: Tensor  # int8, uint8 or two to a byte
    scales: Tensor  # one for each group
    offsets: Tensor | None  # one for each group; None: symmetric
    shape: tuple[int, ...]  # of the tensor
    dtype: torch.dtype  # that dequantize gives
    bits: int  # of an element: 8 or 4
    group_size: int  # elements of a group
    swizzle: Swizzle | None = None  # the order of the groups; None: as in the tensor
    narrow_range: bool = True  # symmetric levels without the lowest one

    @property
    def symmetric(self) -> bool:
        """Whether zero is a level of every group, so that there are no offsets."""
        return self.offsets is None

    @property
    def numel(self) -> int:
        """The elements of the tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Of all its tensors: what travels."""
        offsets = 0 if self.offsets is None else self.offsets.nbytes
        return int(self.values.nbytes + self.scales.nbytes + offsets)

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.values.device

    def to(self, *args: Any, **kwargs: Any) -> Quantized:
        """As ``Tensor.to``, ``non_blocking`` included; a dtype is that which dequantize gives."""
        return move_record(self, *args, **kwargs)

    def cpu(self) -> Quantized:
        """As ``Tensor.cpu``."""
        return move_record(self, "cpu")

    def cuda(
        self, device: torch.device | int | str | None = None, non_blocking: bool = False
    ) -> Quantized:
        """As ``Tensor.cuda``."""
        return each_tensor(self, lambda tensor: tensor.cuda(device, non_blocking=non_blocking))

    def pin_memory(self) -> Quantized:
        """In page-locked memory, from which ``to("cuda", non_blocking=True)`` does not wait."""
        return each_tensor(self, lambda tensor: tensor.pin_memory())

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Tensors and plain values, and a function that ``torch.load`` is allowed to call."""
        plain = None if self.swizzle is None else tuple(self.swizzle)
        return opkiln._rebuild_quantized, tuple(self._replace(swizzle=plain))  # type: ignore[arg-type]

    @classmethod
    def of_saved(cls, *fields: Any) -> Quantized:
        """From the values of ``__reduce__``."""
        made = cls(*fields)
        return made if made.swizzle is None else made._replace(swizzle=Swizzle(*made.swizzle))


def quantize(
    x: Tensor,
    *,
    bits: int = 8,
    group_size: int = 2048,
    symmetric: bool = True,
    narrow_range: bool = True,
    stochastic: bool = False,
    seed: int = 0,
    offset: int | Tensor = 0,
    error: Tensor | None = None,
) -> Quantized:
    """``x``, of fp32, bf16 or fp16, with 8 or 4 bits an element, in groups of neighbours.

    Groups are those of ``x.reshape(-1)``, a multiple of 8 elements from 16 to 65536; the last may
    be shorter. Symmetric levels go from -127 to 127 or -7 to 7. Without ``narrow_range`` they go
    from -128 or -8, so that steps are smaller, and a group's greatest elements may be cut off by up
    to a step; of asymmetric levels none is left out anyway.
    Rounds to nearest, ties to even; or with ``stochastic`` up or down at random, so that the
    expected value is the element. The random bits depend on nothing but ``seed``, ``offset`` and
    the element's index: give each step an ``offset`` of its own. (As a tensor of one int64 on the
    device of ``x`` it is read when the kernel runs, so also in a captured graph.)
    With ``error``, fp32 and as large as ``x``, what is quantized is ``x + error``, and ``error``
    receives what that loses.
    A group that holds NaN or infinity comes back as NaN, all of it.
    Raises UsageError, naming the argument.
    """
    return swizzle_quantize(
        x, nodes=1, devices_per_node=1, bits=bits, group_size=group_size, symmetric=symmetric,
        narrow_range=narrow_range, stochastic=stochastic, seed=seed, offset=offset, error=error,
    )  # fmt: skip


def swizzle_quantize(
    x: Tensor,
    *,
    nodes: int,
    devices_per_node: int,
    pipeline: int = 1,
    bits: int = 8,
    group_size: int = 2048,
    symmetric: bool = True,
    narrow_range: bool = True,
    stochastic: bool = False,
    seed: int = 0,
    offset: int | Tensor = 0,
    error: Tensor | None = None,
) -> Quantized:
    """As ``quantize``, the groups in the order of a ``Swizzle``. ``dequantize`` undoes it.

    The number of elements must be a multiple of
    ``nodes * devices_per_node * pipeline * group_size``. Raises UsageError, naming the argument.
    """
    check_dense(x)
    number, later = _offset(offset)
    order = Swizzle(nodes, devices_per_node, pipeline)
    rest = (bits, group_size, symmetric, stochastic, seed, number, *order, later, narrow_range)
    flat = x.detach().contiguous()
    if error is None:
        values, scales, offsets = call_checked(functions.quantize, flat, *rest)
    else:
        _check_error(error, x.shape)
        values, scales, offsets = call_checked(functions.quantize_with_feedback, flat, error, *rest)
    return Quantized(
        values, scales, None if symmetric else offsets, tuple(x.shape), x.dtype, bits, group_size,
        None if order == _IN_ORDER else order, narrow_range,
    )  # fmt: skip


def dequantize(q: Quantized, *, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor again, in its shape; of its dtype or another. Raises UsageError."""
    wanted = q.dtype if dtype is None else dtype
    offsets = q.scales.new_empty(0) if q.offsets is None else q.offsets
    order = _IN_ORDER if q.swizzle is None else q.swizzle
    flat = call_checked(
        functions.dequantize, q.values.contiguous(), q.scales.detach().contiguous(),
        offsets.detach().contiguous(), q.numel, wanted, q.bits, q.group_size, q.symmetric, *order,
    )  # fmt: skip
    return flat.view(q.shape)


def fake_quantize(
    x: Tensor,
    *,
    bits: int = 8,
    group_size: int = 2048,
    symmetric: bool = True,
    narrow_range: bool = True,
    stochastic: bool = False,
    seed: int = 0,
    offset: int | Tensor = 0,
    inplace: bool = False,
) -> Tensor:
    """``x`` as it comes back from ``quantize``, in one pass; ``inplace`` writes to ``x`` itself.

    The gradient goes straight through, as if nothing had been rounded. Raises UsageError, naming
    the argument, and for a leaf that requires gradients where ``inplace`` would overwrite it.
    """
    check_dense(x)
    number, later = _offset(offset)
    rest = (bits, group_size, symmetric, stochastic, seed, number, later, narrow_range)
    if not inplace:
        # In transforms of torch.func the op is its reference, whose gradient is zero.
        transformed = torch._C._are_functorch_transforms_active()
        call: Any = _StraightThrough.apply if transformed else functions.fake_quantize
        return call_checked(call, x.contiguous(), *rest)  # type: ignore[no-any-return]
    leaf = x if x._base is None else x._base
    if x.requires_grad and leaf.is_leaf and torch.is_grad_enabled():
        raise UsageError(
            "x is a leaf that requires gradients, or a view of one, and inplace would overwrite it",
            why="the step that made its new value would be lost",
            hint="with torch.no_grad(): fake_quantize(x, inplace=True)",
        )
    # Straight through is the gradient that x has anyway: no node is needed for this.
    with torch.no_grad():
        if x.is_contiguous():
            call_checked(functions.fake_quantize_, x, *rest)
        else:
            x.copy_(call_checked(functions.fake_quantize, x.contiguous(), *rest))
    return x


class _StraightThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, *rest: Any) -> Tensor:
        return functions.fake_quantize(x, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        return grad, *[None] * 8


def quantized_reduce(
    parts: Sequence[Quantized],
    *,
    mean: bool = False,
    bits: int | None = None,
    group_size: int | None = None,
    symmetric: bool | None = None,
    narrow_range: bool | None = None,
    stochastic: bool = False,
    seed: int = 0,
    offset: int | Tensor = 0,
    error: Tensor | None = None,
) -> Quantized:
    """The sum, or with ``mean`` the mean, of the parts, quantized: in one pass over memory.

    The parts are of one shape and format, none of them swizzled, at most 128. The result has their
    format unless another is given. They are added in fp32 in their order. ``error`` is as in
    ``quantize``. Raises UsageError, naming the argument or part.
    """
    if not parts:
        raise ArgumentError("parts is empty, expected a Quantized for each rank")
    first = parts[0]
    for i, part in enumerate(parts):
        if part.swizzle is not None:
            raise ArgumentError(
                f"parts[{i}] is swizzled: its pieces are to be reduced, not the whole"
            )
        ours, theirs = ((p.shape, p.bits, p.group_size, p.symmetric) for p in (part, first))
        if ours != theirs:
            raise ArgumentError(
                f"parts[{i}] has (shape, bits, group_size, symmetric) {ours}, parts[0] {theirs}"
            )
    bits = first.bits if bits is None else bits
    group_size = first.group_size if group_size is None else group_size
    symmetric = first.symmetric if symmetric is None else symmetric
    narrow_range = first.narrow_range if narrow_range is None else narrow_range
    number, later = _offset(offset)
    listed = (
        [part.values.contiguous() for part in parts],
        [part.scales.detach().contiguous() for part in parts],
        [part.offsets.detach().contiguous() for part in parts if part.offsets is not None],
        first.numel, first.bits, first.group_size, first.symmetric,
        1.0 / len(parts) if mean else 1.0, bits, group_size, symmetric, stochastic, seed, number,
        later, narrow_range,
    )  # fmt: skip
    if error is None:
        values, scales, offsets = call_checked(functions.quantized_reduce, *listed)
    else:
        _check_error(error, first.shape)
        values, scales, offsets = call_checked(
            functions.quantized_reduce_with_feedback, error, *listed
        )
    return Quantized(
        values, scales, None if symmetric else offsets, first.shape, first.dtype, bits, group_size,
        narrow_range=narrow_range,
    )  # fmt: skip


def _check_error(error: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(error.shape) != tuple(shape):
        raise ArgumentError(f"error has shape {tuple(error.shape)}, expected {tuple(shape)}")
    if not error.is_contiguous():
        raise ArgumentError("error is not contiguous", hint="torch.zeros(x.shape, device=x.device)")


def _offset(offset: int | Tensor) -> tuple[int, Tensor | None]:
    return (0, offset) if isinstance(offset, Tensor) else (offset, None)
