"""fused_adam's CUDA kernels on the CPU, with the interface of the reference."""

from __future__ import annotations

import ctypes
import math
from ctypes import POINTER, Structure, byref, c_bool, c_double, c_int64, c_size_t, c_uint8, c_void_p
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pathlib import Path

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Item(Structure):
    _fields_ = (
        ("param", c_void_p), ("grad", c_void_p), ("exp_avg", c_void_p), ("exp_avg_sq", c_void_p),
        ("master", c_void_p), ("step", c_void_p), ("numel", c_int64), ("param_type", c_uint8),
        ("grad_type", c_uint8), ("fours", c_bool),
    )  # fmt: skip


class _Hyper(Structure):
    _fields_ = (
        ("beta1", c_double), ("log_beta1", c_double), ("beta2", c_double), ("log_beta2", c_double),
        ("eps", c_double), ("weight_decay", c_double), ("lr", c_double), ("lr_float", c_void_p),
        ("lr_double", c_void_p), ("grad_scale", c_void_p), ("found_inf", c_void_p),
        ("adamw_mode", c_bool), ("bias_correction", c_bool), ("maximize", c_bool),
    )  # fmt: skip


class Kernel:
    """The kernels as a library that a C++ compiler made. ``launches`` says how many a call took."""

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        self._run = loaded.run
        self._run.argtypes = (
            POINTER(_Hyper),
            POINTER(_Item),
            c_size_t,
            POINTER(c_void_p),
            c_size_t,
        )
        for function, mirror in ((loaded.item_bytes, _Item), (loaded.hyper_bytes, _Hyper)):
            function.restype = c_size_t
            assert function() == ctypes.sizeof(mirror), "kernel.h was changed, but not this file"
        self.launches = 0

    def fused_adam_(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        masters: list[Tensor],
        steps: list[Tensor],
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        adamw_mode: bool,
        bias_correction: bool,
        maximize: bool,
        lr_tensor: Tensor | None = None,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        items = (_Item * len(params))()
        for i, param in enumerate(params):
            items[i] = _Item(
                param.data_ptr(), grads[i].data_ptr(), exp_avgs[i].data_ptr(),
                exp_avg_sqs[i].data_ptr(), masters[i].data_ptr() if masters else None,
                steps[i % len(steps)].data_ptr(), param.numel(), _TYPES[param.dtype],
                _TYPES[grads[i].dtype], False,
            )  # fmt: skip
        wide = lr_tensor is not None and lr_tensor.dtype == torch.float64
        hyper = _Hyper(
            beta1, _log(beta1), beta2, _log(beta2), eps, weight_decay, lr,
            None if wide else _pointer(lr_tensor), _pointer(lr_tensor) if wide else None,
            _pointer(grad_scale), _pointer(found_inf), adamw_mode, bias_correction, maximize,
        )  # fmt: skip
        counts = (c_void_p * len(steps))(*(step.data_ptr() for step in steps))
        self.launches = self._run(byref(hyper), items, len(items), counts, len(counts))
        assert self.launches >= 0


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
