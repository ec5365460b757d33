"""Optimizers over DTensors of any placement, each beside one over the same tensors, whole.

distributed_ranks.py runs these on the ranks that it starts.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from distributed_cells import FUSED, OPTIMIZERS, TORCHS
from sample.references import references
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import opkiln
from opkiln import optim
from opkiln.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

_OPS = {
    "CPUAdam": "cpu_adam",
    "CPUAdagrad": "cpu_adagrad",
    "CPULion": "cpu_lion",
    "FusedAdam": "fused_adam",
    "FusedLion": "fused_lion",
    "FusedLamb": "fused_lamb",
}


def class_of(name: str) -> Any:
    return getattr(torch.optim if name in TORCHS else optim, name)


def optimizer_of(name: str, params: Iterable[Any], **more: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = class_of(name)(params, **{**OPTIMIZERS[name], **more})
    return optimizer


def serve(reference: bool) -> None:
    """Have the optimizers run on their references, or on native ops, which are built here."""
    for name, op in _OPS.items():
        native = partial(opkiln.get_builder(op).jit_load, verbose=False)
        functions = references(op) if reference else native()
        getattr(optim, name)._ops = {"cpu": functions}


def difference(got: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """The largest of all elements, NaN where there is one."""
    found = 0.0
    for tensor, other in zip(got, expected, strict=True):
        one = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert one.shape == other.shape, (one.shape, other.shape)
        here = (one.detach().double() - other.detach().double()).abs()
        found = max(found, float(here.max())) if here.numel() else found
        assert not here.isnan().any()
    return found


SHAPES = ((3, 5), (1, 7), (4, 4), (5,), (2, 1, 3))


def _drawn(step: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


class Pair:
    """Parameters placed over a mesh, and whole ones; an optimizer for each."""

    def __init__(
        self, name: str, mesh: Any, placements: tuple[Any, ...], dtype: torch.dtype = torch.float32,
        **more: Any,
    ) -> None:  # fmt: skip
        self.mesh, self.dtype = mesh, dtype
        self.whole = [_drawn(0, shape, dtype).requires_grad_() for shape in SHAPES]
        self.sharded = [
            distribute_tensor(param.detach(), mesh, self.places(param, placements)).requires_grad_()
            for param in self.whole
        ]
        self.theirs, self.ours = (
            optimizer_of(name, params, **more) for params in (self.whole, self.sharded)
        )
        self.made = 0

    @staticmethod
    def places(param: Tensor, placements: tuple[Any, ...]) -> list[Any]:
        """These, with dimensions that the tensor has."""
        last = param.dim() - 1
        return [
            Shard(min(each.dim, last)) if isinstance(each, Shard) else each for each in placements
        ]

    def give_gradients(self, placements: tuple[Any, ...] | None = None, scale: float = 1) -> None:
        self.made += 1
        for param, shard in zip(self.whole, self.sharded, strict=True):
            param.grad = _drawn(self.made, tuple(param.shape), self.dtype) * scale
            places = shard.placements if placements is None else self.places(param, placements)
            if any(each.is_partial() for each in places):
                # Halves are exact, and so is their sum.
                part = param.grad / 2 ** sum(each.is_partial() for each in places)
                shard.grad = DTensor.from_local(part, self.mesh, places)
            else:
                shard.grad = distribute_tensor(param.grad, self.mesh, places)

    def step(self, **more: Any) -> None:
        self.theirs.step()
        self.ours.step(**more)

    def difference(self) -> float:
        for param in self.sharded:
            for state in self.ours.state[param].values():
                if isinstance(state, Tensor) and state.dim():
                    assert isinstance(state, DTensor), type(state)
                    assert state.placements == param.placements
        return difference(self.sharded, self.whole)


def refusal(call: Callable[[], Any]) -> str:
    """What a call that must be refused says."""
    try:
        call()
    except UsageError as error:
        return str(error)
    raise AssertionError("it was not refused")


def _placed(*placements: Any) -> Callable[[str, Path], float]:
    def run(name: str, _: Path) -> float:
        shape = (2,) * len(placements)
        pair = Pair(name, init_device_mesh("cpu", shape), placements)
        for _step in range(4):
            pair.give_gradients()
            pair.step()
        return pair.difference()

    return run


def gradients_placed_otherwise(name: str, _: Path) -> float:
    pair = Pair(name, init_device_mesh("cpu", (2,)), (Shard(0),))
    for places in (Replicate(), Partial(), Shard(1), Shard(0)):
        pair.give_gradients((places,))
        pair.step()
    return pair.difference()


def refusals(name: str, _: Path) -> float:
    """Each names the parameter and says what is where."""
    mesh = init_device_mesh("cpu", (2,))
    terms = DTensor.from_local(torch.ones(4), mesh, [Partial()]).requires_grad_()
    said = refusal(lambda: optimizer_of(name, [torch.ones(2, requires_grad=True), terms]))
    assert "param_groups[0]['params'][1] is a DTensor (Partial(sum))" in said, said
    pair = Pair(name, mesh, (Shard(0),))
    pair.sharded[0].grad = torch.ones(3, 5)
    said = refusal(pair.ours.step)
    assert "the gradient of param_groups[0]['params'][0] is an ordinary tensor" in said, said
    pair.give_gradients()
    pair.step()
    for optimizer, other in ((pair.ours, pair.theirs), (pair.theirs, pair.ours)):
        before = optimizer.state_dict()["state"][0]["step"].item()
        said = refusal(partial(optimizer.load_state_dict, other.state_dict()))
        assert "an ordinary tensor" in said, said
        assert "StateDictOptions(full_state_dict=True)" in said, said
        assert optimizer.state_dict()["state"][0]["step"].item() == before
    pair.give_gradients()
    pair.step()
    return pair.difference()


def narrow_parameters(name: str, _: Path) -> float:
    """16-bit parameters with fp32 states, and masters where there are some."""
    more = {"master_weights": True} if name in FUSED else {}
    pair = Pair(name, init_device_mesh("cpu", (2,)), (Shard(0),), torch.bfloat16, **more)
    for _step in range(4):
        pair.give_gradients()
        pair.step()
    for param in pair.sharded:
        for entry, state in pair.ours.state[param].items():
            assert entry == "step" or state.dtype == torch.float32
    return pair.difference()


def clipped(name: str, _: Path) -> float:
    """The norm is that of all gradients, over all ranks, each element once."""
    found = []
    for placements in ((Shard(0),), (Replicate(),)):
        mesh = init_device_mesh("cpu", (2,))
        pair = Pair(name, mesh, placements, max_grad_norm=0.5, lr=0.1)
        for _step in range(4):
            pair.give_gradients(scale=1 + _step)
            pair.step()
        found.append(pair.difference())
    return max(found)


def scaled(name: str, _: Path) -> float:
    """torch.amp's scaler: an infinite gradient on one rank skips the step on all."""
    pair = Pair(name, init_device_mesh("cpu", (2,)), (Shard(0),))
    ours, theirs = (torch.amp.GradScaler("cpu", init_scale=4.0) for _each in range(2))
    for each in (ours, theirs):
        each.scale(torch.ones(()))  # makes its tensors
    for step in range(4):
        pair.give_gradients(scale=4.0)
        if step == 1:
            for params in (pair.whole, pair.sharded):
                first = params[0].grad
                part = first.to_local() if isinstance(first, DTensor) else first
                if dist.get_rank() == 0 or part is first:
                    part[0, 0] = torch.inf
        for scaler, optimizer in ((theirs, pair.theirs), (ours, pair.ours)):
            scaler.step(optimizer)
            scaler.update(4.0)
    assert float(pair.ours.state[pair.sharded[0]]["step"]) == 3
    return pair.difference()


def host_only(name: str, _: Path) -> float:
    """Copies, a step in the background, and taking it back."""
    pair = Pair(name, init_device_mesh("cpu", (2,)), (Shard(0),))
    for _step in range(3):
        pair.give_gradients()
        pair.step()
    copies = [
        {param: torch.empty_like(param, dtype=torch.bfloat16) for param in params}
        for params in (pair.whole, pair.sharded)
    ]
    pair.give_gradients()
    pair.theirs.step_in_background(copies=copies[0]).wait()
    pair.ours.step_in_background(copies=copies[1]).wait()
    found = difference(copies[1].values(), copies[0].values())
    for optimizer in (pair.theirs, pair.ours):
        optimizer.rollback()
    return max(found, pair.difference())


def kept_lists(name: str, _: Path) -> float:
    """They serve DTensors, and are let go when one has another local tensor."""
    pair = Pair(name, init_device_mesh("cpu", (2,)), (Shard(0),))
    native = not isinstance(getattr(optim, name)._ops["cpu"], SimpleNamespace)
    for step in range(6):
        if step == 4:
            assert not native or pair.ours._plans.of_group[0] is not None, "no lists were kept"
            for param in pair.sharded:
                param._local_tensor = param._local_tensor.clone()
        pair.give_gradients()
        pair.step()
    return pair.difference()


def mixed_parameters(name: str, _: Path) -> float:
    """DTensors of two meshes and ordinary tensors in one group."""
    flat, other = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    pair, more = Pair(name, flat, (Shard(0),)), Pair(name, other, (Replicate(), Shard(1)))
    plain = [_drawn(0, (6,)).requires_grad_() for _each in range(2)]
    whole = optimizer_of(name, [*pair.whole, plain[0], *more.whole])
    sharded = optimizer_of(name, [*pair.sharded, plain[1], *more.sharded])
    for step in range(3):
        pair.give_gradients()
        more.give_gradients()
        for param in plain:
            param.grad = _drawn(step, (6,))
        whole.step()
        sharded.step()
    return max(
        difference(pair.sharded, pair.whole), difference(more.sharded, more.whole),
        difference(plain[1:], plain[:1]),
    )  # fmt: skip


BY_HAND: dict[str, Callable[[str, Path], float]] = {
    "Shard(1)": _placed(Shard(1)),
    "Replicate": _placed(Replicate()),
    "Shard(0) x Replicate": _placed(Shard(0), Replicate()),
    "Replicate x Shard(0)": _placed(Replicate(), Shard(0)),
    "Shard(0) x Shard(1)": _placed(Shard(0), Shard(1)),
    "Shard(0) x Shard(0)": _placed(Shard(0), Shard(0)),
    "gradients placed otherwise": gradients_placed_otherwise,
    "mixed parameters": mixed_parameters,
    "16-bit parameters": narrow_parameters,
    "refusals": refusals,
    "max_grad_norm": clipped,
    "GradScaler": scaled,
    "copies, background, rollback": host_only,
    "kept lists": kept_lists,
}
