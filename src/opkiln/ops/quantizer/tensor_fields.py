"""Records of tensors that move like one tensor: what ``Quantized`` and ``FPQuantized`` share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

import opkiln
from opkiln.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

_Record = TypeVar("_Record", bound=Any)  # a NamedTuple with a field ``dtype``
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

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
        if dtype not in _DTYPES:
            raise UsageError(f"dtype is {dtype}, expected float32, bfloat16 or float16")
        record = record._replace(dtype=dtype)
    if device is None:
        return record
    return each_tensor(record, lambda tensor: tensor.to(device, non_blocking=non_blocking))
