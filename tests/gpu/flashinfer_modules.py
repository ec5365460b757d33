"""FlashInfer's norm, activation, rope, page and sampling, built by opkiln and compared with torch.

    FLASHINFER_WORKSPACE_BASE=/tmp/one FLASHINFER_CUDA_ARCH_LIST=9.0a PYTHONPATH=src:FOLDER \
        python -m opkiln run python tests/gpu/flashinfer_modules.py
    FLASHINFER_WORKSPACE_BASE=/tmp/other … the same once more

FOLDER has FlashInfer and what it imports, see tests/with_jits/folder.py. Each check is a process of
its own, and all build at once; ``--only norm`` is one of them. A line for each check says what its
first call took and how many compilers, linkers and ninjas the process started. With a second
workspace that is 0. The exit code is 0 when every check passed or says why it could not be made,
otherwise 1.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from checks import Skipped, main

os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")  # the CUDA sources, and not the CuTe DSL
# A toolkit may be without cuBLAS and cuRAND: torch's wheels have their headers.
WHEELS = Path(torch.__file__).parents[1] / "nvidia" / "cu13" / "include"
if WHEELS.exists():
    os.environ.setdefault("FLASHINFER_EXTRA_CUDAFLAGS", f"-Xcompiler -idirafter,{WHEELS}")
STARTED: list[str] = []  # compilers, and shells for them


def watch(event: str, given: tuple[Any, ...]) -> None:
    if event in ("subprocess.Popen", "os.posix_spawn"):
        words = given[1] if len(given) > 1 else ()
        text = " ".join(map(str, words)) if not isinstance(words, str) else words
        if any(name in text for name in ("nvcc", "c++", "ninja")) and "--version" not in text:
            STARTED.append(text)


sys.addaudithook(watch)


def flashinfer() -> Any:
    try:
        import flashinfer as found
    except ImportError as error:
        raise Skipped(f"FlashInfer cannot be imported: {error}") from error
    return found


def random(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator).to("cuda", dtype)


def timed(call: Any) -> tuple[Any, str]:
    """What a call gives, and what the first one took: it builds, or finds, the module."""
    begin = time.perf_counter()
    made = call()
    torch.cuda.synchronize()
    return made, f"{time.perf_counter() - begin:.2f} s, {len(STARTED)} started"


def check_norm() -> str:
    x, weight = random(16, 1024), random(1024)
    found, said = timed(lambda: flashinfer().norm.rmsnorm(x, weight, 1e-6))
    whole = x.float()
    expected = whole * torch.rsqrt(whole.square().mean(-1, keepdim=True) + 1e-6) * weight.float()
    torch.testing.assert_close(found.float(), expected, rtol=2e-3, atol=2e-3)
    return said


def check_activation() -> str:
    x = random(16, 2048)
    found, said = timed(lambda: flashinfer().activation.silu_and_mul(x))
    gate, value = x.float().chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * value
    torch.testing.assert_close(found.float(), expected, rtol=2e-3, atol=2e-3)
    return said


def check_rope() -> str:
    q, k = random(16, 4, 64), random(16, 2, 64)
    places = torch.arange(16, device="cuda", dtype=torch.int32)
    found, said = timed(lambda: flashinfer().rope.apply_rope_pos_ids(q, k, places))
    frequencies = 1e4 ** (-torch.arange(0, 64, 2, device="cuda").float() / 64)
    angles = places.float()[:, None] * frequencies
    cos, sin = (part.repeat(1, 2)[:, None] for part in (angles.cos(), angles.sin()))
    for mine, given in zip(found, (q, k), strict=True):
        one, other = given.float().chunk(2, -1)
        expected = given.float() * cos + torch.cat((-other, one), -1) * sin
        torch.testing.assert_close(mine.float(), expected, rtol=3e-3, atol=3e-3)
    return said


def check_page() -> str:
    """Seven tokens of one sequence into pages of four."""
    keys, values = random(7, 2, 64), random(7, 2, 64) + 1
    cache = torch.zeros(2, 2, 4, 2, 64, device="cuda", dtype=torch.float16)

    def numbers(*given: int) -> torch.Tensor:
        return torch.tensor(given, device="cuda", dtype=torch.int32)

    arguments = (numbers(*[0] * 7), numbers(*range(7)), cache, numbers(1, 0), numbers(0, 2))
    call = flashinfer().page.append_paged_kv_cache
    _, said = timed(lambda: call(keys, values, *arguments, numbers(3)))
    for place, given in enumerate((keys, values)):
        stored = torch.cat((cache[1, place], cache[0, place]))[:7]
        assert torch.equal(stored, given)
    return said


def check_sampling() -> str:
    probabilities = torch.softmax(random(8, 512, dtype=torch.float32), -1)
    call = flashinfer().sampling.top_k_renorm_probs
    found, said = timed(lambda: call(probabilities, 10))
    kept, where = probabilities.topk(10, -1)
    expected = torch.zeros_like(probabilities).scatter(-1, where, kept)
    expected /= expected.sum(-1, keepdim=True)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    return said


CHECKS = (check_norm, check_activation, check_rope, check_page, check_sampling)


def run_all() -> int:
    """All checks at once: a module has two or three sources, and the machine more CPUs."""
    names = [check.__name__.removeprefix("check_") for check in CHECKS]
    started = [subprocess.Popen([sys.executable, __file__, "--only", name]) for name in names]
    return max(each.wait() for each in started)


if __name__ == "__main__":
    sys.exit(main(CHECKS, __doc__) if sys.argv[1:] else run_all())
