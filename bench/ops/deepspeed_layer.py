"""A training layer beside ``DeepSpeedTransformerLayer``: forward and backward, in fp16.

DeepSpeed's front end is the one file of its package; what that file imports of the package, a
builder and an accelerator, is given to it here, so that nothing has to be installed.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import harness
import torch
from deepspeed_build import SOURCES
from deepspeed_compared import Found, apart, failing
from harness import Row
from torch import Tensor, nn
from transformer_layer import Plain, Size

from opkiln.nn import TransformerLayer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from deepspeed_compared import Modules

EPS = 1e-5
AGREE = 64.0  # a chain of products and sums rounds many times
# Ours, and what DeepSpeed calls it.
PARAMETERS = {
    "qkv_weight": "attn_qkvw", "qkv_bias": "attn_qkvb", "out_weight": "attn_ow",
    "out_bias": "attn_ob", "mlp_norm_weight": "attn_nw", "mlp_norm_bias": "attn_nb",
    "up_weight": "inter_w", "up_bias": "inter_b", "down_weight": "output_w",
    "down_bias": "output_b", "attention_norm_weight": "norm_w", "attention_norm_bias": "norm_b",
}  # fmt: skip


def sizes(tiny: bool) -> list[Size]:
    return [Size(64, 16, 2)] if tiny else [Size(1024, 512, 32), Size(4096, 2048, 4)]


def compared(size: Size, modules: Modules, device: torch.device, repeats: int) -> Found:
    """As ``deepspeed_compared.compared``; errors are those of the output and all gradients, without
    dropout. The bytes are those of the parameters and the input."""
    name = f"layer {size}, fp16"
    found = Found(limit=AGREE)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    shape = (size.batch, size.sequence, size.hidden)
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(x)

    def made(p: float) -> TransformerLayer:
        drops = {"attention_dropout": p, "hidden_dropout": p}
        return TransformerLayer(
            size.hidden, size.heads, eps=EPS, device=device, dtype=dtype, **drops
        )

    def theirs(like: TransformerLayer, p: float) -> nn.Module:
        return _Theirs(modules("transformer"), size, p, like)

    plain = made(0.0)
    exact = _exact(plain, x, grad)
    makers: dict[str, Callable[[TransformerLayer, float], nn.Module]] = {
        "opkiln": lambda like, p: like if p == 0 else made(p),
        "DeepSpeed": theirs,
    }
    steps: dict[str, Callable[[], Any]] = {}
    for who, make in makers.items():
        with failing(name, who, found):
            found.errors[who] = apart(_step(make(plain, 0.0), x, grad), exact)
            module = make(made(0.1), 0.1)
            steps[who] = lambda module=module: len(_step(module, x, grad))
            steps[who]()
    for who, taken in harness.measured(steps, device, repeats).items():
        kept = x.nbytes + sum(each.nbytes for each in plain.parameters())
        found.rows.append(Row(name, who, kept, taken.ms, taken.host_ms))
    if device.type == "cuda":
        found.peaks.update({who: _peak(step) for who, step in steps.items()})
    return found


def _step(module: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and of the parameters in the order of ours."""
    by_name = dict(module.named_parameters())
    wanted = [
        by_name.get(ours, by_name.get(f"layer.{theirs}")) for ours, theirs in PARAMETERS.items()
    ]
    out = module(x)
    return [out.detach(), *torch.autograd.grad(out, [x, *wanted], grad)]


def _exact(layer: TransformerLayer, x: Tensor, grad: Tensor) -> list[Tensor]:
    """In float32 by torch, with the same parameters and no dropout."""
    wide = TransformerLayer(
        layer.hidden, layer.heads, eps=EPS, device=x.device, attention_dropout=0.0,
        hidden_dropout=0.0,
    )  # fmt: skip
    wide.load_state_dict(layer.state_dict())
    leaf = x.detach().float().requires_grad_()
    out = Plain(wide, 0.0)(leaf)
    wanted = [leaf, *(getattr(wide, name) for name in PARAMETERS)]
    return [out.detach(), *torch.autograd.grad(out, wanted, grad.float())]


def _peak(step: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


class _Theirs(nn.Module):
    """DeepSpeed's layer with the parameters of ours, and a mask that hides nothing."""

    def __init__(self, module: Any, size: Size, p: float, like: TransformerLayer) -> None:
        super().__init__()
        front = front_end(module, SOURCES)
        config = front.DeepSpeedTransformerConfig(
            batch_size=size.batch, hidden_size=size.hidden, intermediate_size=4 * size.hidden,
            heads=size.heads, attn_dropout_ratio=p, hidden_dropout_ratio=p, num_hidden_layers=1,
            initializer_range=0.02, layer_norm_eps=EPS, seed=7, fp16=True, pre_layer_norm=True,
        )  # fmt: skip
        self.layer = front.DeepSpeedTransformerLayer(config)
        for ours, theirs in PARAMETERS.items():
            setattr(self.layer, theirs, nn.Parameter(getattr(like, ours).detach().clone()))
        device = like.qkv_weight.device
        self.mask = torch.zeros(size.batch, 1, 1, size.sequence, device=device).half()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.mask)


def front_end(module: Any, root: Path) -> Any:
    """DeepSpeed's ``ops/transformer/transformer.py``, with a builder that gives this module."""
    if "deepspeed_transformer_layer" in sys.modules:
        return sys.modules["deepspeed_transformer_layer"]
    package, accelerator, ops, builders = (
        ModuleType(f"deepspeed{rest}") for rest in ("", ".accelerator", ".ops", ".ops.op_builder")
    )
    vars(accelerator)["get_accelerator"] = lambda: torch.cuda
    for name in ("TransformerBuilder", "StochasticTransformerBuilder"):
        vars(builders)[name] = lambda: SimpleNamespace(load=lambda: module)
    given = {each.__name__: each for each in (package, accelerator, ops, builders)}
    file = root / "deepspeed" / "ops" / "transformer" / "transformer.py"
    spec = importlib.util.spec_from_file_location("deepspeed_transformer_layer", file)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules, given):
        spec.loader.exec_module(made)
    sys.modules[spec.name] = made
    return made
