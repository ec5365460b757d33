"""One wheel of precompiled CPU ops on several torches.

    cpu_ops.py expected OUT           # what the references give, with this torch
    cpu_ops.py served EXPECTED DIR    # all ops of the wheel in DIR: loaded, called, compared

Nothing may compile in the second, and what serves must come from the wheel: ``run.py`` starts it
without a compiler on PATH. The same numbers go through the op's front end in both.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

from prebuilt import Checks, loaded, ops_in

import opkiln
from opkiln.settings import override


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stepped(kind: str) -> Callable[[], list[Tensor]]:
    """Three steps of an optimizer, over parameters of odd sizes."""

    def work() -> list[Tensor]:
        params = [numbers(size, seed=size).requires_grad_() for size in (7, 1000, 4099)]
        optimizer = getattr(opkiln.optim, kind)(params, lr=0.01, weight_decay=0.1)
        for step in range(3):
            for each in params:
                each.grad = numbers(each.numel(), seed=step)
            optimizer.step()
        return [each.detach() for each in params]

    return work


def read_back() -> list[Tensor]:
    given = {"weight": numbers(1000), "steps": torch.arange(7)}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "saved.safetensors")
        opkiln.io.save(given, path)
        found = opkiln.io.load(path)
    return [found[name] for name in given]


def pinned() -> list[Tensor]:
    pool = opkiln.io.PinnedPool("cpu")
    with pool.borrow((100,), torch.float32) as buffer:
        return [buffer.copy_(numbers(100)).clone()]


def int_quantized() -> list[Tensor]:
    packed = [opkiln.quant.quantize(numbers(4096), bits=bits, group_size=256) for bits in (8, 4)]
    return [t for each in packed for t in (each.values, each.scales, opkiln.quant.dequantize(each))]


def fp_quantized() -> list[Tensor]:
    quantizer = opkiln.quant.FPQuantizer("e3m2", group_size=256)
    packed = quantizer.quantize(numbers(16, 256))
    return [packed.codes, packed.scales, quantizer.dequantize(packed)]


def deepspeeds_quantized() -> list[Tensor]:
    functions = opkiln.get_builder("deepspeed_quantizer").load()
    return list(functions.deepspeed_quantize(numbers(4096), 16, 8, True, False, 1, 1, 1))


def signs() -> list[Tensor]:
    packed = opkiln.quant.packbits(numbers(1001))
    return [packed, opkiln.quant.unpackbits(packed, 1001)]


def tokens() -> list[Tensor]:
    from opkiln.nn import random_ltd

    x, indices = numbers(2, 16, 8), torch.tensor([[9, 1, 4], [0, 15, 3]])
    ordered = random_ltd.token_sort(indices, 16)
    part = random_ltd.token_gather(x, ordered)
    return [ordered, part, random_ltd.token_scatter(x, 2 * part, ordered)]


def reduced() -> list[Tensor]:
    from torch.distributed import HashStore

    with opkiln.comm.ShmGroup(HashStore(), 0, 1) as group:
        return [group.all_reduce(numbers(1000))]


def images() -> list[Tensor]:
    from opkiln.nn import spatial

    x, other = numbers(2, 4, 8, 8), numbers(2, 4, 8, 8, seed=1)
    return [spatial.spatial_bias_add(x, numbers(4), other, numbers(4, seed=2))]


def with_gradients(result: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [result.detach(), *torch.autograd.grad(result.square().sum(), inputs)]


def listed_blocks() -> list[Tensor]:
    from opkiln.nn import sparse_attention

    q, k, v = (numbers(1, 2, 64, 32, seed=seed).requires_grad_() for seed in range(3))
    layout = sparse_attention.Dense(16, causal=True)
    return with_gradients(sparse_attention.attention(q, k, v, layout), [q, k, v])


def alignments() -> list[Tensor]:
    q, k, v = (numbers(1, 3, 20, 2, 16, seed=seed).requires_grad_() for seed in range(3))
    return with_gradients(opkiln.nn.evoformer_attention(q, k, v), [q, k, v])


def decoder_pieces() -> list[Tensor]:
    from opkiln.nn import inference

    x, bias = numbers(3, 128), numbers(128, seed=1)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        a, b = x.to(dtype), bias.to(dtype)
        found += [inference.rms_norm(a, b), inference.bias_gelu(a, b), inference.gated_silu(a)]
    return found


def ways_to_gpus() -> list[Tensor]:
    return [torch.tensor([each.usable for each in opkiln.io.device_engines()])]


def flat() -> list[Tensor]:
    given = [numbers(3, 5), numbers(7, seed=1)]
    joined = opkiln.utils.flatten(given)
    written = [torch.zeros_like(each) for each in given]
    opkiln.utils.unflatten_into(joined, written)
    return [joined, *written]


WORK: dict[str, Callable[[], list[Tensor]]] = {
    "async_io": read_back,
    "cpu_adagrad": stepped("CPUAdagrad"),
    "cpu_adam": stepped("CPUAdam"),
    "cpu_lion": stepped("CPULion"),
    "deepspeed_quantizer": deepspeeds_quantized,
    "evoformer_attn": alignments,
    "fp_quantizer": fp_quantized,
    "fused_adam": stepped("FusedAdam"),
    "fused_lamb": stepped("FusedLamb"),
    "fused_lion": stepped("FusedLion"),
    "gds": ways_to_gpus,
    "packbits": signs,
    "pin_memory": pinned,
    "quantizer": int_quantized,
    "random_ltd": tokens,
    "shm_comm": reduced,
    "sparse_attn": listed_blocks,
    "spatial_inference": images,
    "transformer_inference": decoder_pieces,
    "utils": flat,
}


def expected(out: str) -> None:
    with override(mode="reference"):
        torch.save({op: [each.clone() for each in work()] for op, work in WORK.items()}, out)


def served(references: str, directory: Path) -> int:
    """The number of checks that failed. Every library of the wheel is opened, every op called."""
    sys.path.insert(0, str(directory))
    wanted = torch.load(references)
    libraries = ops_in(directory)
    check = Checks()

    def load(op: tuple[str, str]) -> str:
        artifact = loaded(op).artifact
        assert artifact is not None
        assert artifact.origin == "prebuilt", artifact
        assert Path(artifact.path).is_relative_to(directory), artifact
        return f"of {', '.join(libraries[op])}"

    def call(op: str) -> str:
        found = WORK[op]()
        assert len(found) == len(wanted[op])
        for ours, theirs in zip(found, wanted[op], strict=True):
            close = {torch.bfloat16: 2e-2}.get(ours.dtype, 2e-5)
            torch.testing.assert_close(ours, theirs, rtol=close, atol=close)
        return f"{len(found)} tensors as the reference gives them"

    with tempfile.TemporaryDirectory() as store, override(cache_dir=store, mode="sealed"):
        for op in libraries:
            check(f"load {op[0]}", load, op)
        ops = sorted({name.partition("__")[0] for name, _ in libraries})
        assert ops == sorted(WORK), set(ops) ^ set(WORK)
        for op in ops:
            check(f"call {op}", call, op)
    print(f"torch {torch.__version__}: {len(libraries)} libraries, {len(ops)} ops, "
          f"{check.failed} failed")  # fmt: skip
    return check.failed


if __name__ == "__main__":
    if sys.argv[1] == "expected":
        expected(sys.argv[2])
    else:
        sys.exit(bool(served(sys.argv[2], Path(sys.argv[3]).resolve())))
