"""DeepSpeed's swapper of tensors, its Evoformer attention and its all-reduce, under `opkiln run`.

They need an interpreter that has DeepSpeed, as ``test_compat_deepspeed_itself.py`` does.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from deepspeed_programs import PYTHON, Programs

if PYTHON is None:
    pytest.skip("there is no DeepSpeed here: make test-deepspeed", allow_module_level=True)

RANKS = (str(PYTHON), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(tmp_path / "cache", tmp_path)


def run(programs: Programs, code: str, *launcher: str) -> list[Any]:
    """What a program prints behind ANSWER, started by ``opkiln run``."""
    (programs.folder / "program.py").write_text(textwrap.dedent(code))
    command = (*(launcher or (str(PYTHON),)), "program.py")
    done = programs.run("-m", "opkiln", "run", *command)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = done.stdout.splitlines()
    return [json.loads(line.partition("ANSWER ")[2]) for line in lines if "ANSWER " in line]


def test_tensors_are_swapped_out_and_in_by_deepspeeds_swapper(programs: Programs) -> None:
    found = run(
        programs,
        """
        import json, os
        import deepspeed, torch
        from deepspeed.ops.op_builder import AsyncIOBuilder
        from deepspeed.runtime.swap_tensor.async_swapper import AsyncTensorSwapper
        from deepspeed.runtime.swap_tensor.utils import swap_in_tensors

        deepspeed.init_distributed("gloo", verbose=False)
        module = AsyncIOBuilder().load()
        handle = module.aio_handle(1 << 20, 8, False, True, 2)
        swapper = AsyncTensorSwapper(handle, 1024, None)
        room = 1 << 20
        swapper.add_buffers([handle.new_cpu_locked_tensor(room, torch.empty(0)) for _ in range(2)])
        tensors = [torch.randn(size) for size in (1000, 300_000, 1 << 20, 700_001, 5)]
        paths = [os.path.abspath(f"swapped-{at}") for at in range(len(tensors))]
        swapper.swap_out_tensors(tensors, paths)
        for buffer in swapper.release_buffers():
            handle.free_cpu_locked_tensor(buffer)
        back = [handle.new_cpu_locked_tensor(os.path.getsize(path) // 4, torch.empty(0))
                for path in paths]
        swap_in_tensors(handle, back, paths)
        assert handle.wait() == len(back)
        same = [torch.equal(one, two[: one.numel()]) for one, two in zip(tensors, back)]
        print("ANSWER", json.dumps([type(module).__module__, same]))
        """,
        *RANKS, "1",
    )  # fmt: skip
    assert found == [["opkiln.compat.deepspeed.modules", [True] * 5]]


def test_evoformer_attention_of_deepspeed_runs_on_opkilns_op(programs: Programs) -> None:
    found = run(
        programs,
        """
        import json
        import torch
        from deepspeed.accelerator import get_accelerator
        from deepspeed.ops import op_builder
        from deepspeed.ops.op_builder.evoformer_attn import EvoformerAttnBuilder
        # DeepSpeed lists this builder for GPUs alone.
        op_builder.EvoformerAttnBuilder = EvoformerAttnBuilder
        from deepspeed.ops.deepspeed4science import DS4Sci_EvoformerAttention

        torch.manual_seed(0)
        B, N, S, H, D = 1, 3, 37, 2, 16
        shapes = [(B, N, S, H, D)] * 3 + [(B, N, 1, 1, S), (B, 1, H, S, S)]
        exact = [torch.randn(shape, dtype=torch.float64) for shape in shapes]

        def definition(q, k, v, b1, b2):
            scores = torch.einsum("...qhd,...khd->...hqk", q, k) / D**0.5 + b1 + b2
            return torch.einsum("...hqk,...khd->...qhd", scores.softmax(-1), v)

        def gradients(call, inputs):
            inputs = [x.clone().requires_grad_() for x in inputs]
            out = call(*inputs)
            (out * weight.to(out.dtype)).sum().backward()
            return [out.detach(), *(x.grad for x in inputs)]

        weight = torch.randn(shapes[0], dtype=torch.float64)
        rounded = [x.bfloat16() for x in exact]
        theirs = gradients(
            lambda q, k, v, b1, b2: DS4Sci_EvoformerAttention(q, k, v, [b1, b2]), rounded)
        right = gradients(definition, [x.double() for x in rounded])
        errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(theirs, right)]
        print("ANSWER", json.dumps(errors))
        """,
    )
    assert len(found[0]) == 6
    assert max(found[0]) < 2**-6, found


def test_ranks_of_deepspeed_add_up_through_shared_memory(programs: Programs) -> None:
    found = run(
        programs,
        """
        import json, os
        import deepspeed, torch
        deepspeed.init_distributed("gloo", verbose=False)
        rank = deepspeed.comm.get_rank()
        answer = []
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.full((1000, 33), rank + 1.0, dtype=dtype)
            deepspeed.comm.inference_all_reduce(x)
            answer.append([float(x.min()), float(x.max())])
        module = deepspeed.comm.comm.cdb.shm_comm_op
        # In one call, so that the ranks' lines do not mix.
        os.write(1, f"ANSWER {json.dumps([type(module).__module__, answer])}\\n".encode())
        """,
        *RANKS, "2",
    )  # fmt: skip
    assert len(found) == 2
    assert found == [["opkiln.compat.deepspeed.modules", [[3.0, 3.0]] * 2]] * 2
