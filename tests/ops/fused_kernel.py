"""The fused optimizers' CUDA kernels on the CPU, with the interface of their references."""

from __future__ import annotations

import ctypes
import math
import subprocess
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_bool,
    c_double,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)  # fmt: skip
from pathlib import Path
from typing import Any

import torch
from stand_in import compile_command
from torch import Tensor

import opkiln
from opkiln.optimizing.op_calls import Status

HERE = Path(__file__).parent
PACKAGE = Path(opkiln.__file__).parent
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Item(Structure):
    _fields_ = (
        ("param", c_void_p), ("first_state", c_void_p), ("second_state", c_void_p),
        ("master", c_void_p), ("numel", c_int64), ("first", c_uint32), ("step", c_uint32),
        ("param_type", c_uint8), ("fours", c_bool),
    )  # fmt: skip


class _Items(Structure):
    _fields_ = (
        ("items", POINTER(_Item)), ("gradients", POINTER(c_uint64)), ("count", c_size_t),
        ("steps", POINTER(c_void_p)), ("step_count", c_size_t),
    )  # fmt: skip


_NUMBERS = (
    ("lr", c_double), ("lr_float", c_void_p), ("lr_double", c_void_p), ("grad_scale", c_void_p),
    ("found_inf", c_void_p),
)  # fmt: skip


class _Adam(Structure):
    _fields_ = (
        ("beta1", c_double), ("log_beta1", c_double), ("beta2", c_double), ("log_beta2", c_double),
        ("eps", c_double), ("weight_decay", c_double), ("adamw_mode", c_bool),
        ("bias_correction", c_bool), ("maximize", c_bool), *_NUMBERS,
    )  # fmt: skip


class _Lion(Structure):
    _fields_ = (
        ("beta1", c_double), ("beta2", c_double), ("weight_decay", c_double),
        ("maximize", c_bool), *_NUMBERS,
    )  # fmt: skip


class _Lamb(Structure):
    _fields_ = (
        ("beta1", c_double), ("log_beta1", c_double), ("beta2", c_double), ("log_beta2", c_double),
        ("eps", c_double), ("weight_decay", c_double), ("min_coeff", c_double),
        ("max_coeff", c_double), ("eps_inside_sqrt", c_bool), ("bias_correction", c_bool),
        ("maximize", c_bool), *_NUMBERS,
    )  # fmt: skip


def compiled(op: str, directory: Path) -> Path:
    """The op's kernels as a library that a C++ compiler made; skips where there is none."""
    library = directory / f"{op}.so"
    subprocess.run(
        [
            *compile_command(), "-pthread",
            # An access of four elements at an address that does not allow it is a fault on a GPU.
            "-fsanitize=alignment,bounds",
            f"-I{HERE / 'cuda_on_cpu'}", f"-I{PACKAGE}", f"-I{PACKAGE / 'csrc'}",
            HERE / f"{op}_on_cpu.cpp", "-o", library,
        ],
        check=True,
    )  # fmt: skip
    return library


class Kernel:
    """An op's kernels as a library. ``launches`` says how many the last step took."""

    def __init__(self, op: str, directory: Path) -> None:
        self._loaded = ctypes.CDLL(str(compiled(op, directory)))
        hyper = {"fused_adam": _Adam, "fused_lion": _Lion, "fused_lamb": _Lamb}[op]
        for function, mirror in (
            (self._loaded.item_bytes, _Item),
            (self._loaded.hyper_bytes, hyper),
        ):
            function.restype = c_size_t
            assert function() == ctypes.sizeof(mirror), "plan.h or kernel.h was changed: mirror it"
        self.launches = 0

    def _run(
        self, hyper: Structure, params: list[Tensor], grads: list[Tensor],
        states: list[list[Tensor]], masters: list[Tensor], steps: list[Tensor], *more: Any,
        function: str = "run",
    ) -> None:  # fmt: skip
        items = (_Item * len(params))()
        for i, param in enumerate(params):
            pointers = [row[i].data_ptr() for row in states]
            master = masters[i].data_ptr() if masters and masters[i].numel() else 0
            here = [(param.data_ptr(), param.element_size()), *((at, 4) for at in pointers)]
            fours = all(at % (4 * size) == 0 for at, size in [*here, (master, 4)])
            second = pointers[1] if len(pointers) > 1 else None
            items[i] = _Item(
                param.data_ptr(), pointers[0], second, master or None, param.numel(), 0,
                i if len(steps) > 1 else 0, _TYPES[param.dtype], fours,
            )  # fmt: skip
        words = [grad.data_ptr() | _TYPES[grad.dtype] << 62 for grad in grads]
        counts = (c_void_p * len(steps))(*(step.data_ptr() for step in steps))
        given = _Items(items, (c_uint64 * len(words))(*words), len(params), counts, len(steps))
        self.launches = getattr(self._loaded, function)(byref(hyper), given, *more)
        assert self.launches >= 0

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
        **numbers: Tensor | None,
    ) -> None:
        hyper = _Adam(
            beta1, _log(beta1), beta2, _log(beta2), eps, weight_decay, adamw_mode,
            bias_correction, maximize, *_numbers(lr, **numbers),
        )  # fmt: skip
        self._run(hyper, params, grads, [exp_avgs, exp_avg_sqs], masters, steps)

    def fused_lion_(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        masters: list[Tensor],
        steps: list[Tensor],
        lr: float,
        beta1: float,
        beta2: float,
        weight_decay: float,
        maximize: bool,
        **numbers: Tensor | None,
    ) -> None:
        hyper = _Lion(beta1, beta2, weight_decay, maximize, *_numbers(lr, **numbers))
        self._run(hyper, params, grads, [exp_avgs], masters, steps)

    def fused_lamb_(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        masters: list[Tensor],
        steps: list[Tensor],
        coefficients: Tensor,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        eps_inside_sqrt: bool,
        bias_correction: bool,
        maximize: bool,
        min_coeff: float,
        max_coeff: float,
        **numbers: Tensor | None,
    ) -> None:
        hyper = _Lamb(
            beta1, _log(beta1), beta2, _log(beta2), eps, weight_decay, min_coeff, max_coeff,
            eps_inside_sqrt, bias_correction, maximize, *_numbers(lr, **numbers),
        )  # fmt: skip
        out = c_void_p(coefficients.data_ptr())
        self._run(hyper, params, grads, [exp_avgs, exp_avg_sqs], masters, steps, out)

    def fused_lamb_average_(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        masters: list[Tensor],
        steps: list[Tensor],
        squares: Tensor,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        eps_inside_sqrt: bool,
        bias_correction: bool,
        maximize: bool,
        **numbers: Tensor | None,
    ) -> None:
        hyper = _Lamb(
            beta1, _log(beta1), beta2, _log(beta2), eps, weight_decay, 0, 0, eps_inside_sqrt,
            bias_correction, maximize, *_numbers(0, **numbers),
        )  # fmt: skip
        self._run(
            hyper, params, grads, [exp_avgs, exp_avg_sqs], masters, steps,
            c_void_p(squares.data_ptr()), function="run_average",
        )  # fmt: skip

    def fused_lamb_move_(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        masters: list[Tensor],
        steps: list[Tensor],
        squares: Tensor,
        coefficients: Tensor,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        eps_inside_sqrt: bool,
        bias_correction: bool,
        min_coeff: float,
        max_coeff: float,
        **numbers: Tensor | None,
    ) -> None:
        hyper = _Lamb(
            beta1, _log(beta1), beta2, _log(beta2), eps, weight_decay, min_coeff, max_coeff,
            eps_inside_sqrt, bias_correction, False, *_numbers(lr, **numbers),
        )  # fmt: skip
        self._run(
            hyper, params, grads, [exp_avgs, exp_avg_sqs], masters, steps,
            c_void_p(squares.data_ptr()), c_void_p(coefficients.data_ptr()), function="run_move",
        )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        """The planned form of an op, over lists that are kept in place of a plan."""
        op, _, what = name.rpartition("_plan")
        if what == "":
            # Detached, so that they stay where they are, as addresses do.
            return lambda *lists: (
                _Kept(tuple([t.detach() for t in row] for row in lists)),
                torch.zeros(1),
            )
        if what == "ned_":
            step = getattr(self, f"{op}_")

            def planned(plan: _Kept, _: Tensor, grads: list[Tensor], **hyper: Any) -> int:
                step(plan.lists[0], grads, *plan.lists[2:], **hyper)
                return Status.MADE

            return planned
        raise AttributeError(name)


class _Kept:
    def __init__(self, lists: tuple[list[Tensor], ...]) -> None:
        self.lists = lists


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf


def _numbers(
    lr: float, lr_tensor: Tensor | None = None, grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    wide = lr_tensor is not None and lr_tensor.dtype == torch.float64
    return (
        lr, None if wide else _pointer(lr_tensor), _pointer(lr_tensor) if wide else None,
        _pointer(grad_scale), _pointer(found_inf),
    )  # fmt: skip


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
