"""DeepSpeed's module ``deepspeed_shm_comm``, over opkiln's ``shm_comm``.

DeepSpeed's ``dist.inference_all_reduce`` calls ``torch.ops.deepspeed.inference_all_reduce_``, which
its library registers; this module registers it in its place. As in DeepSpeed, it sums over all
ranks and ignores the group. docs/deepspeed.md says what differs.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opkiln.errors import ClusterError, FallbackWarning
from opkiln.ops.shm_comm.group import ShmGroup

_NAMESPACE = "deepspeed"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# The group of this process. As in DeepSpeed there is one, because operators take no group.
_group: ShmGroup | None = None
_library: Any = None


def initialize(size: int, rank: int) -> None:
    """Let the ranks of torch.distributed's default group share memory, if they are on one host.
    Calling it again has no effect."""
    global _group
    _register()
    if _group is not None or size == 1:
        return
    default = dist.distributed_c10d._get_default_group()
    if (size, rank) != (default.size(), default.rank()):
        raise RuntimeError(
            f"initialize: rank {rank} of {size} was given, but torch.distributed has rank "
            f"{default.rank()} of {default.size()}"
        )
    try:
        _group = ShmGroup.of(default)
    except ClusterError as error:
        warnings.warn(
            f"deepspeed_shm_comm: torch.distributed does the sums: {error.what}",
            FallbackWarning,
            stacklevel=3,  # torch.no_grad is in between
        )


def vector_kernel_level() -> int:
    """2: every CPU has all kernels. DeepSpeed's need AVX2 (1) or AVX-512 (2)."""
    return 2


def _sum_(x: Tensor) -> Tensor:
    if _group is not None and x.dtype in _DTYPES:
        return _group.all_reduce_(x)
    if dist.is_initialized():
        whole = x.contiguous()
        dist.all_reduce(whole)
        if whole is not x:
            x.copy_(whole)
    return x


def _sum(x: Tensor) -> Tensor:
    return _sum_(x.clone(memory_format=torch.contiguous_format))


def _register() -> None:
    """Define DeepSpeed's two operators, unless its own library has."""
    global _library
    if _library is not None or hasattr(torch.ops.deepspeed, "inference_all_reduce_"):
        return
    _library = torch.library.Library(_NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    _library.define("inference_all_reduce(Tensor self) -> Tensor")
    _library.define("inference_all_reduce_(Tensor(a!) self) -> Tensor(a!)")
    _library.impl("inference_all_reduce", _sum, "CPU")
    _library.impl("inference_all_reduce_", _sum_, "CPU")
    _library.impl("inference_all_reduce", torch.empty_like, "Meta")
    _library.impl("inference_all_reduce_", lambda x: x, "Meta")
    torch.library.register_autograd(
        f"{_NAMESPACE}::inference_all_reduce",
        lambda _, grad: torch.ops.deepspeed.inference_all_reduce(grad),
        lib=_library,
    )
