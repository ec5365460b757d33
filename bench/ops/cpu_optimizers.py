"""Steps of the CPU optimizers beside torch's, DeepSpeed's and a plain streaming loop.

    .bench-venv/bin/python bench/ops/cpu_optimizers.py [--only WORD] [--out FILE]

All take turns in one process. The limit of a work is the plain loop over the same traffic
(``sources/optimizer_streams.cpp``). A bar that is missed makes the exit code 1. DeepSpeed is
measured where it can be imported.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import harness
import streams
import torch
from harness import Bar, Row
from torch import Tensor

from opkiln.optim import CPUAdagrad, CPUAdam, CPULion

if TYPE_CHECKING:
    from collections.abc import Callable

F32, BF16 = torch.float32, torch.bfloat16
ONE = [(64 << 20,)]
MIXED = [(1024,)] * 500 + [(512, 512)] * 100
MANY = [(257,)] * 10_000
LIMIT = "plain loop"
ADAM: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
LION: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.01}
ADAGRAD: dict[str, Any] = {"lr": 1e-2, "eps": 1e-10}


class Work(NamedTuple):
    """Parameters to step, and who steps them: bytes per element, and what makes a step of them."""

    name: str
    shapes: list[tuple[int, ...]]
    makers: dict[str, tuple[int, Callable[[list[Tensor]], Any]]]
    dtype: torch.dtype = F32
    repeats: int = 15

    def params(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        made = []
        for shape in self.shapes:
            param = torch.nn.Parameter(torch.randn(shape, generator=generator).to(self.dtype))
            param.grad = torch.randn(shape, generator=generator).to(self.dtype)
            made.append(param)
        return made

    def rows(self) -> list[Row]:
        steps = {}
        for who, (_, make) in self.makers.items():
            try:
                steps[who] = make(self.params())
                steps[who]()
            except ImportError as error:
                print(f"{self.name}: no {who} here: {error}", file=sys.stderr)
                steps.pop(who, None)
        elements = sum(param.numel() for param in self.params())
        taken = harness.timed(steps, "cpu", self.repeats)
        return [
            Row(self.name, who, elements * self.makers[who][0], ms) for who, ms in taken.items()
        ]


BARS = (
    Bar("AdamW, 64M fp32", "CPUAdam", LIMIT, 0.95, rates=True),
    Bar("AdamW, 600 tensors, 26.7M fp32", "CPUAdam", "torch fused", 1.25),
    Bar("AdamW, 600 tensors, 26.7M fp32", "CPUAdam", "DeepSpeed", 1.1),
    Bar("AdamW, 10,000 tensors of 257 fp32", "CPUAdam", "torch fused", 3.0),
    Bar("AdamW, 64M bf16", "CPUAdam, fp32 states", LIMIT, 0.9, rates=True),
    Bar("Adagrad, 64M fp32", "CPUAdagrad", LIMIT, 0.95, rates=True),
    Bar("Lion, 64M fp32", "CPULion", LIMIT, 0.95, rates=True),
)


def opkiln_step(kind: Any, options: dict[str, Any]) -> Callable[[list[Tensor]], Any]:
    return lambda params: kind(params, **options).step


def torch_step(name: str, options: dict[str, Any], **more: bool) -> Callable[[list[Tensor]], Any]:
    return lambda params: getattr(torch.optim, name)(params, **options, **more).step


def deepspeed_step(package: str, name: str, options: dict[str, Any]) -> Callable[..., Any]:
    def make(params: list[Tensor]) -> Any:
        from importlib import import_module

        return getattr(import_module(f"deepspeed.ops.{package}"), name)(params, **options).step

    return make


def plain(
    library: Path, function: str, states: int, numbers: tuple[float, ...], counted: bool = False
) -> Callable[[list[Tensor]], Any]:
    def make(params: list[Tensor]) -> Any:
        lists = [[p.data for p in params], [p.grad for p in params]]
        lists += [[torch.zeros_like(p.data, dtype=F32) for p in params] for _ in range(states)]
        return streams.stepping(library, function, lists, numbers, counted=counted)

    return make


def copied_out(params: list[Tensor]) -> Any:
    """A step with a bf16 copy of the parameters in the same pass."""
    copies = {param: torch.zeros_like(param, dtype=BF16, requires_grad=False) for param in params}
    optimizer = CPUAdam(params, **ADAM)
    return lambda: optimizer.step(copies=copies)


def copied_after(params: list[Tensor]) -> Any:
    """torch's, and the copies after it."""
    copies = [torch.zeros_like(param, dtype=BF16, requires_grad=False) for param in params]
    optimizer = torch.optim.AdamW(params, fused=True, **ADAM)

    def step() -> None:
        optimizer.step()
        for copy, param in zip(copies, params, strict=True):
            copy.copy_(param.detach())

    return step


def lion_in_torch(params: list[Tensor]) -> Any:
    """What one writes with torch, which has no Lion."""
    (beta1, beta2), lr, decay = LION["betas"], LION["lr"], LION["weight_decay"]
    averages = [torch.zeros_like(param.data) for param in params]

    def step() -> None:
        with torch.no_grad():
            for param, average in zip(params, averages, strict=True):
                assert param.grad is not None
                direction = average.lerp(param.grad, 1 - beta1).sign_()
                param.mul_(1 - lr * decay).sub_(direction, alpha=lr)
                average.lerp_(param.grad, 1 - beta2)

    return step


def sparse_rows(kind: Any, options: dict[str, Any]) -> Callable[[list[Tensor]], Any]:
    """Every eighth row of a table has a gradient."""

    def make(params: list[Tensor]) -> Any:
        for param in params:
            rows = torch.arange(0, len(param), 8)
            assert param.grad is not None
            param.grad = torch.sparse_coo_tensor(
                rows[None], param.grad[rows], param.shape, is_coalesced=True
            )
        return kind(params, **options).step

    return make


def works(library: Path) -> list[Work]:
    adam_numbers = (ADAM["lr"], *ADAM["betas"], ADAM["eps"], ADAM["weight_decay"])
    lion_numbers = (LION["lr"], *LION["betas"], LION["weight_decay"])
    adam_loop = plain(library, "adamw_stream", 2, adam_numbers, counted=True)
    adam = {
        "CPUAdam": (28, opkiln_step(CPUAdam, ADAM)),
        "torch fused": (28, torch_step("AdamW", ADAM, fused=True)),
        "DeepSpeed": (28, deepspeed_step("adam", "DeepSpeedCPUAdam", ADAM)),
        LIMIT: (28, adam_loop),
    }
    adagrad = {
        "CPUAdagrad": (20, opkiln_step(CPUAdagrad, ADAGRAD)),
        "torch fused": (20, torch_step("Adagrad", ADAGRAD, fused=True)),
        "torch foreach": (20, torch_step("Adagrad", ADAGRAD, foreach=True)),
        "DeepSpeed": (20, deepspeed_step("adagrad", "DeepSpeedCPUAdagrad", ADAGRAD)),
        LIMIT: (20, plain(library, "adagrad_stream", 1, tuple(ADAGRAD.values()))),
    }
    lion = {
        "CPULion": (20, opkiln_step(CPULion, LION)),
        "torch eager": (20, lion_in_torch),
        "DeepSpeed": (20, deepspeed_step("lion", "DeepSpeedCPULion", LION)),
        LIMIT: (20, plain(library, "lion_stream", 1, lion_numbers)),
    }
    return [
        Work("AdamW, 64M fp32", ONE, {**adam, "torch eager": (28, torch_step("AdamW", ADAM))}),
        Work("AdamW, 600 tensors, 26.7M fp32", MIXED, adam),
        Work("AdamW, 10,000 tensors of 257 fp32", MANY, adam),
        Work(
            "AdamW, 64M bf16",
            ONE,
            {
                "CPUAdam, fp32 states": (22, opkiln_step(CPUAdam, ADAM)),
                "CPUAdam, bf16 states": (
                    14,
                    opkiln_step(CPUAdam, {**ADAM, "fp32_optimizer_states": False}),
                ),
                "torch fused, bf16 states": (14, torch_step("AdamW", ADAM, fused=True)),
                "DeepSpeed, fp32 states": (22, deepspeed_step("adam", "DeepSpeedCPUAdam", ADAM)),
                LIMIT: (22, plain(library, "mixed_stream", 2, ())),
                # For what the memory gives to another mix of streams.
                f"{LIMIT}, fp32": (28, lambda params: adam_loop(_wide(params))),
            },
            BF16,
        ),
        Work(
            "AdamW, 64M fp32 and a bf16 copy",
            ONE,
            {"CPUAdam": (30, copied_out), "torch fused, then copy_": (30, copied_after)},
        ),
        Work("Adagrad, 64M fp32", ONE, adagrad),
        Work("Adagrad, 600 tensors, 26.7M fp32", MIXED, adagrad),
        Work(
            "Adagrad, an eighth of 1M rows of 64",
            [(1 << 20, 64)],
            {
                "CPUAdagrad": (20 // 8, sparse_rows(CPUAdagrad, ADAGRAD)),
                "torch": (20 // 8, sparse_rows(torch.optim.Adagrad, ADAGRAD)),
            },
            repeats=5,
        ),
        Work("Lion, 64M fp32", ONE, lion),
        Work("Lion, 600 tensors, 26.7M fp32", MIXED, lion),
    ]


def _wide(params: list[Tensor]) -> list[Tensor]:
    wide = [torch.nn.Parameter(param.detach().float()) for param in params]
    for new, old in zip(wide, params, strict=True):
        assert old.grad is not None
        new.grad = old.grad.float()
    return wide


def main() -> int:
    options = harness.options(__doc__)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        library = Path(scratch) / "optimizer_streams.so"
        subprocess.run(streams.compiling(library), check=True)
        bandwidth = harness.copy_bandwidth("cpu")
        for work in works(library):
            if options.only in work.name:
                rows += work.rows()
    harness.report(rows, bandwidth, options.out, commit=options.commit)
    return 1 if harness.missed(BARS, rows, bandwidth) else 0


if __name__ == "__main__":
    sys.exit(main())
