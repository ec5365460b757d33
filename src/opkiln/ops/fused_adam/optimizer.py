"""``FusedAdam``: the optimizer over ``fused_adam``, with the arguments of DeepSpeed's."""

from __future__ import annotations

from opkiln.ops.fused_adam.op import FusedAdamBuilder
from opkiln.ops.optimizing.base import Adam
from opkiln.ops.optimizing.fused_optimizer import FusedOptimizer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim.optimizer import ParamsT


class FusedAdam(Adam, FusedOptimizer):
    """Adam (``adam_w_mode=False``) or AdamW, all parameters of a group and device in one call.

    Parameters are fp32, bf16 or fp16, on GPUs or the CPU, mixed as you like. States and arithmetic
    are fp32. With ``master_weights``, 16-bit parameters have an fp32 copy in their state which is
    stepped in their place. State dicts are interchangeable with those of ``torch.optim.Adam`` and
    ``AdamW``.

    A step never waits for a GPU. After a first step it can be captured in a CUDA graph: the count
    of steps is on the device, and if ``lr`` is a tensor on the parameters' device, each replay
    reads it there. ``torch.amp.GradScaler`` passes its scale to the op, and whether a gradient is
    infinite: if so, nothing changes and the step is not counted. With ``max_grad_norm``, gradients
    are clipped to that norm over all parameters; they are not written to. Parameters that have made
    all their steps together share the tensor ``step`` of their states: replace it rather than write
    to it. States of small parameters share their memory. The native op is loaded (and built, if
    need be) at the first step. If that is impossible, the PyTorch reference runs instead, with one
    warning.

    Raises UsageError, naming the argument or parameter: a hyperparameter out of range,
    ``amsgrad=True``, a parameter elsewhere or of another type, a sparse gradient, a capture that
    would have to make states.
    """

    OWNER = "FusedAdam"
    BUILDER = FusedAdamBuilder

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        *,
        maximize: bool = False,
        master_weights: bool = False,
        max_grad_norm: float = 0.0,
    ) -> None:
        super().__init__(
            params, lr=lr, bias_correction=bias_correction, betas=betas, eps=eps,
            weight_decay=weight_decay, amsgrad=amsgrad,
            decoupled_weight_decay=adam_w_mode,  # torch's name for it: state dicts carry it over
            maximize=maximize,
            master_weights=master_weights, set_grad_none=set_grad_none, max_grad_norm=max_grad_norm,
        )  # fmt: skip
