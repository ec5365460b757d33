"""The accelerator on a machine with NVIDIA GPUs: one line per check. Needs torch, and no pytest.

PYTHONPATH=src python tests/gpu/accelerator.py
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


def _cuda_in_a_child(accelerator: object) -> int:
    """How a forked child ends that uses CUDA through its parent's accelerator."""
    child = os.fork()
    if child == 0:
        import torch

        import opkiln

        same = opkiln.get_accelerator()
        assert same is accelerator
        assert same.FloatTensor([1.0, 2.0]).sum().item() == 3
        same.synchronize()
        assert torch.cuda.is_initialized()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def main() -> int:
    began = time.perf_counter()
    import opkiln
    from opkiln.accelerator import detect

    imported = time.perf_counter()
    accelerator = opkiln.get_accelerator()
    found = time.perf_counter()
    opkiln.get_accelerator()
    again = time.perf_counter()
    print(
        f"import {(imported - began) * 1e3:.1f} ms, get_accelerator() "
        f"{(found - imported) * 1e3:.1f} ms, again {(again - found) * 1e6:.0f} us"
    )
    for answer in detect.trace():
        print(" ", answer)
    assert accelerator.name == "cuda", detect.survey()
    assert "torch" not in sys.modules, "detection imports torch"
    assert _cuda_in_a_child(accelerator) == 0, "CUDA fails in a child forked after detection"
    print("PASS import, get_accelerator(), fork: CUDA works in the child")

    import torch

    assert accelerator.is_available()
    count = accelerator.device_count()
    assert count >= 1
    assert detect.survey()[0].present
    assert not torch.cuda.is_initialized(), "asking what is there makes a context"
    assert _cuda_in_a_child(accelerator) == 0, "CUDA fails in a child forked after questions"
    print("PASS is_available(), device_count(), survey(), fork: CUDA works in the child")

    from sample import conformance

    wrong = conformance.failures(accelerator) + conformance.behaviours(accelerator)
    assert not wrong, "\n".join(wrong)
    print(f"PASS conformance on {accelerator.get_device_name()}: {len(conformance.CHECKS)} checks")

    from opkiln.accelerator.cpu import CpuAccelerator

    cpu = CpuAccelerator()
    wrong = conformance.failures(cpu) + conformance.behaviours(cpu)
    assert not wrong, wrong
    before = accelerator.get_rng_state()
    cpu.manual_seed_all(3)
    assert torch.equal(before, accelerator.get_rng_state()), "seeding the CPU seeds the GPU"
    opkiln.set_accelerator(cpu)
    assert opkiln.get_builder("fused_adam").backend == "cpu"
    opkiln.set_accelerator(None)
    assert opkiln.get_builder("fused_adam").backend == "cuda"
    print("PASS the CPU beside it; builders follow set_accelerator()")

    free, total = accelerator.available_memory() >> 30, accelerator.total_memory() >> 30
    print(f"bf16 {accelerator.is_bf16_supported()}, fp8 {accelerator.is_fp8_supported()}, "
          f"triton {accelerator.is_triton_supported()}, {free} of {total} GiB free")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
