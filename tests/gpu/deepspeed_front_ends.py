"""DeepSpeed's layers on opkiln's ops on a GPU: one line per check. Needs DeepSpeed, and no pytest.

    TORCH_CUDA_ARCH_LIST=9.0a PYTHONPATH=src python tests/gpu/deepspeed_front_ends.py
        [--deepspeed-kernels FOLDER] [--only WORD]

Results are compared with float64, and with those of DeepSpeed's own kernels: the extension modules
``transformer.so``, ``transformer_inference.so`` and ``random_ltd.so`` in FOLDER, or ``engine``, and
opkiln's engine builds them of DeepSpeed's sources, which takes minutes. DeepSpeed may be a folder
on PYTHONPATH, see tests/with_deepspeed/folder.py.
The exit code is 0 when every check passed or says why it could not be made, otherwise 1.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from checks import Skipped, main
from torch import Tensor
from torch.nn import functional

import opkiln.compat.deepspeed as on_opkiln
from opkiln.errors import OpkilnError, UsageError

DEVICE = "cuda"
HIDDEN, HEADS, WIDE, EPS = 256, 4, 512, 1e-5
# How far a result may be from float64, of its own length: a chain of sums rounds many times.
NEAR = {torch.float32: 2e-4, torch.float16: 2**-8, torch.bfloat16: 2**-5}
OWN = SimpleNamespace(kernels="")  # what the command line says


@cache
def builders() -> Any:
    """DeepSpeed's builders on opkiln, from here on."""
    try:
        on_opkiln.install()
    except UsageError as error:
        raise Skipped(error.what) from error
    from deepspeed.ops.op_builder.random_ltd import RandomLTDBuilder
    from deepspeed.ops.op_builder.stochastic_transformer import StochasticTransformerBuilder
    from deepspeed.ops.op_builder.transformer import TransformerBuilder
    from deepspeed.ops.op_builder.transformer_inference import InferenceBuilder

    return SimpleNamespace(
        random_ltd=RandomLTDBuilder,
        stochastic_transformer=StochasticTransformerBuilder,
        transformer=TransformerBuilder,
        transformer_inference=InferenceBuilder,
    )


def opkilns(name: str) -> Any:
    """opkiln's module for one of DeepSpeed's ops."""
    module = getattr(builders(), name)().load()
    assert on_opkiln.served()[name].origin == "ops"
    return module


@cache
def deepspeeds(name: str) -> Any:
    """DeepSpeed's own module. Raises Skipped where there is none."""
    if not OWN.kernels:
        raise Skipped("--deepspeed-kernels does not say where DeepSpeed's own kernels are")
    if OWN.kernels == "engine":
        from opkiln.compat.deepspeed import engine

        try:
            return engine.load(getattr(builders(), name)())
        except OpkilnError as error:
            raise Skipped(f"{name} does not compile: {error.what}") from error
    for file in sorted(Path(OWN.kernels).glob("*.so")):
        own = file.name.partition(".")[0]
        if own in (name, f"{name}_op", f"deepspeed_{name}"):
            spec = spec_from_loader(own, ExtensionFileLoader(own, str(file)))
            assert spec is not None
            assert spec.loader is not None
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    raise Skipped(f"{OWN.kernels} has no {name}.so")


def apart(one: Tensor, other: Tensor) -> float:
    """The distance of two tensors, of the length of the second."""
    one, other = one.detach().double(), other.detach().double()
    return float((one - other).norm() / other.norm())


def told(worst: dict[Any, float]) -> str:
    names = {each: str(each).removeprefix("torch.") for each in worst}
    return ", ".join(f"{names[each]} {found:.2g}" for each, found in worst.items())


# The training layer


def training_layer(module: Any, dtype: torch.dtype, dropout: float = 0.0, **words: bool) -> Any:
    """DeepSpeed's layer on a module. The same seed gives the same parameters."""
    builders()
    from deepspeed.ops.transformer import transformer as theirs

    name = "stochastic_" if words.get("stochastic_mode") else ""
    setattr(theirs, f"{name}transformer_cuda_module", module)
    torch.manual_seed(1)
    config = theirs.DeepSpeedTransformerConfig(
        batch_size=4, hidden_size=HIDDEN, intermediate_size=WIDE, heads=HEADS,
        num_hidden_layers=1, initializer_range=0.05, layer_norm_eps=EPS, seed=3,
        attn_dropout_ratio=dropout, hidden_dropout_ratio=dropout, fp16=dtype == torch.float16,
        **words,
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its configuration
        layer = theirs.DeepSpeedTransformerLayer(config)
    for each in layer.parameters():
        each.data.add_(torch.randn(each.shape), alpha=0.05)
    return layer.to(DEVICE, dtype)


def batch(dtype: torch.dtype, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, their mask, and a gradient."""
    torch.manual_seed(2)
    x = torch.randn(4, tokens, HIDDEN).to(DEVICE, dtype).requires_grad_()
    mask = torch.zeros(4, 1, 1, tokens)
    mask[1, ..., -5:] = -10000.0
    return x, mask.to(DEVICE, dtype), torch.randn(x.shape).to(DEVICE, dtype)


def trained(layer: Any, x: Tensor, mask: Tensor, grad: Tensor) -> list[Tensor]:
    """The output, and the gradients of input and parameters."""
    out = layer(x, mask)
    return [out, *torch.autograd.grad(out, [x, *layer.parameters()], grad)]


def exact_training(layer: Any, x: Tensor, mask: Tensor, grad: Tensor) -> list[Tensor]:
    """As ``trained``, with torch alone, in float64."""
    w = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    x = x.detach().double().requires_grad_()

    def norm(y: Tensor, name: str) -> Tensor:
        return functional.layer_norm(y, (HIDDEN,), w[f"{name}w"], w[f"{name}b"], EPS)

    def attention(y: Tensor) -> Tensor:
        parts = functional.linear(y, w["attn_qkvw"], w["attn_qkvb"]).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        shares = (q @ k.mT / (HIDDEN // HEADS) ** 0.5 + mask.double()).softmax(-1)
        return functional.linear(
            (shares @ v).transpose(1, 2).flatten(2), w["attn_ow"], w["attn_ob"]
        )

    def mlp(y: Tensor) -> Tensor:
        wide = functional.gelu(functional.linear(y, w["inter_w"], w["inter_b"]), approximate="tanh")
        return functional.linear(wide, w["output_w"], w["output_b"])

    if layer.config.pre_layer_norm:
        y = x + attention(norm(x, "norm_"))
        out = y + mlp(norm(y, "attn_n"))
    else:
        y = norm(x + attention(x), "attn_n")
        out = norm(y + mlp(y), "norm_")
    return [out, *torch.autograd.grad(out, [x, *w.values()], grad.double())]


FLAGS = ("normalize_invertible", "gelu_checkpoint", "attn_dropout_checkpoint")


def check_training_layers_are_near_to_float64() -> str:
    """With each flag; sequences of 77 are padded by DeepSpeed."""
    worst = dict.fromkeys(NEAR, 0.0)
    for dtype, pre, again, relaxed in product(NEAR, *[(True, False)] * 3):
        words = {**dict.fromkeys(FLAGS, again), "stochastic_mode": relaxed}
        module = opkilns("stochastic_transformer" if relaxed else "transformer")
        layer = training_layer(module, dtype, pre_layer_norm=pre, **words)
        for tokens in (128, 77):
            given = batch(dtype, tokens)
            for one, other in zip(
                trained(layer, *given), exact_training(layer, *given), strict=True
            ):
                assert one.dtype == dtype
                far = apart(one, other)
                # The approximate tanh is good for 16 bits.
                limit = max(NEAR[dtype], NEAR[torch.float16]) if relaxed else NEAR[dtype]
                assert far <= limit, (dtype, pre, again, relaxed, tokens, far)
                if not relaxed:
                    worst[dtype] = max(worst[dtype], far)
    return told(worst)


def check_training_layers_drop_the_same_when_they_compute_again() -> None:
    module = opkilns("transformer")
    for dtype in (torch.float32, torch.float16):
        given = batch(dtype, 128)
        results = []
        for again in (False, True):
            layer = training_layer(module, dtype, dropout=0.2, **dict.fromkeys(FLAGS, again))
            torch.manual_seed(5)
            results.append(trained(layer, *given))
        for one, other in zip(*results, strict=True):
            assert apart(one, other) <= NEAR[dtype]
        far = apart(results[0][0], exact_training(layer, *given)[0])
        assert far > 0.05, far  # something was dropped
        layer.eval()
        with torch.no_grad():
            one, other = layer(*given[:2]), layer(*given[:2])
        assert torch.equal(one, other)
        assert apart(one, exact_training(layer, *given)[0]) <= NEAR[dtype]


def check_training_layers_equal_deepspeeds_kernels() -> str:
    """Both in their distance from float64, and from each other."""
    own, ours = deepspeeds("transformer"), opkilns("transformer")
    said = []
    for dtype, pre in product((torch.float32, torch.float16), (True, False)):
        given = batch(dtype, 128)
        mine = trained(training_layer(ours, dtype, pre_layer_norm=pre), *given)
        layer = training_layer(own, dtype, pre_layer_norm=pre)
        theirs = trained(layer, *given)
        exact = exact_training(layer, *given)
        near, far, between = (
            max(apart(one, other) for one, other in zip(*pair, strict=True))
            for pair in ((mine, exact), (theirs, exact), (mine, theirs))
        )
        said.append(f"{dtype} {'pre' if pre else 'post'}: {near:.2g}, {far:.2g}, {between:.2g}")
        assert between <= 4 * max(NEAR[dtype], far), said[-1]
    return "opkiln's, DeepSpeed's, between them: " + "; ".join(said)


# The inference layer

PROMPT, STEPS = 37, 5


def generated(module: Any, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """What two layers give for a prompt and for single tokens; and in float64, with torch alone."""
    builders()
    from deepspeed.model_implementations.transformers.ds_transformer import (
        DeepSpeedTransformerInference,
    )
    from deepspeed.ops.transformer.inference.config import DeepSpeedInferenceConfig
    from deepspeed.ops.transformer.inference.ds_attention import DeepSpeedSelfAttention
    from deepspeed.ops.transformer.inference.op_binding.base import BaseOp

    BaseOp.inference_module = module
    DeepSpeedTransformerInference.layer_id = 0
    DeepSpeedTransformerInference.workspace = None
    DeepSpeedSelfAttention.num_layers = 0
    torch.manual_seed(0)
    layers = []
    for _ in range(2):
        config = DeepSpeedInferenceConfig(
            hidden_size=HIDDEN, intermediate_size=WIDE, heads=HEADS, num_hidden_layers=2,
            layer_norm_eps=EPS, dtype=dtype, max_out_tokens=64, return_tuple=False,
        )  # fmt: skip
        with contextlib.redirect_stdout(io.StringIO()):
            layers.append(DeepSpeedTransformerInference(config).to(DEVICE))
        for each in layers[-1].parameters():
            each.data.copy_(torch.randn(each.shape) * 0.06)
    found, expected = [], []
    caches: list[list[Tensor]] = [[], []]
    for tokens in (PROMPT, *[1] * STEPS):
        x = torch.randn(2, tokens, HIDDEN).to(DEVICE, dtype)
        exact = x.double()
        for layer, cache_ in zip(layers, caches, strict=True):
            x = layer(x)
            exact = exact_inference(layer, exact, cache_)
        found.append(x)
        expected.append(exact)
    return found, expected


def exact_inference(layer: Any, x: Tensor, seen: list[Tensor]) -> Tensor:
    """One layer in float64. ``seen`` has its keys and values so far."""
    w = {name.rpartition(".")[2]: p.double() for name, p in layer.named_parameters()}

    def norm(y: Tensor, name: str) -> Tensor:
        return functional.layer_norm(y, (HIDDEN,), w[f"{name}w"], w[f"{name}b"], EPS)

    parts = (norm(x, "norm_") @ w["attn_qkvw"] + w["attn_qkvb"]).chunk(3, -1)
    q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
    if seen:
        k, v = torch.cat((seen[0], k), 2), torch.cat((seen[1], v), 2)
    seen[:] = k, v
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
    y = x + out.transpose(1, 2).flatten(2) @ w["attn_ow"] + w["attn_ob"]
    wide = functional.gelu(norm(y, "attn_n") @ w["inter_w"] + w["inter_b"], approximate="tanh")
    return y + wide @ w["output_w"] + w["output_b"]


def check_inference_layers_are_near_to_float64() -> str:
    worst = dict.fromkeys(NEAR, 0.0)
    for dtype, near in NEAR.items():
        for one, other in zip(*generated(opkilns("transformer_inference"), dtype), strict=True):
            assert one.dtype == dtype
            worst[dtype] = max(worst[dtype], apart(one, other))
        assert worst[dtype] <= near, (dtype, worst[dtype])
    return told(worst)


def check_inference_layers_equal_deepspeeds_kernels() -> str:
    own, ours = deepspeeds("transformer_inference"), opkilns("transformer_inference")
    said = []
    for dtype, limit in NEAR.items():
        mine, exact = generated(ours, dtype)
        theirs, _ = generated(own, dtype)
        near, far, between = (
            max(apart(one, other) for one, other in zip(*pair, strict=True))
            for pair in ((mine, exact), (theirs, exact), (mine, theirs))
        )
        said.append(f"{dtype}: {near:.2g}, {far:.2g}, {between:.2g}")
        assert between <= 4 * max(limit, far), said[-1]
    return "opkiln's, DeepSpeed's, between them: " + "; ".join(said)


# Random-LTD


def dropped(module: Any, dtype: torch.dtype, batch_first: bool) -> list[Tensor]:
    """Tokens that DeepSpeed's functions draw; what they gather and scatter; and gradients."""
    builders()
    from deepspeed.ops.random_ltd import dropping_utils as theirs

    theirs.random_ltd_module = module
    torch.manual_seed(4)
    indices, mask = theirs.gpt_sample_tokens(
        48, 128, 3, 2, DEVICE, torch.ones(3, 1, 128, 128, device=DEVICE).tril()
    )
    shape = (3, 128, 64) if batch_first else (128, 3, 64)
    x = torch.randn(shape).to(DEVICE, dtype).requires_grad_()
    whole, part = theirs.GatherTokens.apply(x, indices[0], batch_first)
    out = theirs.ScatterTokens.apply(whole, 2 * part, indices[0], batch_first)
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    return [indices, mask, part, out, grad]


def check_random_ltd_is_torchs_indexing() -> None:
    for dtype, batch_first in product(NEAR, (True, False)):
        indices, mask, part, out, grad = dropped(opkilns("random_ltd"), dtype, batch_first)
        assert torch.equal(indices, indices.sort(-1).values)
        assert mask.shape == (3, 1, 48, 48)
        part, out, grad = (
            each if batch_first else each.transpose(0, 1) for each in (part, out, grad)
        )
        at = indices[0].long()[..., None].expand(-1, -1, 64)
        # Those that were gathered are doubled; the others passed by. The draws are repeated.
        torch.manual_seed(4)
        torch.multinomial(torch.ones(6, 128, device=DEVICE), 48)
        shape = (3, 128, 64) if batch_first else (128, 3, 64)
        x = torch.randn(shape).to(DEVICE, dtype)
        x = x if batch_first else x.transpose(0, 1)
        assert torch.equal(part, x.gather(1, at))
        assert torch.equal(out, x.scatter(1, at, 2 * x.gather(1, at)))
        # DeepSpeed's gradient of the gathered ones takes the place of the others'.
        assert torch.equal(grad, torch.ones_like(x).scatter(1, at, 2.0))


def check_random_ltd_equals_deepspeeds_kernels() -> str:
    own, ours = deepspeeds("random_ltd"), opkilns("random_ltd")
    compared = 0
    for dtype, batch_first in product((torch.float32, torch.float16), (True, False)):
        for one, other in zip(
            dropped(ours, dtype, batch_first), dropped(own, dtype, batch_first), strict=True
        ):
            assert torch.equal(one, other), (dtype, batch_first)
            compared += one.numel()
    return f"{compared} numbers, bit for bit"


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--deepspeed-kernels", default="", metavar="FOLDER")
    options, rest = parser.parse_known_args()
    OWN.kernels = options.deepspeed_kernels
    sys.argv[1:] = rest
    sys.exit(main(CHECKS, __doc__))
