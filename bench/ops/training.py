"""A small transformer, trained 200 steps by any optimizer: the loss of each step.

Data, start and order are always the same, so that two curves differ by the optimizers' arithmetic
alone. Used by the tests, by ``loss_curves.py`` and on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

STEPS = 200
WORDS, LENGTH, BATCH, WIDTH, HEADS, LAYERS = 24, 16, 16, 32, 2, 2


class Layer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x)).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norms[1](x))


class Transformer(nn.Module):
    """Predicts each next word of a batch of sentences; gives the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, sentences: Tensor) -> Tensor:
        x = self.layers(self.words(sentences[:, :-1]) + self.places)
        scores = self.head(self.norm(x))
        return nn.functional.cross_entropy(scores.flatten(0, 1), sentences[:, 1:].flatten())


class Lion(torch.optim.Optimizer):
    """Lion as one writes it with torch, which has none: what CPULion and FusedLion must match."""

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, betas: tuple[float, float],
        weight_decay: float,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                average = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                direction = average.lerp(param.grad, 1 - beta1).sign_()
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(
                    direction, alpha=group["lr"]
                )
                average.lerp_(param.grad, 1 - beta2)


class Lamb(torch.optim.Optimizer):
    """LAMB's formula in float64, states and all: torch has none for FusedLamb to match."""

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, weight_decay: float,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        bounds: tuple[float, float] = (0.01, 10.0),
    ) -> None:  # fmt: skip
        defaults = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        super().__init__(params, {**defaults, "bounds": bounds})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self._step(param, self.state[param], group)

    def _step(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        assert param.grad is not None
        p, g = param.double(), param.grad.double()
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        m = state["exp_avg"] = beta1 * state["exp_avg"] + (1 - beta1) * g
        v = state["exp_avg_sq"] = beta2 * state["exp_avg_sq"] + (1 - beta2) * g * g
        root = (v / (1 - beta2 ** state["step"])).sqrt() + group["eps"]
        change = m / (1 - beta1 ** state["step"]) / root + group["weight_decay"] * p
        sizes = torch.linalg.vector_norm(p), torch.linalg.vector_norm(change)
        bounded = (sizes[0] / sizes[1]).clamp(*group["bounds"])
        ratio = torch.where((sizes[0] == 0) | (sizes[1] == 0), 1.0, bounded)
        param.copy_(p - group["lr"] * ratio * change)


Maker = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Contest(NamedTuple):
    """An optimizer here, by its options, and one of torch's or in torch that must give the same
    losses."""

    options: dict[str, Any]
    theirs: Maker
    rival: str  # what a picture calls it

    def ours(self, kind: Any) -> Maker:
        """What makes the optimizer, given its class."""
        return lambda params: kind(params, **self.options)


ADAM = {"lr": 3e-3, "weight_decay": 0.01}
ADAGRAD = {"lr": 3e-2}
LION: dict[str, Any] = {"lr": 5e-4, "betas": (0.9, 0.99), "weight_decay": 0.1}
LAMB = {"lr": 1e-2, "weight_decay": 0.01}
_ADAM = Contest(ADAM, lambda params: torch.optim.AdamW(params, **ADAM), "torch AdamW")
_ADAGRAD = Contest(ADAGRAD, lambda params: torch.optim.Adagrad(params, **ADAGRAD), "torch Adagrad")
_LION = Contest(LION, lambda params: Lion(params, **LION), "Lion in torch")
CONTESTS = {
    "CPUAdam": _ADAM,
    "CPUAdagrad": _ADAGRAD,
    "CPULion": _LION,
    "FusedAdam": _ADAM,
    "FusedLion": _LION,
    "FusedLamb": Contest(LAMB, lambda params: Lamb(params, **LAMB), "LAMB in float64"),
}


def sentences(step: int, device: torch.device | str) -> Tensor:
    """Each word follows from the two before it, but for one in ten."""
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=generator)
    noise = torch.rand(BATCH, LENGTH + 1, generator=generator) < 0.1
    for i in range(2, LENGTH + 1):
        follows = (3 * words[:, i - 1] + words[:, i - 2]) % WORDS
        words[:, i] = torch.where(noise[:, i], words[:, i], follows)
    return words.to(device)


def losses(
    make: Maker,
    *,
    device: torch.device | str = "cpu",
    steps: int = STEPS,
    backend: str | None = None,
) -> list[float]:
    """The loss before each step. With a ``backend`` of torch.compile both the model and the
    optimizer's step are compiled."""
    torch.manual_seed(0)
    model = Transformer().to(device)
    optimizer = make(list(model.parameters()))
    forward: Any = model
    step: Any = optimizer.step
    if backend is not None:
        forward, step = torch.compile(model, backend=backend), torch.compile(step, backend=backend)
    found = []
    for i in range(steps):
        optimizer.zero_grad()
        loss = forward(sentences(i, device))
        loss.backward()
        step()
        found.append(loss.detach())
    return [float(loss) for loss in found]
