"""Steps of every optimizer under torch's ways to train on several ranks, beside one process alone.

Run as a program, it prints the table of docs/optimizers.md:

    PYTHONPATH=src python tests/ops/distributed_ranks.py [--reference] [--part PART] [--json FILE]

Two ranks train a small model in each way, each rank on its half of every batch; one process alone
averages the gradients of the halves itself. Sums of two gradients and halves of them are the same
in any order, so that the two have the same gradients to the last bit, and whatever differs in the
end is the optimizer's. Then four ranks go on from the checkpoints of the two.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import logging
import multiprocessing
import tempfile
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo  # DDP and FSDP import it: once here, and not in each rank
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_cells import (
    OPTIMIZERS,
    PARTS,
    REFUSED,
    SAVED_AFTER,
    STEPS,
    TORCHS,
    allowed,
    cells,
)
from sharded_pairs import BY_HAND, class_of, difference, optimizer_of, serve
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# One process alone


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Weights of 3 rows and of 1 do not divide evenly: some ranks have nothing of them."""
    torch.manual_seed(0)
    layers = (nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 1))
    return nn.Sequential(*layers).to(dtype)


def loss_of(model: nn.Module, step: int, half: int) -> Tensor:
    generator = torch.Generator().manual_seed(2 * step + half)
    batch = torch.randn(8, 4, generator=generator).to(next(model.parameters()).dtype)
    loss: Tensor = (model(batch) - batch.sum(1, keepdim=True)).square().sum()
    return loss


def give_mean_gradients(model: nn.Module, step: int) -> None:
    halves = []
    for half in range(2):
        model.zero_grad()
        loss_of(model, step, half).backward()
        halves.append([param.grad for param in model.parameters()])
    for param, one, other in zip(model.parameters(), *halves, strict=True):
        assert one is not None
        assert other is not None
        param.grad = (one + other) / 2


def alone(name: str, steps: int = STEPS) -> list[Tensor]:
    """The parameters after so many steps in one process."""
    model = network()
    optimizer = optimizer_of(name, model.parameters())
    for step in range(steps):
        give_mean_gradients(model, step)
        optimizer.step()
    return [param.detach() for param in model.parameters()]


# Several ranks: each returns the difference to one process alone


def train(model: nn.Module, optimizer: Any, steps: Iterable[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, dist.get_rank() % 2).backward()
        optimizer.step()


def ddp(name: str, _: Path) -> float:
    model = DistributedDataParallel(network())
    train(model, optimizer_of(name, model.parameters()), range(STEPS))
    return difference(model.parameters(), alone(name))


def fsdp1_model(use_orig_params: bool) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        network(), device_id=torch.device("cpu"), use_orig_params=use_orig_params
    )


def fsdp1(name: str, _: Path) -> float:
    found = []
    for use_orig_params in (False, True):
        model = fsdp1_model(use_orig_params)
        train(model, optimizer_of(name, model.parameters()), range(STEPS))
        with FullyShardedDataParallel.summon_full_params(model):
            found.append(difference(model.parameters(), alone(name)))
    return max(found)


def fsdp2_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = network(dtype)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp2(name: str, _: Path) -> float:
    model = fsdp2_model()
    train(model, optimizer_of(name, model.parameters()), range(STEPS))
    return difference(model.parameters(), alone(name))


def zero(name: str, _: Path) -> float:
    found = []
    for bucket_view in (False, True):
        model = DistributedDataParallel(network())
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=class_of(name),
            parameters_as_bucket_view=bucket_view, **OPTIMIZERS[name],
        )  # fmt: skip
        train(model, optimizer, range(SAVED_AFTER))
        optimizer.consolidate_state_dict(to=0)
        saved = [optimizer.state_dict() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(saved)
        optimizer.load_state_dict(copy.deepcopy(saved[0]))
        train(model, optimizer, range(SAVED_AFTER, STEPS))
        found.append(difference(model.parameters(), alone(name)))
    return max(found)


# Flat: FSDP1 gives ranks other than the first no groups in the nested form, torch's optimizers too.
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def _state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=_FLAT),
    }


def _restore(model: nn.Module, optimizer: Any, directory: Path) -> None:
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=directory)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=_FLAT)


def _resumed(name: str, at: Path, make: Callable[[], nn.Module]) -> nn.Module:
    """Trained to a checkpoint, and from it on by another model and optimizer."""
    model = make()
    optimizer = optimizer_of(name, model.parameters())
    train(model, optimizer, range(SAVED_AFTER))
    dcp.save(_state(model, optimizer), checkpoint_id=at)
    model = make()
    optimizer = optimizer_of(name, model.parameters(), lr=0.5)
    _restore(model, optimizer, at)
    train(model, optimizer, range(SAVED_AFTER, STEPS))
    return model


def ddp_checkpoint(name: str, directory: Path) -> float:
    model = _resumed(name, directory / "ddp" / name, lambda: DistributedDataParallel(network()))
    return difference(model.parameters(), alone(name))


def fsdp1_checkpoint(name: str, directory: Path) -> float:
    model = _resumed(name, directory / "fsdp1" / name, lambda: fsdp1_model(use_orig_params=True))
    with FullyShardedDataParallel.summon_full_params(model):
        return difference(model.parameters(), alone(name))


def fsdp2_checkpoint(name: str, directory: Path) -> float:
    model = _resumed(name, directory / "fsdp2" / name, fsdp2_model)
    return difference(model.parameters(), alone(name))


def resharded(name: str, directory: Path) -> float:
    model = fsdp2_model()
    optimizer = optimizer_of(name, model.parameters(), lr=0.5)
    _restore(model, optimizer, directory / "fsdp2" / name)
    twin = network()
    theirs = optimizer_of(name, twin.parameters())
    for step in range(STEPS):
        give_mean_gradients(twin, step)
        if step >= SAVED_AFTER:
            for param, other in zip(model.parameters(), twin.parameters(), strict=True):
                assert isinstance(param, DTensor)
                assert other.grad is not None
                param.grad = distribute_tensor(other.grad, param.device_mesh, param.placements)
            optimizer.step()
        theirs.step()
    return difference(model.parameters(), twin.parameters())


WAYS: dict[str, Callable[[str, Path], float]] = {
    "DDP": ddp,
    "FSDP1": fsdp1,
    "FSDP2": fsdp2,
    "ZeroRedundancyOptimizer": zero,
    "DDP, checkpoint": ddp_checkpoint,
    "FSDP1, checkpoint": fsdp1_checkpoint,
    "FSDP2, checkpoint": fsdp2_checkpoint,
    "FSDP2, checkpoint to 4 ranks": resharded,
}
# Starting ranks


def _rank(rank: int, ranks: int, part: str, directory: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable()
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store{ranks}", rank=rank, world_size=ranks,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    results = {}
    runs = {**WAYS, **BY_HAND}
    for cell in cells(ranks, part):
        way, name = cell.split("/")
        try:
            results[cell] = {"difference": runs[way](name, directory)}
        except (Exception, dcp.api.CheckpointException) as error:
            results[cell] = {
                "error": f"{type(error).__name__}: {error}",
                "traceback": traceback.format_exc(),
            }
        every: list[Any] = [None] * ranks
        dist.all_gather_object(every, results[cell])
        # What failed on any rank has failed; of what did not, the largest difference.
        results[cell] = max(every, key=lambda r: ("error" in r, r.get("difference", 0.0)))
    dist.destroy_process_group()
    if rank == 0:
        (directory / f"results{ranks}.json").write_text(json.dumps(results))


def run_all(reference: bool, part: str) -> dict[str, dict[str, Any]]:
    """The cells of a part, or all, by name: its ``difference``, or its ``error``."""
    serve(reference)
    context = multiprocessing.get_context("fork")  # torch is imported once
    gc.freeze()  # and shared: a collection in a rank would write to all its objects
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        for ranks in (2, 4):
            children = [
                context.Process(target=_rank, args=(rank, ranks, part, Path(name)))
                for rank in range(ranks)
            ]
            for child in children:
                child.start()
            for child in children:
                child.join()
            assert [child.exitcode for child in children] == [0] * ranks
            results.update(json.loads((Path(name) / f"results{ranks}.json").read_text()))
    return results


def verdict(cell: str, result: dict[str, Any]) -> str:
    if cell in REFUSED:
        return "refused" if "FullyShardedDataParallel" in result.get("error", "") else "FAIL"
    if "error" in result:
        return "FAIL"
    return f"{result['difference']:.0e}".replace("0e+00", "0") + (
        " PASS" if result["difference"] <= allowed(cell) else " FAIL"
    )


def table(results: dict[str, dict[str, Any]]) -> str:
    """The ways to train, by optimizer, in Markdown."""
    lines = [f"| | {' | '.join(WAYS)} |", "|---" * (len(WAYS) + 1) + "|"]
    for name in OPTIMIZERS:
        shown = f"`torch.optim.{name}`" if name in TORCHS else f"`{name}`"
        cells = (verdict(f"{way}/{name}", results[f"{way}/{name}"]) for way in WAYS)
        lines.append(f"| {shown} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("--part", choices=PARTS, default="")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = run_all(arguments.reference, arguments.part)
    if arguments.json:
        arguments.json.write_text(json.dumps(results))
    if not arguments.part:
        print(table(results))
    for cell, result in results.items():
        if verdict(cell, result) in ("FAIL", "refused"):
            print(f"{cell}: {result.get('error', result)}")


if __name__ == "__main__":
    main()
