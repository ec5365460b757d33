"""In one process: the AdamW steps of every system, interleaved, on equal parameters.

``child_adam.py CASE REPEATS STREAM_LIBRARY``. A system that cannot be set up is named with the
reason; one whose parameters end up elsewhere than torch's fails too, since it did other work.
"""

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import streams
import torch

HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
CASES: dict[str, list[tuple[int, ...]]] = {
    "one": [(64 << 20,)],
    "mixed": [(1024,)] * 500 + [(512, 512)] * 100,
}
WARMUP = 3
Step = Callable[[], Any]


def parameters(case: str) -> list[torch.nn.Parameter]:
    """The same parameters with the same gradients at every call."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in CASES[case]:
        parameter = torch.nn.Parameter(torch.randn(shape, generator=generator))
        parameter.grad = torch.randn(shape, generator=generator)
        made.append(parameter)
    return made


def opkiln(made: list[torch.nn.Parameter]) -> Step:
    """opkiln.optim.CPUAdam."""
    from opkiln.optim import CPUAdam

    step: Step = CPUAdam(made, **HYPER).step
    return step


def fused(made: list[torch.nn.Parameter]) -> Step:
    """torch.optim.AdamW(fused=True)."""
    return torch.optim.AdamW(made, fused=True, **HYPER).step


def deepspeed(made: list[torch.nn.Parameter]) -> Step:
    """DeepSpeedCPUAdam in AdamW mode."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    step: Step = DeepSpeedCPUAdam(made, adamw_mode=True, **HYPER).step
    return step


def stream(made: list[torch.nn.Parameter]) -> Step:
    """The loop of sources/optimizer_streams.cpp."""
    states = [[torch.zeros_like(p) for p in made] for _ in range(2)]
    grads = [p.grad for p in made if p.grad is not None]
    lists: list[list[torch.Tensor]] = [[p.data for p in made], grads, *states]
    numbers = (HYPER["lr"], *HYPER["betas"], HYPER["eps"], HYPER["weight_decay"])
    return streams.stepping(Path(sys.argv[3]), "adamw_stream", lists, numbers, counted=True)


SYSTEMS = {"opkiln": opkiln, "fused": fused, "deepspeed": deepspeed, "stream": stream}


def agree(mine: list[torch.nn.Parameter], theirs: list[torch.nn.Parameter]) -> float:
    """The largest difference between two parameter lists."""
    return max(float((a - b).detach().abs().max()) for a, b in zip(mine, theirs, strict=True))


def main(case: str, repeats: int) -> None:
    """Set up, warm up, then rounds in which every system steps once, in a shuffled order."""
    steps: dict[str, Step] = {}
    owned: dict[str, list[torch.nn.Parameter]] = {}
    failures: dict[str, str] = {}
    for name, make in SYSTEMS.items():
        made = parameters(case)
        try:
            step = make(made)
            for _ in range(WARMUP):
                step()
        except Exception as error:  # a system that is missing or broken is a row of the table
            failures[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        steps[name], owned[name] = step, made
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)
    for _ in range(repeats):
        names = list(steps)
        order.shuffle(names)
        for name in names:
            time.sleep(0.01)  # the threads of the system before spin for a while
            begin = time.perf_counter()
            steps[name]()
            times[name].append(time.perf_counter() - begin)
    for name in [name for name in owned if name != "fused"]:
        # Each step moves a parameter by about lr; arithmetic in another order by far less.
        apart = agree(owned[name], owned["fused"])
        if not apart < 1e-4:
            failures[name] = f"ended {apart:.2g} from torch's parameters after the same steps"
            del times[name]
    answer = {
        "times": times,
        "failures": failures,
        "elements": sum(p.numel() for p in owned["fused"]),
        "threads": torch.get_num_threads(),
    }
    print("\nBENCH-ANSWER " + json.dumps(answer), flush=True)


main(sys.argv[1], int(sys.argv[2]))
